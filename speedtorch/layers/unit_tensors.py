"""UnitTensors: the tensors of a module and of its optimizer state, which belong to one unit."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from speedtorch.layers.access_tracker import is_plain_tensor, untracked
from speedtorch.layers.offloaded_parameters import follow_inner
from speedtorch.layers.pack import Pack
from speedtorch.layers.state_tensors import stays_on_cpu, within_frozen, wrappers_in
from speedtorch.step.trained_rows import rows_of_parameter
from speedtorch.torch_internals import (
    WeakTensorKeyDictionary,
    buffers_of,
    members_of,
    tree_leaves,
    version_of,
)

__all__ = ["TensorIndex", "UnitTensors", "is_of_unit"]

_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""A weakref to the UnitTensors of each tensor: a tensor belongs to at most one unit."""


class TensorIndex:
    """The tensors of a module and its optimizer state, as they are when it is made.

    Going through a module's names takes longer than all else that a move does for a tensor.
    `is_of_state` says of an optimizer, a parameter's name, the parameter, a key and a value of its
    state whether the value moves with the module.

    Attributes:
        own: parameters and buffers, those that are not trained first; of wrappers that are not,
            such as quantized weights, the tensors within.
        wrappers: these wrappers.
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
        """The parameters that have one, by its name."""
        self.state: dict[str, Tensor] = {}
        # Weak references to gradients: the index must not keep a dropped gradient alive.
        self._gradient_refs: list[weakref.ref[Tensor]] = []
        self._without_gradient: list[Tensor] = []
        self._of_state: list[tuple[Optimizer, Mapping[Tensor, Any], list[Any]]] = []
        """What each optimizer keeps of each parameter; None: nothing."""
        self._empty: list[dict[str, Any]] = []
        self._filled: list[dict[str, Any]] = []
        for each in self.wrappers:
            self._keep(vars(each))
        for part in module.modules():
            for of_part in (*members_of(part), buffers_of(part)):
                self._keep(of_part)
        for name, each in self.parameters.items():
            if each.is_leaf and each.grad is not None:
                if each.grad.is_conj() or each.grad.is_neg():  # as torch makes some
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
        """Which parameters are trained, and which are leaves."""
        every = self.parameters.values()
        return [each.requires_grad for each in every] + [each.is_leaf for each in every]

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Of the parameters that have one, while is_current()."""
        found = {name: each.grad for name, each in self._gradients.items()}
        return cast(dict[str, Tensor], found)

    def all_tensors(self) -> list[Tensor]:
        """Of the module, gradients and state, while is_current()."""
        return [*self.own.values(), *self.gradients.values(), *self.state.values()]

    def is_current(self) -> bool:
        """Whether all is where it was found; asks all objects for one thing after another."""
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


class UnitTensors:
    """The tensors of one unit as they are now; calls `on_replaced` if there are others."""

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        name: str,
        state_pack: Pack,
        on_replaced: Callable[[], object],
    ) -> None:
        self.module, self.optimizers, self.name = module, optimizers, name
        self._state_pack, self._on_replaced = state_pack, on_replaced
        self._index: TensorIndex | None = None
        self.known: Mapping[str, Tensor] = {}
        """Parameters and buffers as they were found last."""

    @property
    def found(self) -> TensorIndex:
        """All of them, by name."""
        if self._index is None or not self._index.is_current():
            self._index = TensorIndex(self.module, self.optimizers, self._is_of_state)
            self.known = self._index.own
            for tensor in self.known.values():
                _owners[tensor] = weakref.ref(self)
            self._on_replaced()
        return self._index

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the module, by name."""
        if self._index is not None and self._index.is_current():
            return self._index.parameters
        return dict(self.module.named_parameters())

    @property
    @untracked
    def has_gradients(self) -> bool:
        """Whether an optimizer's step would change parameters."""
        return any(each.grad is not None for each in self.parameters.values())

    @untracked
    def missing_gradients(self) -> int:
        """Bytes of gradients that a backward may make."""
        parameters = self.parameters.values()
        return sum(each.nbytes for each in parameters if each.requires_grad and each.grad is None)

    @untracked
    def without_state(self) -> list[tuple[Optimizer, nn.Parameter]]:
        """Optimizers, and parameters for which the next step of each may make state."""
        return [
            (optimizer, each)
            for optimizer in self.optimizers
            for each in self.parameters.values()
            if each.requires_grad and each not in optimizer.state
        ]

    def wrapper_versions(self) -> list[int]:
        """Torch counts a change of a wrapper there, and not of the tensors within."""
        return [] if self._index is None else list(map(version_of, self._index.wrappers))

    def changes(self) -> int:
        """Grows with each change of parameters and buffers that torch counts."""
        return sum(map(version_of, self.known.values())) + sum(self.wrapper_versions())

    def follow_inner(self) -> None:
        """Moves wrappers to the device of the tensors within."""
        with torch.inference_mode(False):
            for each in self.found.wrappers:
                follow_inner(each)

    def check_alone(self) -> None:
        """ValueError if a parameter or buffer belongs to another unit, TypeError if to a table."""
        for name, tensor in _of_module(self.module):
            if rows_of_parameter(tensor) is not None:
                raise TypeError(
                    f"unit {self.name!r}: {name} are rows of an Embedding, which are in host memory"
                    " already, and come by themselves: make units of other modules alone"
                )
            if not is_plain_tensor(tensor) and not is_lazy(tensor):
                kind = type(tensor)
                raise TypeError(
                    f"unit {self.name!r}: {name}: expected a plain tensor, got"
                    f" {kind.__module__}.{kind.__qualname__}, whose elements a copy of bytes may"
                    " not be: make units of other modules and leave this one on the device, or move"
                    " all of the model between uses by TrainingState"
                )
            other = _owner_of(tensor)
            within = () if other is None or other is self else _of_module(other.module)
            if other is not None and (names := [its for its, e in within if e is tensor]):
                raise ValueError(
                    f"unit {self.name!r}: {name} is {names[0]} of unit {other.name!r} as well, and"
                    " moves with one unit alone; make one unit of both modules (nn.ModuleList), or"
                    " close() the other"
                )

    def disown(self) -> None:
        """Lets its tensors belong to another unit."""
        for _, tensor in _of_module(self.module):
            if _owner_of(tensor) is self:
                del _owners[tensor]

    def _is_of_state(
        self, optimizer: Optimizer, name: str, parameter: Tensor, key: str, value: Any
    ) -> bool:
        """Whether a value of an optimizer's state of a parameter moves with the unit."""
        if isinstance(value, Tensor):
            placed = self._state_pack.has_place(f"{key} of {name}", value)
            return placed or not stays_on_cpu(optimizer, parameter, key, value)
        if any(isinstance(each, Tensor) for each in tree_leaves(value)):
            raise TypeError(
                f"unit {self.name!r}: {type(optimizer).__name__} keeps a"
                f" {type(value).__name__} of tensors as {key!r} of {name}; it must keep single"
                " tensors, each of one parameter"
            )
        return False


def _owner_of(tensor: Tensor) -> UnitTensors | None:
    found = _owners.get(tensor)  # type: ignore[no-untyped-call]
    return None if found is None else found()


def is_of_unit(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or buffer of a unit, of any Swapper."""
    return len(_owners) > 0 and _owner_of(tensor) is not None


def _of_module(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from within_frozen(dict(module.named_parameters())).items()
    yield from within_frozen(dict(module.named_buffers())).items()
