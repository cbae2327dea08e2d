"""Copies of an optimizer that step a small parameter of their own, and watch the state it makes.

Called by probe.py. A copy shares nothing that a step could change with the
optimizer it came from: settings, attributes and state are its own, hooks are gone, and every
parameter it refers to is replaced by a small one. Modules, tables and large tensors that it refers
to are not copied: something small stands in for them.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import types
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtorch.table.host_table import HostTable
from speedtorch.torch_internals import (
    LENT_BY_GRAD_SCALER,
    attributes_without_hooks,
    members_of,
    step_without_hooks,
)

__all__ = ["OptimizerCopy", "copy_optimizer", "group_of", "settings_of"]


def group_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """The parameter group that holds a parameter.

    Raises:
        ValueError: no group does.
    """
    for group in optimizer.param_groups:
        if any(held is parameter for held in group["params"]):
            return group
    raise ValueError(
        f"{type(optimizer).__name__} does not hold this parameter of shape"
        f" {list(parameter.shape)}: build the optimizer with it first"
    )


# What decides which state is kept and how it starts.
_SETTING = (bool, int, float, str, tuple)


def settings_of(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings; what an optimizer counts or keeps in its group is none."""
    return {
        name: value
        for name, value in group.items()
        if name in optimizer.defaults and isinstance(value, _SETTING)
    }


# Elements of a tensor that an optimizer refers to and the probe still copies.
_MOST_COPIED = 1 << 16


class NotCopied:
    """Stands in for a module or a table that an optimizer refers to.

    Of a module it knows the parameters, as the small ones that stand in for them, so that an
    optimizer may still ask which of them has settings of its own.

    Args:
        original: what it stands in for.
        stand_ins: what stands in for each parameter, by the parameter's id().
        memos: deepcopy's, of each time that this was copied.
    """

    def __init__(self, original: object, stand_ins: dict[int, Any], *memos: dict[int, Any]) -> None:
        self._original, self._stand_ins, self._memos = original, stand_ins, memos

    def __deepcopy__(self, memo: dict[int, Any]) -> NotCopied:
        return NotCopied(self._original, self._stand_ins, *self._memos, memo)

    def __getattr__(self, name: str) -> Any:
        original = self._original
        if isinstance(original, nn.Module):
            for held in members_of(original):
                found = self._stand_ins.get(id(held.get(name)))
                if found is not None:
                    for memo in self._memos:
                        found = copy.deepcopy(found, memo)
                    return found
        raise AttributeError(
            f"it asks its {type(original).__name__} for {name!r}, which is not copied to try it out"
        )


def _stand_in_for_large(value: Any, stand_ins: dict[int, Any]) -> None:
    """Adds what deepcopy must not copy: modules, tables, large tensors that a value refers to."""
    seen: set[int] = set()
    left = [value]
    while left:
        each = left.pop()
        if id(each) in seen or id(each) in stand_ins:
            continue
        seen.add(id(each))
        if isinstance(each, nn.Module | HostTable):
            stand_ins[id(each)] = NotCopied(each, stand_ins)
        elif isinstance(each, Tensor) and each.numel() > _MOST_COPIED:
            stand_ins[id(each)] = each.detach().new_empty(0)
        left += _referred(each)


def _referred(value: Any) -> Iterator[Any]:
    """What deepcopy would copy together with a value."""
    if isinstance(value, Mapping):
        yield from (*value.keys(), *value.values())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from value
    elif isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, nn.Module):
        yield from itertools.chain(*(held.values() for held in members_of(value)))
        return
    if not isinstance(value, type | types.FunctionType | types.ModuleType | HostTable | NotCopied):
        yield from getattr(value, "__dict__", {}).values()


class Recorder(dict[str, Any]):
    """A parameter's state that keeps a copy of each entry as it was first assigned.

    Optimizers assign zeros and update them in place, so the first value is the one before the first
    update; so is the default of a get() that found nothing. A None stands for "not made yet".
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}
        self._defaults: dict[str, Any] = {}
        self.update(*args, **kwargs)

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

    def setdefault(self, name: str, default: Any = None) -> Any:
        """As dict's, recorded."""
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As dict's, recorded."""
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __ior__(self, other: Any) -> Recorder:  # type: ignore[override,misc]
        self.update(other)
        return self


class _StateMap(defaultdict[Any, Any]):
    """An optimizer's whole state: parameters to recorders."""

    def __init__(self) -> None:
        super().__init__(Recorder)

    def __setitem__(self, key: Any, value: Any) -> None:
        # An empty dict that the optimizer fills later, behind our back, stays as it is and is found
        # out by `OptimizerCopy.first_values`.
        if isinstance(value, Mapping) and value and not isinstance(value, Recorder):
            value = Recorder(value)
        super().__setitem__(key, value)


def snapshot(value: Any) -> Any:
    """A copy of one entry of a state."""
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


class OptimizerCopy:
    """A copied optimizer, its small parameter, and that parameter's state.

    Attributes:
        optimizer: the copy; it holds nothing but `probe`.
        probe: the small parameter.
    """

    def __init__(self, optimizer: Optimizer, probe: nn.Parameter, states: _StateMap) -> None:
        """Holds the three together."""
        self.optimizer = optimizer
        self.probe = probe
        self._states = states

    @property
    def state(self) -> dict[str, Any]:
        """The state of the small parameter; empty before the optimizer makes one."""
        state: dict[str, Any] = self._states[self.probe]
        return state

    def copied_state(self) -> dict[str, Any]:
        """A copy of the state, to hand to another optimizer."""
        return {name: snapshot(value) for name, value in self.state.items()}

    def first_values(self) -> dict[str, Any] | None:
        """Every entry of the state as it was first assigned.

        None if the optimizer fills a dict of its own instead, so that nothing was seen.
        """
        state = self.state
        return state.first if isinstance(state, Recorder) else None

    def install(self, values: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Puts other rows, with their state, in place of the parameter's."""
        self.probe.grad = None
        self.probe.data = values.clone()
        self.state.update({name: value.clone() for name, value in rows.items()})

    def step(self, gradient: Tensor, *, sparse: bool) -> None:
        """One step of the optimizer, without hooks."""
        if sparse:
            every_row = torch.arange(gradient.shape[0], device=gradient.device)
            gradient = torch.sparse_coo_tensor(
                every_row[None], gradient, gradient.shape, is_coalesced=True, check_invariants=False
            )
        self.probe.grad = gradient.clone()  # which some optimizers change in place
        step_without_hooks(type(self.optimizer))(self.optimizer)


def copy_optimizer(
    optimizer: Optimizer,
    parameter: Tensor,
    values: Tensor,
    settings: Mapping[str, Any],
    *,
    construct: bool,
) -> OptimizerCopy:
    """Copies an optimizer for a small parameter, which starts without any state.

    Args:
        optimizer: what to copy; unchanged.
        parameter: the parameter whose group's settings the copy gets.
        values: what the small parameter holds `[rows, ...]`; copied.
        settings: other values for settings that the group has.
        construct: call the class again with the group's settings instead of copying attributes, for
            optimizers that make their state while they are constructed.

    Returns:
        The copy.

    Raises:
        TypeError: the class cannot be called with the group's settings alone.
    """
    kind = type(optimizer)
    probe = nn.Parameter(values.detach().clone())
    group = group_of(optimizer, parameter)
    attributes = {
        # Schedulers put a `step` that is bound to the original in front of the class's.
        name: value
        for name, value in attributes_without_hooks(optimizer).items()
        if name not in LENT_BY_GRAD_SCALER and not callable(getattr(kind, name, None))
    }
    for_all = {key: value for key, value in optimizer.state.items() if isinstance(key, str)}
    # What deepcopy must not copy but replace: each parameter, and what we set up ourselves.
    stand_ins: dict[int, Any] = {
        id(held): nn.Parameter(held.new_zeros(1), requires_grad=False)
        if held is not parameter
        else probe
        for any_group in optimizer.param_groups
        for held in any_group["params"]
    }
    rest = {n: each for n, each in attributes.items() if n not in ("state", "param_groups")}
    _stand_in_for_large([group, rest, for_all], stand_ins)
    own = {
        name: copy.deepcopy(value, stand_ins)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }
    for name, value in settings.items():
        if name in own:
            is_tensor = isinstance(own[name], Tensor)
            own[name] = torch.full_like(own[name], value) if is_tensor else value
    own["params"] = [probe]
    states = _StateMap()
    states.update(copy.deepcopy(for_all, stand_ins))
    if construct:
        accepted = set(inspect.signature(kind).parameters) & set(own) - {"params"}
        made = kind([probe], **{name: own[name] for name in accepted})
        made.param_groups[0].update(own)
        states[probe] = Recorder(made.state[probe])
        made.state = states
        return OptimizerCopy(made, probe, states)
    made = object.__new__(kind)
    stand_ins[id(optimizer)] = made
    stand_ins[id(optimizer.param_groups)] = [own]
    stand_ins[id(optimizer.state)] = states
    vars(made).update(copy.deepcopy(attributes, stand_ins))
    return OptimizerCopy(made, probe, states)
