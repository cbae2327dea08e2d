"""ModuleTensors: the tensors of an offloaded module by name, and which module owns a tensor."""

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
from speedtorch.layers.state_tensors import is_cpu_step, within_frozen, wrappers_in
from speedtorch.layers.tensor_group import TensorGroup
from speedtorch.step.trained_rows import rows_of_parameter
from speedtorch.torch_internals import (
    WeakTensorKeyDictionary,
    buffers_of,
    is_functional_call,
    members_of,
    tree_leaves,
    version_of,
)

__all__ = ["ModuleTensors", "is_offloaded"]

_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The owner of each tensor, as a weakref to its ModuleTensors: a tensor has at most one."""


def _owner_of(tensor: Tensor) -> ModuleTensors | None:
    found = _owners.get(tensor)  # type: ignore[no-untyped-call]
    return None if found is None else found()


def is_offloaded(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or buffer of an offloaded module, of any Swapper."""
    return len(_owners) > 0 and _owner_of(tensor) is not None


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from within_frozen(dict(module.named_parameters())).items()
    yield from within_frozen(dict(module.named_buffers())).items()


class TensorIndex:
    """A snapshot of the tensors of a module and its optimizer state.

    Iterating a module's names is the slowest part of a move. The index is therefore reused while
    is_current() finds each object where the constructor found it.

    The constructor raises TypeError for optimizer state within containers; `label` names the module
    in the error. State with a place in `placed` moves with the module on every device. `before` is
    an index with the module's own tensors, if functional_call() has replaced them for one call.

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
        label: str,
        placed: TensorGroup,
        before: TensorIndex | None = None,
    ) -> None:
        if before is None:
            self.parameters = dict(module.named_parameters())
            self._named_buffers = dict(module.named_buffers())
        else:
            self.parameters, self._named_buffers = before.parameters, before._named_buffers
        named = self._named_buffers
        self.buffers = within_frozen(named)
        named_parameters = self.parameters.items()
        frozen = {name: param for name, param in named_parameters if not param.requires_grad}
        trained = {name: param for name, param in named_parameters if param.requires_grad}
        self.own: dict[str, Tensor] = {**within_frozen(frozen), **trained, **self.buffers}
        self.wrappers = [
            wrapper
            for tensor in (*frozen.values(), *named.values())
            if not tensor.requires_grad
            for wrapper in wrappers_in(tensor)
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
        for wrapper in self.wrappers:
            self._keep(vars(wrapper))
        for child in module.modules():
            for entries in (*members_of(child), buffers_of(child)):
                self._keep(entries)
        for name, param in named_parameters:
            if param.is_leaf and param.grad is not None:
                if param.grad.is_conj() or param.grad.is_neg():  # torch creates such gradients
                    with torch.enable_grad():
                        param.grad = param.grad.resolve_conj().resolve_neg()
                self._gradients[f"the gradient of {name}"] = param
                self._gradient_refs.append(weakref.ref(param.grad))
            elif param.is_leaf:
                self._without_gradient.append(param)
        for number, optimizer in enumerate(optimizers):
            suffix = f" ({number})" if number else ""
            states = [optimizer.state.get(param) for param in self.parameters.values()]
            self._of_state.append((optimizer, optimizer.state, states))
            for (name, param), kept in zip(named_parameters, states, strict=True):
                if kept is None:
                    continue
                self._keep(kept)
                for key, value in kept.items():
                    unique = f"{key} of {name}{suffix}"
                    if isinstance(value, Tensor):
                        is_count = is_cpu_step(optimizer, param, key, value)
                        if not is_count or placed.has_place(unique, value):
                            self.state[unique] = value
                    elif any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                        raise TypeError(
                            f"module {label!r}: {type(optimizer).__name__} stores a"
                            f" {type(value).__name__} of tensors as state {key!r} of {name}. A"
                            " Swapper needs separate tensors for each parameter. Use another"
                            " optimizer."
                        )
        self._lengths = list(map(len, self._filled))
        self._values = list(self._values_now())
        self._flags = self._flags_now()

    def _keep(self, entries: dict[str, Any]) -> None:
        (self._filled if entries else self._empty).append(entries)

    def _values_now(self) -> Iterator[Any]:
        return chain.from_iterable([entries.values() for entries in self._filled])

    def _flags_now(self) -> list[bool]:
        """requires_grad of all parameters, followed by is_leaf of all parameters."""
        params = self.parameters.values()
        return [param.requires_grad for param in params] + [param.is_leaf for param in params]

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Gradients by name; valid only while is_current()."""
        found = {name: param.grad for name, param in self._gradients.items()}
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
        if [True for param in self._without_gradient if param.grad is not None]:
            return False
        for param, known in zip(self._gradients.values(), self._gradient_refs, strict=True):
            if param.grad is None or param.grad is not known():
                return False
        for optimizer, state, states in self._of_state:
            if optimizer.state is not state:
                return False
            if not all(map(is_, map(state.get, self.parameters.values()), states)):
                return False
        return True


class ModuleTensors:
    """The current tensors of a module and its optimizer state, which the module owns.

    `state` is the tensor group of the optimizer state. `on_replaced` is called after the module's
    tensors, or tensors of the state, were replaced.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        name: str,
        state: TensorGroup,
        on_replaced: Callable[[], object],
    ) -> None:
        self.module, self.optimizers, self.name = module, optimizers, name
        self._state, self._on_replaced = state, on_replaced
        self._index: TensorIndex | None = None
        self._check_ownership()

    @property
    def known(self) -> dict[str, Tensor]:
        """Parameters and buffers as of the last search, which may have been replaced since."""
        return {} if self._index is None else self._index.own

    @property
    def current(self) -> TensorIndex:
        """The index of the module's current tensors."""
        before = self._index
        if before is not None and before.is_current():
            return before
        own = self.module, self.optimizers, self.name, self._state
        if before is not None and is_functional_call():
            return TensorIndex(*own, before)
        self._index = index = TensorIndex(*own)
        removed = {} if before is None else {id(tensor): tensor for tensor in before.own.values()}
        for tensor in index.own.values():
            _owners[tensor] = weakref.ref(self)
            removed.pop(id(tensor), None)
        for tensor in removed.values():
            if _owner_of(tensor) is self:
                del _owners[tensor]
        self._on_replaced()
        return index

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The module's current parameters."""
        if self._index is not None and self._index.is_current():
            return self._index.parameters
        return dict(self.module.named_parameters())

    def wrapper_versions(self) -> list[int]:
        """Versions of wrappers: torch counts a change on the wrapper, not on inner tensors."""
        return [] if self._index is None else list(map(version_of, self._index.wrappers))

    @property
    @untracked
    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient, so that an optimizer step would change the module."""
        return any(param.grad is not None for param in self.parameters.values())

    @untracked
    def missing_gradients(self) -> int:
        """Bytes of gradients that a backward may create."""
        without = [param for param in self.parameters.values() if param.grad is None]
        return sum(param.nbytes for param in without if param.requires_grad)

    def _check_ownership(self) -> None:
        """Raises if a tensor cannot belong to this module.

        ValueError: the tensor belongs to another module. TypeError: the tensor is the weight of an
        Embedding, or is no plain tensor.
        """
        for name, tensor in _tensors_of(self.module):
            if rows_of_parameter(tensor) is not None:
                raise TypeError(
                    f"module {self.name!r}: {name} is a speedtorch.Embedding's weight, whose rows"
                    " are stored in a table. Offload only modules without an Embedding."
                )
            if not is_plain_tensor(tensor) and not is_lazy(tensor):
                kind = type(tensor)
                raise TypeError(
                    f"module {self.name!r}: {name} must be a plain tensor, got"
                    f" {kind.__module__}.{kind.__qualname__}, which a copy of its bytes may not"
                    " reproduce. Keep this module on the device, or offload the whole model with"
                    " TrainingState."
                )
            other = _owner_of(tensor)
            within = () if other is None or other is self else _tensors_of(other.module)
            if other is not None and (names := [its for its, e in within if e is tensor]):
                raise ValueError(
                    f"module {self.name!r}: {name} is also {names[0]} of the offloaded module"
                    f" {other.name!r}. A tensor can be offloaded with one module only. Offload both"
                    " modules as one (nn.ModuleList), or close() the Swapper of the other."
                )

    def follow_inner(self) -> None:
        """Updates the device of wrapper tensors to the device of their inner tensors."""
        for wrapper in self.current.wrappers:
            follow_inner(wrapper)

    def disown(self) -> None:
        """Removes the module as owner of its tensors."""
        for _, tensor in _tensors_of(self.module):
            if _owner_of(tensor) is self:
                del _owners[tensor]
