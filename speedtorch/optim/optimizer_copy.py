"""Copies of an optimizer that step a small parameter in trials, and record the resulting state.

The probe, the search for the own step function and the checks of Swapper use copies. Training steps
always use the original. A copy has its own settings, attributes and state, and no hooks, so that a
trial does not change the original. A small stand-in replaces every parameter, module, table and
large tensor.
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
    SET_BY_GRAD_SCALER,
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
"""The own step function of each class, found by step_hooks.find_own_step().

The own step is the innermost step() of the super().step() chain. Only this function runs with the
step's rows.
"""

# The most elements of a tensor that the probe copies instead of replacing it.
_MOST_COPIED = 1 << 16


def group_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Returns the parameter group that holds a parameter, or raises ValueError."""
    for group in optimizer.param_groups:
        if any(held is parameter for held in group["params"]):
            return group
    raise ValueError(
        f"{type(optimizer).__name__} does not hold this parameter of shape"
        f" {list(parameter.shape)}. Build the optimizer with this parameter."
    )


def settings_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """The numbers, texts and tuples in a parameter's group that are constructor arguments.

    Entries that the optimizer itself has added to the group, such as counters, are left out.
    """
    group = group_of(optimizer, parameter)
    names = [name for name in optimizer.defaults if name in group]
    return {n: group[n] for n in names if isinstance(group[n], int | float | str | tuple)}


def plain_values(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers and flags of an optimizer's attributes."""
    return {n: value for n, value in attributes.items() if isinstance(value, bool | int | float)}


def snapshot(value: Any) -> Any:
    """Copies one entry of a state."""
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


class NotCopied:
    """Replaces a module or a table that an optimizer refers to.

    A module's stand-in has the stand-ins of its members, so that the optimizer can still look up
    parameters that have their own settings.
    """

    _kind = ""  # for deepcopy and pickle, which run no __init__

    def __init__(self, original: object) -> None:
        self._kind = type(original).__name__

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"it uses {name!r} of a {self._kind}, which a trial step does not copy"
        )


def _own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's attributes without hooks, GradScaler's flags and overridden methods."""
    kind = type(optimizer)
    return {
        # Schedulers set a `step` attribute that is bound to the original optimizer.
        name: value
        for name, value in attributes_without_hooks(optimizer).items()
        if name not in SET_BY_GRAD_SCALER and not callable(getattr(kind, name, None))
    }


# Types whose referents deepcopy does not copy, or must not copy.
_ENDS = (type, types.FunctionType, types.ModuleType, types.TracebackType, HostTable)


def _stand_in_for_large(left: list[Any], memo: dict[int, Any]) -> None:
    """Adds stand-ins for modules, tables and large tensors to deepcopy's memo."""
    seen: set[int] = set()
    members: list[tuple[NotCopied, dict[str, Any]]] = []
    while left:
        value = left.pop()
        if id(value) in seen or id(value) in memo:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module | HostTable):
            memo[id(value)] = NotCopied(value)
        elif isinstance(value, Tensor) and value.numel() > _MOST_COPIED:
            memo[id(value)] = value.detach().new_empty(0)
        if isinstance(value, nn.Module):
            for held in members_of(value):
                members.append((memo[id(value)], held))
                left += held.values()
        elif not isinstance(value, _ENDS):
            left += gc.get_referents(value)
    for stand_in, held in members:
        vars(stand_in).update({n: memo[id(v)] for n, v in held.items() if id(v) in memo})


def _first_value(value: Any) -> Any:
    """Copies a value, except a subclass of Tensor, which may not support clone().

    The probe raises for a state entry of such a class later.
    """
    is_plain = not isinstance(value, Tensor) or type(value) in (Tensor, nn.Parameter)
    return snapshot(value) if is_plain else value


class Recorder(dict[str, Any]):
    """A parameter's state that records each entry's first value in `first`.

    Optimizers assign zeros and update them in place, so the first value precedes any update. The
    default of a get() without an entry counts as a first value too. None is no first value,
    because it means "not made yet".
    """

    setdefault, update = MutableMapping.setdefault, MutableMapping.update

    def __init__(self, entries: Any = ()) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}
        self._defaults: dict[str, Any] = {}
        self.update(entries)

    def __setitem__(self, name: str, value: Any) -> None:
        if self.first.get(name) is None:
            self.first[name] = _first_value(self._defaults.pop(name, value))
        super().__setitem__(name, value)

    def get(self, name: str, default: Any = None) -> Any:
        """Like dict.get(); the default becomes the first value of an entry assigned later."""
        if name not in self and default is not None:
            self._defaults[name] = _first_value(default)
        return super().get(name, default)

    def __ior__(self, other: Any) -> Recorder:  # type: ignore[override,misc]
        self.update(other)
        return self


class _StateMap(defaultdict[Any, Any]):
    """An optimizer's whole state, with a Recorder for each parameter."""

    def __setitem__(self, key: Any, value: Any) -> None:
        # An empty dict remains a dict, because a Recorder made now would miss entries that the
        # optimizer adds to that dict later. The probe raises for such an optimizer.
        if isinstance(value, Mapping) and value and not isinstance(value, Recorder):
            value = Recorder(value)
        super().__setitem__(key, value)


class OptimizerCopy:
    """A copy of an optimizer that holds only a small parameter, without state.

    The small parameter has `values` and its group's settings, overridden by `settings`. `construct`
    calls the constructor, for optimizers that make their state there; otherwise the attributes are
    copied. `step` is a step function, by default the class's.
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
        own = {n: value for n, value in group.items() if n not in ("params", "param_names")}
        small, taken = {id(parameter): self.parameter}, [([self.parameter], own)]
        self.optimizer = _copied(optimizer, small, taken, settings, self._states, construct)
        if construct:
            self._states[self.parameter] = Recorder(self.optimizer.state[self.parameter])
            self.optimizer.state = self._states

    @property
    def state(self) -> Recorder:
        """The small parameter's state; a plain dict if the optimizer replaces the Recorder."""
        state: Recorder = self._states[self.parameter]
        return state

    def hold(self, rows: Mapping[str, Tensor]) -> None:
        """Sets the parameter's rows to `rows[""]`, and updates its state with the other entries."""
        self.parameter.grad = None
        self.parameter.data = rows[""].clone()
        self.state.update({name: value.clone() for name, value in rows.items() if name})

    def step(self, gradient: Tensor, *, sparse: bool) -> None:
        """Runs one step of the optimizer without hooks."""
        if sparse:
            ids = torch.arange(len(gradient), device=gradient.device)
            gradient = sparse_of_all(gradient, ids)
        self.parameter.grad = gradient.clone()  # some optimizers change it in place
        self._step(self.optimizer)


def copy_with(
    optimizer: Optimizer,
    small: Mapping[int, Mapping[int, nn.Parameter]],
    settings: Mapping[str, Any],
    *,
    construct: bool,
) -> Optimizer:
    """Copies an optimizer, without its state, onto small parameters that replace some of its own.

    `small` maps a group's number and a parameter's position in the group to the small parameter.
    `settings` override the groups' options of the same name. See OptimizerCopy for `construct`.
    """
    by_id: dict[int, nn.Parameter] = {}
    taken: list[tuple[list[nn.Parameter], dict[str, Any]]] = []
    for number, group in enumerate(optimizer.param_groups):
        if not (chosen := small.get(number)):
            continue
        held, own = group["params"], dict[str, Any]()
        by_id |= {id(held[place]): parameter for place, parameter in chosen.items()}
        for name, value in group.items():
            is_cut = isinstance(value, list) and len(chosen) < len(held) == len(value)
            if name != "params":  # a list may have one entry per parameter, such as param_names
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
    """Copies an optimizer; `small` maps id(original parameter) to the small parameter."""
    kind, attributes = type(optimizer), _own_attributes(optimizer)
    for_all = {key: value for key, value in optimizer.state.items() if isinstance(key, str)}
    groups: list[dict[str, Any]] = []
    # deepcopy replaces these objects instead of copying them.
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
        # Flags and counters among the attributes continue from the original's values.
        vars(copied).update(plain_values(attributes))
    else:
        copied = memo[id(optimizer)] = object.__new__(kind)
        vars(copied).update(copy.deepcopy(attributes, memo))
    return copied
