"""PartialStep: one optimizer step that is split into several groups of parameters.

Each part is stepped by a shallow copy of the optimizer. The copy has the same state and group
settings, but only the part's parameters. The optimizer's own groups are never changed, so they
remain correct after an error.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from speedtorch.torch_internals import STEP_HOOKS, step_without_hooks

__all__ = ["ChangedSetting", "PartialStep"]


_ABSENT = object()


class ChangedSetting(NamedTuple):
    """A setting changed by a step, such as a counter; `before` is _ABSENT for a new setting."""

    place: int
    """0: an attribute of the optimizer; otherwise the group's index plus 1."""
    name: str
    before: object
    after: object


class PartialStep:
    """One step of an optimizer in parts, without its hooks.

    Each part makes the same changes to settings, such as a counter in a group. `settle()` copies
    these changes to the optimizer once. In-place changes of other objects (a tensor, a list, state
    without a parameter) happen once per part.

    `args` and `kwargs` are passed to the step of each part. `changes` are the changes of an earlier
    step of other parameters: this step completes that one, and counts once with it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        changes: Sequence[ChangedSetting] = (),
    ) -> None:
        self.optimizer, self._args, self._kwargs = optimizer, args, kwargs or {}
        self._earlier_changes = changes
        self._last: Optimizer | None = None
        self._places = {
            id(param): (number, place)
            for number, group in enumerate(optimizer.param_groups)
            for place, param in enumerate(group["params"])
        }

    def shallow_copy(self, parameters: Collection[Tensor]) -> Optimizer:
        """Returns a shallow copy of the optimizer with only these parameters."""
        optimizer = self.optimizer
        selected: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        found = (self._places.get(id(param)) for param in parameters)
        for number, place in sorted(filter(None, found)):
            selected[number].append(optimizer.param_groups[number]["params"][place])
        copied: Optimizer = object.__new__(type(optimizer))
        copied.__dict__.update(optimizer.__dict__)
        # A base class's step() that the optimizer's step() calls would run the hooks.
        copied.__dict__.update({name: OrderedDict() for name in STEP_HOOKS})
        copied.param_groups = [
            {**group, "params": of_group}
            for group, of_group in zip(optimizer.param_groups, selected, strict=True)
        ]
        settings = _settings_of(copied)
        for place, name, before, after in self._earlier_changes:
            if settings[place].get(name) is not after:  # other code has changed the setting
                continue
            settings[place][name] = before
            if before is _ABSENT:
                del settings[place][name]
        self._last = copied
        return copied

    def step(self, parameters: Collection[Tensor]) -> None:
        """Steps only these parameters."""
        step: Any = step_without_hooks(type(self.optimizer))
        step(self.shallow_copy(parameters), *self._args, **self._kwargs)

    def settle(self) -> list[ChangedSetting]:
        """Copies the settings that the last part changed to the optimizer, and returns them."""
        if self._last is None:
            return []
        changes: list[ChangedSetting] = []
        places = zip(_settings_of(self.optimizer), _settings_of(self._last), strict=True)
        for place, (settings, changed) in enumerate(places):
            kept = ("params",) if place else ("param_groups", *STEP_HOOKS)
            for name, value in changed.items():
                before = settings.get(name, _ABSENT)
                if name not in kept and before is not value:
                    settings[name] = value
                    changes.append(ChangedSetting(place, name, before, value))
        return changes


def _settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The attributes of an optimizer, followed by its groups."""
    return [vars(optimizer), *optimizer.param_groups]
