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


class Counted(NamedTuple):
    """What a step has changed of an optimizer itself, such as a count.

    Attributes:
        group: its number; None: an attribute.
        name: in the group.
        had: whether it was there before.
        before: its value then.
        after: its value since.
    """

    group: int | None
    name: str
    had: bool
    before: object
    after: object


class PartialStep:
    """One step of an optimizer, without its hooks.

    What a step changes besides parameters and their state, as a count in a group, is changed by
    each part alike, and is the optimizer's once by `settle`. What it changes in place (a tensor, a
    list, state of no parameter) is changed once for each part.

    Args:
        optimizer: whose step that is.
        args: what the step is given, for each part.
        kwargs: likewise.
        counted: by a step of other parameters, which this one completes.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        counted: Sequence[Counted] = (),
    ) -> None:
        self._optimizer, self._args, self._kwargs = optimizer, args, kwargs or {}
        self._counted = counted
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
        for group, name, had, before, after in self._counted:
            settings = made.__dict__ if group is None else made.param_groups[group]
            if settings.get(name) is not after:  # changed by others since
                continue
            settings[name] = before
            if not had:
                del settings[name]
        self._last = made
        return made

    def step(self, parameters: Collection[Tensor]) -> None:
        """Steps these alone."""
        step: Any = step_without_hooks(type(self._optimizer))
        step(self.twin(parameters), *self._args, **self._kwargs)

    def settle(self) -> list[Counted]:
        """Gives the optimizer what the last part has changed of it; returns these changes."""
        if (made := self._last) is None:
            return []
        counted: list[Counted] = []
        own = {n: v for n, v in made.__dict__.items() if n not in ("param_groups", *STEP_HOOKS)}
        _assign(counted, None, self._optimizer.__dict__, own)
        groups = zip(self._optimizer.param_groups, made.param_groups, strict=True)
        for number, (group, changed) in enumerate(groups):
            _assign(counted, number, group, {n: v for n, v in changed.items() if n != "params"})
        return counted


def _assign(
    counted: list[Counted],
    number: int | None,
    settings: dict[str, Any],
    changed: Mapping[str, Any],
) -> None:
    for name, value in changed.items():
        had, before = name in settings, settings.get(name)
        if not had or before is not value:
            settings[name] = value
            counted.append(Counted(number, name, had, before, value))
