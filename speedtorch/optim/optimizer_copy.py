"""Copies of an optimizer that step a small parameter of their own, and watch the state it makes.

A copy shares nothing that a step could change with the optimizer it came from: settings, attributes
and state are its own, hooks are gone, and something small stands in for every parameter, module,
table and large tensor that it refers to.
"""

from __future__ import annotations

import copy
import gc
import inspect
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtorch.step.gradient_sums import sparse_of_all
from speedtorch.table.host_table import HostTable
from speedtorch.torch_internals import (
    LENT_BY_GRAD_SCALER,
    attributes_without_hooks,
    members_of,
    step_without_hooks,
)

__all__ = [
    "OptimizerCopy",
    "Recorder",
    "copy_with",
    "group_of",
    "own_steps",
    "plain_values",
    "settings_of",
    "snapshot",
]

own_steps: weakref.WeakKeyDictionary[type[Optimizer], Callable[..., Any]]
own_steps = weakref.WeakKeyDictionary()
"""The own step function of each class: that which its subclasses call by super().step()."""

# Elements of a tensor that an optimizer refers to and the probe still copies.
_MOST_COPIED = 1 << 16


def group_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """The parameter group that holds a parameter; ValueError if none does."""
    for group in optimizer.param_groups:
        if any(held is parameter for held in group["params"]):
            return group
    raise ValueError(
        f"{type(optimizer).__name__} does not hold this parameter of shape"
        f" {list(parameter.shape)}: build the optimizer with it first"
    )


def settings_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """What decides which state is kept and how it starts, not what is counted in the group."""
    group = group_of(optimizer, parameter)
    names = [name for name in optimizer.defaults if name in group]
    return {n: group[n] for n in names if isinstance(group[n], int | float | str | tuple)}


def plain_values(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and flags among an optimizer's attributes."""
    return {n: value for n, value in attributes.items() if isinstance(value, bool | int | float)}


def snapshot(value: Any) -> Any:
    """A copy of one entry of a state."""
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


class NotCopied:
    """Stands in for a module or a table that an optimizer refers to.

    It has a module's members for which something stands in, so that an optimizer may still ask
    which of its parameters has settings of its own.
    """

    _kind = ""  # until a copy has its own

    def __init__(self, original: object) -> None:
        self._kind = type(original).__name__

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"it asks its {self._kind} for {name!r}, which is not copied to try it out"
        )


def _own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's attributes without hooks, and without what others have put there."""
    kind = type(optimizer)
    return {
        # Schedulers put a `step` that is bound to the original in front of the class's.
        name: value
        for name, value in attributes_without_hooks(optimizer).items()
        if name not in LENT_BY_GRAD_SCALER and not callable(getattr(kind, name, None))
    }


# Beyond these deepcopy does not go, or must not.
_ENDS = (type, types.FunctionType, types.ModuleType, types.TracebackType, HostTable)


def _stand_in_for_large(left: list[Any], memo: dict[int, Any]) -> None:
    """Adds to deepcopy's memo what stands in for modules, tables and large tensors."""
    seen: set[int] = set()
    members: list[tuple[NotCopied, dict[str, Any]]] = []
    while left:
        each = left.pop()
        if id(each) in seen or id(each) in memo:
            continue
        seen.add(id(each))
        if isinstance(each, nn.Module | HostTable):
            memo[id(each)] = NotCopied(each)
        elif isinstance(each, Tensor) and each.numel() > _MOST_COPIED:
            memo[id(each)] = each.detach().new_empty(0)
        if isinstance(each, nn.Module):
            for held in members_of(each):
                members.append((memo[id(each)], held))
                left += held.values()
        elif not isinstance(each, _ENDS):
            left += gc.get_referents(each)
    for stand_in, held in members:
        vars(stand_in).update({n: memo[id(each)] for n, each in held.items() if id(each) in memo})


class Recorder(dict[str, Any]):
    """A parameter's state that keeps each entry as it was first assigned, in `first`.

    Optimizers assign zeros and update them in place, so that is the one before the first update; so
    is the default of a get() that found nothing. A None stands for "not made yet".
    """

    setdefault, update = MutableMapping.setdefault, MutableMapping.update

    def __init__(self, entries: Any = ()) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}
        self._defaults: dict[str, Any] = {}
        self.update(entries)

    def __setitem__(self, name: str, value: Any) -> None:
        if self.first.get(name) is None:
            first = self._defaults.pop(name, value)
            # Tensors of another class, which may know no clone, are looked at and not used.
            plain = not isinstance(first, Tensor) or type(first) in (Tensor, nn.Parameter)
            self.first[name] = snapshot(first) if plain else first
        super().__setitem__(name, value)

    def get(self, name: str, default: Any = None) -> Any:
        """As dict's; a default is noted as what the entry starts from, if it is assigned later."""
        if name not in self and default is not None:
            self._defaults[name] = snapshot(default)
        return super().get(name, default)

    def __ior__(self, other: Any) -> Recorder:  # type: ignore[override,misc]
        self.update(other)
        return self


class _StateMap(defaultdict[Any, Any]):
    """An optimizer's whole state: parameters to recorders."""

    def __setitem__(self, key: Any, value: Any) -> None:
        # An empty dict that the optimizer fills later, behind our back, is left to be found out.
        if isinstance(value, Mapping) and value and not isinstance(value, Recorder):
            value = Recorder(value)
        super().__setitem__(key, value)


class OptimizerCopy:
    """A copy of an optimizer that holds nothing but a small parameter, which has no state yet.

    The small parameter gets `values` and the settings of the parameter's group, or these. Some
    make their state in the constructor: to `construct` calls that, else attributes are copied.
    `step` is a step function, by default that of the class.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameter: Tensor,
        values: Tensor,
        settings: Mapping[str, Any],
        *,
        construct: bool,
        step: Callable[[Optimizer], object] | None = None,
    ) -> None:
        group = group_of(optimizer, parameter)
        self._step = step or step_without_hooks(type(optimizer))
        self.parameter = nn.Parameter(values.detach().clone())
        self._states = _StateMap(Recorder)
        own = {n: each for n, each in group.items() if n not in ("params", "param_names")}
        small, taken = {id(parameter): self.parameter}, [([self.parameter], own)]
        self.optimizer = _copied(optimizer, small, taken, settings, self._states, construct)
        if construct:
            self._states[self.parameter] = Recorder(self.optimizer.state[self.parameter])
            self.optimizer.state = self._states

    @property
    def state(self) -> Recorder:
        """The state of the small parameter; a plain dict if the optimizer hides how it starts."""
        state: Recorder = self._states[self.parameter]
        return state

    def hold(self, rows: Mapping[str, Tensor]) -> None:
        """Puts other rows, under "", with their state in place of the parameter's."""
        self.parameter.grad = None
        self.parameter.data = rows[""].clone()
        self.state.update({name: each.clone() for name, each in rows.items() if name})

    def step(self, gradient: Tensor, *, sparse: bool) -> None:
        """One step of the optimizer, without hooks."""
        if sparse:
            every_row = torch.arange(len(gradient), device=gradient.device)
            gradient = sparse_of_all(gradient, every_row)
        self.parameter.grad = gradient.clone()  # which some optimizers change in place
        self._step(self.optimizer)


def copy_with(
    optimizer: Optimizer,
    small: Mapping[int, Mapping[int, nn.Parameter]],
    settings: Mapping[str, Any],
    *,
    construct: bool,
) -> Optimizer:
    """A copy of an optimizer that holds small parameters in place of some of its own, stateless.

    `small` has them by the numbers of a group, and of the parameter in the group. All groups that
    have one of the `settings` get it; `construct` is as of OptimizerCopy.
    """
    by_id: dict[int, nn.Parameter] = {}
    taken: list[tuple[list[nn.Parameter], dict[str, Any]]] = []
    for number, group in enumerate(optimizer.param_groups):
        if not (chosen := small.get(number)):
            continue
        held, own = group["params"], dict[str, Any]()
        by_id |= {id(held[place]): each for place, each in chosen.items()}
        for name, value in group.items():
            is_cut = isinstance(value, list) and len(chosen) < len(held) == len(value)
            if name != "params":  # a list with an entry for each parameter, as its names
                own[name] = [value[place] for place in chosen] if is_cut else value
        taken.append(([*chosen.values()], own))
    return _copied(optimizer, by_id, taken, settings, defaultdict(dict), construct)


def _copied(
    optimizer: Optimizer,
    small: Mapping[int, nn.Parameter],
    taken: Sequence[tuple[list[nn.Parameter], dict[str, Any]]],
    settings: Mapping[str, Any],
    states: defaultdict[Any, Any],
    construct: bool,
) -> Optimizer:
    """A copy with small parameters, by the ids of its own, in groups of these entries."""
    kind, attributes = type(optimizer), _own_attributes(optimizer)
    for_all = {key: value for key, value in optimizer.state.items() if isinstance(key, str)}
    groups: list[dict[str, Any]] = []
    # What deepcopy must not copy but replace: each parameter, and what is set up here.
    memo: dict[int, Any] = {
        id(held): nn.Parameter(torch.zeros(1, dtype=held.dtype, device=held.device), False)
        for group in optimizer.param_groups
        for held in group["params"]
    }
    memo |= {**small, id(optimizer.state): states, id(optimizer.param_groups): groups}
    _stand_in_for_large([[own for _, own in taken], attributes, for_all], memo)
    for parameters, own in taken:
        made = copy.deepcopy(own, memo)
        for name in settings.keys() & made.keys():
            value, is_tensor = settings[name], isinstance(made[name], Tensor)
            made[name] = torch.full_like(made[name], value) if is_tensor else value
        groups.append({"params": parameters, **made})
    states.update(copy.deepcopy(for_all, memo))
    copied: Optimizer
    if construct:
        accepted = set(inspect.signature(kind).parameters) & set(groups[0]) - {"params"}
        given: Any = [{**group} for group in groups] if len(groups) > 1 else taken[0][0]
        copied = kind(given, **{name: groups[0][name] for name in accepted})
        for group, as_now in zip(copied.param_groups, groups, strict=True):
            group.update(as_now)
        # A flag or a count beside the state is as far as that of the original.
        vars(copied).update(plain_values(attributes))
    else:
        copied = memo[id(optimizer)] = object.__new__(kind)
        vars(copied).update(copy.deepcopy(attributes, memo))
    return copied
