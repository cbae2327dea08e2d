"""PartialStep: an optimizer's step, of some parameters after others.

Each part is stepped by a twin of the optimizer, which has the same state and the groups' settings,
and of the parameters those alone. The optimizer's own groups are never changed, so that an error
leaves them as they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from speedtorch.torch_internals import STEP_HOOKS, step_without_hooks

__all__ = ["PartialStep"]


class PartialStep:
    """One step of an optimizer, without its hooks.

    What a step changes besides parameters and their state, as a count in a group, is changed by
    each part alike, and is the optimizer's once by `settle`. What it changes in place (a tensor, a
    list, state of no parameter) is changed once for each part.

    Args:
        optimizer: whose step that is.
        args: what the step is given, for each part.
        kwargs: likewise.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._optimizer, self._args, self._kwargs = optimizer, args, kwargs or {}
        self._last: Optimizer | None = None
        self._places = {
            id(each): (number, place)
            for number, group in enumerate(optimizer.param_groups)
            for place, each in enumerate(group["params"])
        }

    def twin(self, parameters: Collection[Tensor]) -> Optimizer:
        """The optimizer of these parameters alone."""
        optimizer = self._optimizer
        chosen: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        found = (self._places.get(id(each)) for each in parameters)
        for number, place in sorted(each for each in found if each is not None):
            chosen[number].append(optimizer.param_groups[number]["params"][place])
        made: Optimizer = object.__new__(type(optimizer))
        made.__dict__.update(optimizer.__dict__)
        # The step of a base class, which that of the optimizer calls, would call them.
        made.__dict__.update({name: OrderedDict() for name in STEP_HOOKS})
        made.param_groups = [
            {**group, "params": of_group}
            for group, of_group in zip(optimizer.param_groups, chosen, strict=True)
        ]
        self._last = made
        return made

    def step(self, parameters: Collection[Tensor]) -> None:
        """Steps these alone."""
        step: Any = step_without_hooks(type(self._optimizer))
        step(self.twin(parameters), *self._args, **self._kwargs)

    def settle(self) -> None:
        """Gives the optimizer what the last part has changed of it."""
        if (made := self._last) is None:
            return
        for name, value in made.__dict__.items():
            if name != "param_groups" and name not in STEP_HOOKS:
                _assign(self._optimizer.__dict__, name, value)
        for group, changed in zip(self._optimizer.param_groups, made.param_groups, strict=True):
            for name, value in changed.items():
                if name != "params":
                    _assign(group, name, value)


def _assign(settings: dict[str, Any], name: str, value: object) -> None:
    if name not in settings or settings[name] is not value:
        settings[name] = value
