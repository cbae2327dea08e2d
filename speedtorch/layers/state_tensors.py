"""Finds the plain tensors of a training state by name: weights, gradients and optimizer state.

Plain tensors have memory. A tensor subclass is replaced by its inner tensors, which
`__tensor_flatten__` names (DTensor, torchao). Without that method, its plain tensors are the object
itself, if it has memory, and the tensors in its attributes (bitsandbytes, MaskedTensor).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from speedtorch.layers.access_tracker import is_plain_tensor
from speedtorch.step.row_weight import RowWeight
from speedtorch.torch_internals import buffers_of, fully_sharded, members_of, unsaved_buffers_of

__all__ = [
    "PARTS",
    "StatePart",
    "StateTensors",
    "TensorIndex",
    "is_cpu_step",
    "plain_tensors",
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
        of: tensors by name, for each part.
        frozen: names of weights that are not trained.
        unsaved: names of buffers that state_dict() omits.
    """

    of: dict[StatePart, dict[str, Tensor]]
    frozen: set[str]
    unsaved: set[str]


def state_tensors(module: nn.Module, optimizers: Sequence[Optimizer]) -> StateTensors:
    """Finds the plain tensors of each part, without Embedding rows and their state."""
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
    """Adds the plain tensors of a value to `found`, and returns their unique names."""
    names = []
    for its_name, each in plain_tensors(name, value):
        while found.setdefault(its_name, each) is not each:  # keys 1 and "1" have equal names
            its_name += "'"
        names.append(its_name)
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
        if hasattr(value, "__tensor_flatten__"):
            inner = ((each, getattr(value, each)) for each in value.__tensor_flatten__()[0])
            # A DeviceMesh is skipped, because it has tensors too.
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
        if type(each) is Tensor and id(each) not in seen:  # fast path: a step has thousands
            seen.add(id(each))
            yield f"{name}.{key}", each
        else:
            yield from plain_tensors(f"{name}.{key}", each, seen)


def wrappers_in(tensor: object) -> list[Tensor]:
    """A wrapper and its inner wrappers; empty unless plain tensors hold all of its contents.

    The result is empty for a DTensor, because its device mesh is no tensor.
    """
    is_row_weight = isinstance(tensor, RowWeight)  # the elements are in its table
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
    """Tensors by name, with frozen wrappers replaced by their plain inner tensors."""
    found: dict[str, Tensor] = {}
    for name, each in named.items():
        is_wrapper = not each.requires_grad and wrappers_in(each)
        found.update(plain_tensors(name, each) if is_wrapper else [(name, each)])
    return found


class TensorIndex:
    """A snapshot of the tensors of a module and its optimizer state.

    Iterating a module's names is the slowest part of a move. The index is therefore reused while
    is_current() finds each object where the constructor found it.

    `is_of_state(optimizer, name, parameter, key, value)` returns whether a value of a parameter's
    state moves with the module. The name is different for each optimizer.

    Attributes:
        own: parameters and buffers, frozen parameters first. Frozen wrappers, such as quantized
            weights, are replaced by their inner tensors.
        wrappers: frozen wrappers, which `own` contains only as inner tensors.
        state: optimizer state of each parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        is_of_state: Callable[[Optimizer, str, Tensor, str, Any], bool],
    ) -> None:
        self.parameters = dict(module.named_parameters())
        named = dict(module.named_buffers())
        self.buffers = within_frozen(named)
        frozen = {name: each for name, each in self.parameters.items() if not each.requires_grad}
        trained = {name: each for name, each in self.parameters.items() if each.requires_grad}
        self.own: dict[str, Tensor] = {**within_frozen(frozen), **trained, **self.buffers}
        self.wrappers = [
            within
            for each in (*frozen.values(), *named.values())
            if not each.requires_grad
            for within in wrappers_in(each)
        ]
        self._gradients: dict[str, Tensor] = {}
        """Parameters with a gradient, by the gradient's name."""
        self.state: dict[str, Tensor] = {}
        # Weak references to gradients: the index must not keep a dropped gradient alive.
        self._gradient_refs: list[weakref.ref[Tensor]] = []
        self._without_gradient: list[Tensor] = []
        self._of_state: list[tuple[Optimizer, Mapping[Tensor, Any], list[Any]]] = []
        """Each optimizer with its state, and its entry for each parameter; None: no entry."""
        self._empty: list[dict[str, Any]] = []
        self._filled: list[dict[str, Any]] = []
        for each in self.wrappers:
            self._keep(vars(each))
        for part in module.modules():
            for of_part in (*members_of(part), buffers_of(part)):
                self._keep(of_part)
        for name, each in self.parameters.items():
            if each.is_leaf and each.grad is not None:
                if each.grad.is_conj() or each.grad.is_neg():  # torch creates such gradients
                    each.grad = each.grad.resolve_conj().resolve_neg()
                self._gradients[f"the gradient of {name}"] = each
                self._gradient_refs.append(weakref.ref(each.grad))
            elif each.is_leaf:
                self._without_gradient.append(each)
        for number, optimizer in enumerate(optimizers):
            which = f" ({number})" if number else ""
            kept_by_it = [optimizer.state.get(each) for each in self.parameters.values()]
            self._of_state.append((optimizer, optimizer.state, kept_by_it))
            for (name, each), kept in zip(self.parameters.items(), kept_by_it, strict=True):
                if kept is None:
                    continue
                self._keep(kept)
                for key, value in kept.items():
                    if is_of_state(optimizer, name + which, each, key, value):
                        self.state[f"{key} of {name}{which}"] = value
        self._lengths = list(map(len, self._filled))
        self._values = list(self._values_now())
        self._flags = self._flags_now()

    def _keep(self, entries: dict[str, Any]) -> None:
        (self._filled if entries else self._empty).append(entries)

    def _values_now(self) -> Iterator[Any]:
        return chain.from_iterable([each.values() for each in self._filled])

    def _flags_now(self) -> list[bool]:
        """requires_grad of all parameters, followed by is_leaf of all parameters."""
        every = self.parameters.values()
        return [each.requires_grad for each in every] + [each.is_leaf for each in every]

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Gradients by name; valid only while is_current()."""
        found = {name: each.grad for name, each in self._gradients.items()}
        return cast(dict[str, Tensor], found)

    def all_tensors(self) -> list[Tensor]:
        """Parameters, buffers, gradients and state; valid only while is_current()."""
        return [*self.own.values(), *self.gradients.values(), *self.state.values()]

    def is_current(self) -> bool:
        """Whether exactly the found objects are where the constructor found them.

        Checking one property of all objects at a time is faster than checking object by object.
        """
        if any(self._empty) or [*map(len, self._filled)] != self._lengths:
            return False
        if not all(map(is_, self._values_now(), self._values)) or self._flags_now() != self._flags:
            return False
        if [True for each in self._without_gradient if each.grad is not None]:
            return False
        for each, known in zip(self._gradients.values(), self._gradient_refs, strict=True):
            if each.grad is None or each.grad is not known():
                return False
        for optimizer, state, kept_by_it in self._of_state:
            if optimizer.state is not state:
                return False
            if not all(map(is_, map(state.get, self.parameters.values()), kept_by_it)):
                return False
        return True


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
    takes_it = (g for g in optimizer.param_groups if g.get("capturable") or g.get("fused"))
    return not any(each is parameter for group in takes_it for each in group["params"])
