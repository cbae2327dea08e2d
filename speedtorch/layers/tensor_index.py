"""TensorIndex: the tensors of a module and of what optimizers keep of it, looked up once.

Going through a module's names takes longer than everything else that a move does for a tensor. So
what was found is kept for as long as each of it is where it was found.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from speedtorch.layers.state_tensors import within_frozen, wrappers_in
from speedtorch.torch_internals import buffers_of, members_of

__all__ = ["TensorIndex"]


class TensorIndex:
    """The tensors by name, as they are when it is made.

    `is_of_state` says of an optimizer, a parameter's name, the parameter, a key and a value of its
    state whether the value moves with the module. The name tells optimizers apart.

    Attributes:
        own: parameters and buffers, those that are not trained first; of wrappers that are not, as
            quantized weights, the tensors within.
        wrappers: which are there by their tensors alone.
        state: what optimizers keep of each parameter.
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
        """Whether all is where it was found, and nothing else.

        It asks all objects for one thing after another, which takes less time than one by one.
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
