"""Finds the plain tensors of a training state by name: weights, gradients and optimizer state.

Plain tensors have memory. A tensor subclass with `__tensor_flatten__` (DTensor, torchao) is
replaced by its inner tensors. Any other subclass (bitsandbytes, MaskedTensor) is replaced by
itself, if it has memory, and by the tensors in its attributes.
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
    "inner_of",
    "is_cpu_step",
    "plain_tensors",
    "rewrapped",
    "state_tensors",
    "within_frozen",
    "wrappers_in",
]

StatePart: TypeAlias = Literal["weights", "gradients", "optimizer"]
"""Parameters and buffers; gradients of parameters; optimizer state of parameters."""
PARTS: tuple[StatePart, ...] = get_args(StatePart)

# Other objects may contain tensors, such as bitsandbytes' QuantState.
_NO_RECORDS = nn.Module, Optimizer, type, torch.dtype, torch.device


class StateTensors(NamedTuple):
    """The plain tensors of each part, by stable names.

    Attributes:
        parts: tensors by name, for each part.
        frozen: names of weights that are not trained.
        unsaved: names of buffers that state_dict() omits.
    """

    parts: dict[StatePart, dict[str, Tensor]]
    frozen: set[str]
    unsaved: set[str]


def state_tensors(module: nn.Module, optimizers: Sequence[Optimizer]) -> StateTensors:
    """Finds the plain tensors of each part, without Embedding rows and their state."""
    found = StateTensors({part: {} for part in PARTS}, set(), set())
    weights, gradients, states = found.parts.values()
    children = [(child, unsaved_buffers_of(child)) for child in module.modules()]
    unsaved = {id(buffers_of(child).get(name)) for child, names in children for name in names}
    parameters = list(module.named_parameters())
    rows = {id(param) for _, param in parameters if isinstance(param, RowWeight)}
    names: dict[int, str] = {}
    for name, tensor in (*parameters, *module.named_buffers()):
        if id(tensor) in rows:
            continue
        names[id(tensor)] = name
        added = _added(weights, name, tensor)
        if not tensor.requires_grad:
            found.frozen.update(added)
        if id(tensor) in unsaved:
            found.unsaved.update(added)
        if tensor.is_leaf and tensor.grad is not None:
            _added(gradients, f"the gradient of {name}", tensor.grad)
    for child in module.modules():
        for shard, data in fully_sharded(child):
            added = _added(weights, f"FSDP2's shard of {names.get(id(shard))}", data)
            if not shard.requires_grad:
                found.frozen.update(added)
    for number, optimizer in enumerate(optimizers):
        suffix = f" ({number})" if number else ""
        for index, (param, kept) in enumerate(optimizer.state.items()):
            if id(param) not in rows:
                name = names.get(id(param), f"parameter {index}") + suffix
                _added(states, f"state of {name}", kept)
    return found


def _added(found: dict[str, Tensor], name: str, value: Any) -> list[str]:
    """Adds the plain tensors of a value to `found`, and returns their unique names."""
    names = []
    for unique, tensor in plain_tensors(name, value):
        while found.setdefault(unique, tensor) is not tensor:  # keys 1 and "1" have equal names
            unique += "'"
        names.append(unique)
    return names


def plain_tensors(
    name: str, value: Any, seen: set[int] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields the named plain tensors in a value, also within containers and objects.

    Objects whose ids are in `seen` are skipped.
    """
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    within: Iterable[tuple[Any, Any]] = ()
    if is_plain_tensor(value):
        yield name, value
    elif isinstance(value, RowWeight):  # the elements are in its table
        return
    elif isinstance(value, Tensor):
        if inner := inner_of(value):
            # A DeviceMesh is skipped, because it has tensors too.
            within = [(key, item) for key, item in inner.items() if isinstance(item, Tensor)]
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
    for key, item in within:
        if type(item) is Tensor and id(item) not in seen:  # fast path: a step has thousands
            seen.add(id(item))
            yield f"{name}.{key}", item
        else:
            yield from plain_tensors(f"{name}.{key}", item, seen)


def wrappers_in(tensor: object) -> list[Tensor]:
    """A wrapper and its inner wrappers; empty unless plain tensors hold all of its contents.

    The result is empty for a DTensor, because its device mesh is no tensor.
    """
    found: list[Any] = [tensor]
    for value in (inner := inner_of(tensor)).values():
        if not is_plain_tensor(value):
            if not (within := wrappers_in(value)):
                return []
            found += within
    return found if inner else []


def inner_of(tensor: Any) -> dict[str, Any]:
    """The inner values of a subclass with `__tensor_flatten__`; empty for all other objects."""
    if not hasattr(tensor, "__tensor_flatten__") or isinstance(tensor, RowWeight):
        return {}
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def rewrapped(wrapper: Any, inner: Mapping[str, Any]) -> Tensor:
    """A tensor of the same class and settings with other inner values."""
    _, settings = wrapper.__tensor_flatten__()
    unflatten: Any = type(wrapper).__tensor_unflatten__
    result: Tensor = unflatten(inner, settings, wrapper.shape, wrapper.stride())
    return result


def within_frozen(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name, with frozen wrappers replaced by their plain inner tensors."""
    found: dict[str, Tensor] = {}
    for name, tensor in named.items():
        is_wrapper = not tensor.requires_grad and wrappers_in(tensor)
        found.update(plain_tensors(name, tensor) if is_wrapper else [(name, tensor)])
    return found


def _has_memory(tensor: Tensor) -> bool:
    """Whether a tensor subclass has memory besides its inner tensors."""
    if tensor.layout != torch.strided:
        return True
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:  # raised for Tensor._make_wrapper_subclass
        return False
    return True


def is_cpu_step(optimizer: Optimizer, parameter: Tensor, key: str, value: object) -> bool:
    """Whether a value is a step count that torch requires on the CPU, whatever device steps.

    This is false if the parameter's group is capturable or fused.
    """
    if key != "step" or not isinstance(value, Tensor) or value.dim() or not value.is_cpu:
        return False
    on_device = (g for g in optimizer.param_groups if g.get("capturable") or g.get("fused"))
    return not any(param is parameter for group in on_device for param in group["params"])
