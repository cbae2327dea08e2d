"""PartialStep: an optimizer's step, of some parameters after others.

Each part is stepped by a twin of the optimizer, which has the same state and the groups' settings,
and of the parameters those alone. The optimizer's own groups are never changed, so that an error
leaves them as they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from speedtorch.torch_internals import STEP_HOOKS, step_without_hooks

__all__ = ["Counted", "PartialStep"]


_ABSENT = object()


class Counted(NamedTuple):
    """A setting that a step has changed, such as a count; where it was not: before _ABSENT."""

    place: int
    """0: the optimizer's own; else a group's number and 1."""
    name: str
    before: object
    after: object


class PartialStep:
    """One step of an optimizer, without its hooks.

    What a step changes besides parameters and their state, as a count in a group, is changed by
    each part alike, and is the optimizer's once by `settle`. What it changes in place (a tensor, a
    list, state of no parameter) is changed once for each part.

    The step of each part is given the same arguments. What was `counted` by a step of other
    parameters is completed by this one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        counted: Sequence[Counted] = (),
    ) -> None:
        self.optimizer, self._args, self._kwargs = optimizer, args, kwargs or {}
        self._counted = counted
        self._last: Optimizer | None = None
        self._places = {
            id(each): (number, place)
            for number, group in enumerate(optimizer.param_groups)
            for place, each in enumerate(group["params"])
        }

    def twin(self, parameters: Collection[Tensor]) -> Optimizer:
        """The optimizer of these parameters alone."""
        optimizer = self.optimizer
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
        settings = _settings_of(made)
        for place, name, before, after in self._counted:
            if settings[place].get(name) is not after:  # changed by others since
                continue
            settings[place][name] = before
            if before is _ABSENT:
                del settings[place][name]
        self._last = made
        return made

    def step(self, parameters: Collection[Tensor]) -> None:
        """Steps these alone."""
        step: Any = step_without_hooks(type(self.optimizer))
        step(self.twin(parameters), *self._args, **self._kwargs)

    def settle(self) -> list[Counted]:
        """Gives the optimizer what the last part has changed of it; returns these changes."""
        if self._last is None:
            return []
        counted: list[Counted] = []
        places = zip(_settings_of(self.optimizer), _settings_of(self._last), strict=True)
        for place, (settings, changed) in enumerate(places):
            kept = ("params",) if place else ("param_groups", *STEP_HOOKS)
            for name, value in changed.items():
                before = settings.get(name, _ABSENT)
                if name not in kept and before is not value:
                    settings[name] = value
                    counted.append(Counted(place, name, before, value))
        return counted


def _settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The attributes of an optimizer, and then its groups."""
    return [vars(optimizer), *optimizer.param_groups]
