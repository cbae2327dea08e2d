"""The tensors of a training state by name: a module's, their gradients, and optimizer state.

Wrappers are replaced by the tensors that `__tensor_flatten__` names (DTensor, torchao). Tensors of
other classes count if they have memory, with the tensors among their attributes (bitsandbytes,
MaskedTensor).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from speedtorch.layers.access_tracker import is_plain_tensor
from speedtorch.step.row_weight import RowWeight
from speedtorch.torch_internals import buffers_of, fully_sharded, unsaved_buffers_of

__all__ = [
    "PARTS",
    "StatePart",
    "StateTensors",
    "plain_tensors",
    "state_tensors",
    "stays_on_cpu",
    "within_frozen",
    "wrappers_in",
]

StatePart: TypeAlias = Literal["weights", "gradients", "optimizer"]
"""Parameters and buffers; the gradients of parameters; what optimizers keep of each parameter."""
PARTS: tuple[StatePart, ...] = get_args(StatePart)

# Objects may have tensors of their own, as bitsandbytes' QuantState has, but for these.
_NO_RECORDS = nn.Module, Optimizer, type, torch.dtype, torch.device


class StateTensors(NamedTuple):
    """The plain tensors of each part by name; `unsaved` are buffers that no state_dict() has."""

    of: dict[StatePart, dict[str, Tensor]]
    frozen: set[str]
    unsaved: set[str]


def state_tensors(module: nn.Module, optimizers: Sequence[Optimizer]) -> StateTensors:
    """Finds them; the rows of an Embedding and their state are left out."""
    found = StateTensors({part: {} for part in PARTS}, set(), set())
    weights, gradients, kept_by_optimizers = found.of.values()
    parts = [(part, unsaved_buffers_of(part)) for part in module.modules()]
    without_copy = {id(buffers_of(part).get(name)) for part, names in parts for name in names}
    parameters = list(module.named_parameters())
    rows = {id(each) for _, each in parameters if isinstance(each, RowWeight)}
    names: dict[int, str] = {}
    for name, each in (*parameters, *module.named_buffers()):
        if id(each) in rows:
            continue
        names[id(each)] = name
        own = _added(weights, name, each)
        if not each.requires_grad:
            found.frozen.update(own)
        if id(each) in without_copy:
            found.unsaved.update(own)
        if each.is_leaf and each.grad is not None:
            _added(gradients, f"the gradient of {name}", each.grad)
    for part in module.modules():
        for shard, data in fully_sharded(part):
            own = _added(weights, f"what FSDP2 reads of {names.get(id(shard))}", data)
            if not shard.requires_grad:
                found.frozen.update(own)
    for number, optimizer in enumerate(optimizers):
        which = f" ({number})" if number else ""
        for place, (of, kept) in enumerate(optimizer.state.items()):
            if id(of) not in rows:
                name = names.get(id(of), f"parameter {place}") + which
                _added(kept_by_optimizers, f"state of {name}", kept)
    return found


def _added(found: dict[str, Tensor], name: str, value: Any) -> list[str]:
    """Puts the tensors of a value among those found; gives their names, each of one alone."""
    names = []
    for its_name, each in plain_tensors(name, value):
        while found.setdefault(its_name, each) is not each:  # of keys as 1 and "1"
            its_name += "'"
        names.append(its_name)
    return names


def plain_tensors(
    name: str, value: Any, seen: set[int] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors in a value, its containers and objects by name, but for those `seen`."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    within: Iterable[tuple[Any, Any]] = ()
    if is_plain_tensor(value):
        yield name, value
    elif isinstance(value, RowWeight):  # whose table has the elements
        return
    elif isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):
            inner = ((each, getattr(value, each)) for each in value.__tensor_flatten__()[0])
            # No DeviceMesh, which has tensors of its own.
            within = [(key, each) for key, each in inner if isinstance(each, Tensor)]
        elif not is_lazy(value):
            if _has_memory(value):
                yield name, value
            within = vars(value).items()
    elif isinstance(value, Mapping):
        within = value.items()
    elif isinstance(value, list | tuple | deque):
        within = enumerate(value)
    elif hasattr(value, "__dict__") and not isinstance(value, _NO_RECORDS) and not callable(value):
        within = vars(value).items()
    else:
        return
    seen.add(id(value))
    for key, each in within:
        if type(each) is Tensor and id(each) not in seen:  # most are, of thousands in a step
            seen.add(id(each))
            yield f"{name}.{key}", each
        else:
            yield from plain_tensors(f"{name}.{key}", each, seen)


def wrappers_in(tensor: object) -> list[Tensor]:
    """A wrapper and the wrappers within it; none if plain tensors have not all of its memory.

    DTensor is none of them: other ranks know its mesh.
    """
    is_row_weight = isinstance(tensor, RowWeight)  # whose table has the elements
    if is_plain_tensor(tensor) or is_row_weight or not hasattr(tensor, "__tensor_flatten__"):
        return []
    found: list[Any] = [tensor]
    for inner in [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]:
        if not is_plain_tensor(inner):
            if not (within := wrappers_in(inner)):
                return []
            found += within
    return found


def within_frozen(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name, and instead of wrappers that are not trained the plain tensors in them."""
    found: dict[str, Tensor] = {}
    for name, each in named.items():
        is_wrapper = not each.requires_grad and wrappers_in(each)
        found.update(plain_tensors(name, each) if is_wrapper else [(name, each)])
    return found


def _has_memory(tensor: Tensor) -> bool:
    """Whether a tensor of a class of its own is more than a name for tensors within."""
    if tensor.layout != torch.strided:
        return True
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:  # as torch says it of Tensor._make_wrapper_subclass
        return False
    return True


def stays_on_cpu(optimizer: Optimizer, parameter: Tensor, key: str, value: object) -> bool:
    """Whether it is a count of steps on the CPU, where torch wants it whatever device steps."""
    if key != "step" or not isinstance(value, Tensor) or value.dim() or not value.is_cpu:
        return False
    takes_it = (g for g in optimizer.param_groups if g.get("capturable") or g.get("fused"))
    return not any(each is parameter for group in takes_it for each in group["params"])
