"""An attached optimizer's per-row state: for the step's rows, in the tables, in state_dict()."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtorch.optim.optimizer_copy import group_of
from speedtorch.optim.probe import forgotten_by
from speedtorch.optim.row_wise_adagrad import RowWiseAdagrad
from speedtorch.optim.step_state import StepState, listed
from speedtorch.step.row_weight import dense
from speedtorch.step.trained_rows import TrainedRows
from speedtorch.table.row_shard import RowShard
from speedtorch.table.whole_fields import reading_state

__all__ = ["AttachedState", "SavedState", "calls_load_hooks", "state_of"]


def calls_load_hooks(optimizer: Optimizer) -> bool:
    """Whether an optimizer's load_state_dict() calls torch's load hooks."""
    methods = Optimizer.load_state_dict, RowWiseAdagrad.load_state_dict
    return type(optimizer).load_state_dict in methods


class Loading(NamedTuple):
    """The state that a load_state_dict() loads for the rows of one table."""

    entries: Mapping[str, Any] | None
    """The state of all rows and the scalars; None for the state before the first step."""
    replaced: tuple[object, object] | None = None
    """The optimizer's old `state` and `param_groups`, which torch replaces last in a load; None if
    torch has replaced them."""

    def is_assigned(self, optimizer: Optimizer | None) -> bool:
        """Whether the optimizer's own part is loaded, so that the per-row part must follow."""
        if self.replaced is None:
            return True
        state, groups = self.replaced
        return (
            optimizer is not None
            and optimizer.state is not state
            and optimizer.param_groups is not groups
        )


class AttachedState(StepState):
    """The per-row state of an optimizer for one Embedding, as its probe found it."""

    loading: Loading | None = None
    """The state that load_state_dict() loads; None once all of it is in the table."""
    _counts_anew = False
    """Whether a file holds the per-row state but no step count."""

    def complete(self) -> None:
        """See OptimizerState."""
        if (loading := self.loading) is None or not loading.is_assigned(self.optimizer()):
            return
        try:
            self.loading = None  # the writes below call complete() again
            self._put(loading.entries, self.table_rows.fields.fill)
        except BaseException:
            self.loading = loading
            raise

    def expect(self, loading: Loading | None) -> None:
        """Sets the state that complete() loads once the optimizer's own part is loaded."""
        self.loading = loading

    def before_step(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        """Prepares a step of `group`, which holds the weight.

        Raises RuntimeError if the present settings make the optimizer keep other per-row state.
        """
        self.complete()
        self.loading = None  # left by a load_state_dict() that raised
        self._take_given()
        if self._counts_anew:
            self._counts_anew = False
            warnings.warn(
                f"{self.table_rows.name}: a file had the rows' {listed(self.names)}, but"
                f" {listed(self.probe.scalar_state)} has its initial value. To continue training,"
                " load the optimizer's state_dict().",
                stacklevel=4,
            )
        names = optimizer.defaults
        if not all(map(operator.is_, map(group.get, names), map(self._settings.get, names))):
            self._follow(optimizer)
        if group.get("fused") and "momentum_buffer" in self.names and not group["dampening"]:
            # torch's fused SGD needs the buffers of all parameters in a group, or of no parameter.
            for param in group["params"]:
                if param.grad is not None and optimizer.state[param].get("momentum_buffer") is None:
                    optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)

    def after_step(self, entries: dict[str, Any]) -> None:
        """Raises RuntimeError if a step made per-row state that attach() did not find."""
        known = len(self.names) + len(self.probe.scalar_state)
        if self._has_stepped and len(entries) > known:
            self._refuse_unknown(entries, len(self.table_rows.parameter), RuntimeError)

    def _refuse_unknown(self, entries: dict[str, Any], rows: int, error: type[Exception]) -> None:
        columns = self.table_rows.parameter.shape[1:]
        shape = (1, *columns) if rows == 1 else (rows,)  # a scalar is no per-row state
        for name in entries.keys() - {*self.names, *self.probe.scalar_state}:
            if isinstance(value := entries[name], Tensor) and value.shape[: len(shape)] == shape:
                raise error(
                    f"{self.table_rows.name}: unexpected per-row state {name!r}. At attach() the"
                    f" optimizer had the per-row state {listed(self.names)}. Attach an optimizer of"
                    " the class and with the settings that made the unexpected state."
                )

    @property
    def _has_state(self) -> bool:
        """Whether the constructor or a step has made state, or other processes may have."""
        if self._has_stepped or self.entries():
            return True
        return any(map(self.table_rows.fields.is_shared, self.names))

    def _with_scalars(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        entries = self.entries()
        return {**self._missing(entries), **entries, **rows}

    def to_write(self) -> dict[str, Any] | None:
        """Returns writable state of all rows in the table's memory, or None if no state exists.

        The caller writes to the state and then calls was_written().
        """
        self.check_kept()
        if not self._has_state:
            return None
        self._take_given()
        self.table_rows.flush()
        rows = {name: self.table_rows.fields.in_place(name) for name in self.names}
        return self._with_scalars(rows)

    def was_written(self, entries: Mapping[str, Any]) -> None:
        """Adopts the scalars of `entries`; rows on the GPU are read again before their next use."""
        self._set_stepped(True)
        self.entries().update({n: v for n, v in entries.items() if n not in self.names})
        self.table_rows.flush()

    def saved(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """Returns the state of all rows, or None if no state exists.

        The state is a contiguous copy, or a view if WholeFields.saved() does not copy. On strided
        memory torch computes with other instructions, which may round the last bits differently.
        """
        self.complete()
        if not self._has_state:
            return None
        self._take_given()
        with reading_state():
            self.table_rows.flush()
        rows = {name: self.table_rows.fields.saved(name) for name in self.names}
        parameter = self.table_rows.weight
        # torch.save rejects views of one storage with several dtypes. torch's fused CPU optimizers
        # read strided rows as a contiguous matrix.
        fused = parameter.is_cpu and group_of(optimizer, parameter).get("fused")
        if fused or {field.dtype for field in rows.values()} - {parameter.dtype}:
            rows = {name: _in_own_memory(field) for name, field in rows.items()}
        return self._with_scalars(rows)

    def check(self, entries: dict[str, Any]) -> None:
        """Raises ValueError unless `entries` hold loadable state of all rows."""
        name, rows = self.table_rows.name, self.table_rows.table.whole_rows
        self._refuse_unknown(entries, rows, ValueError)
        if missing := [name for name in self.probe.scalar_state if name not in entries]:
            raise ValueError(f"the state of {name} has no {listed(missing)}; nothing was loaded")
        for field, row in self.probe.row_state.items():
            expected, value = (rows, *row.shape), entries.get(field)
            if isinstance(value, Tensor):
                if value.shape == expected and value.layout == torch.strided and not value.is_meta:
                    self.table_rows.fields.check_loadable(row, value)
                    continue
                value = f"{value.layout} {list(value.shape)} on {value.device}"
            raise ValueError(
                f"the state {field!r} of {name} must be dense and have the shape"
                f" {list(expected)}, got {value}; nothing was loaded"
            )
        self.check_kept()

    def check_kept(self) -> None:
        """Raises ValueError if the optimizer's next step would overwrite loaded state."""
        optimizer = self.optimizer()
        if optimizer is None or self._has_stepped or not self.names:
            return
        known = forgotten_by(optimizer, self.table_rows.weight, sparse=self.sparse)
        for name, value in known.items():
            raise ValueError(
                f"{type(optimizer).__name__}: the next step would overwrite loaded state, because"
                f" the attribute {name!r} is {vars(optimizer)[name]!r}. Set it to {value!r}, as a"
                " step does, after attach() and before loading; nothing was loaded"
            )

    def take(self, entries: dict[str, Any] | None, *, was_read: bool = False) -> None:
        """Loads saved state, or the state before the first step, into the table.

        If `entries` is None, a table that was read from a file with state keeps that state.
        """
        self.table_rows.write_back()
        self._put(entries, self.table_rows.fields.begin, was_read=was_read)
        made, rows = self.entries(), self.table_rows  # by the optimizer's constructor
        made.update({name: self._of_all(rows, name) for name in self.names if name in made})

    def _put(
        self,
        entries: Mapping[str, Any] | None,
        fill: Callable[[str, Tensor], None],
        *,
        was_read: bool = False,
    ) -> None:
        """Like take(), after the rows are written back; can be repeated after an exception."""
        for name, row in self.probe.row_state.items():
            if entries is not None:
                self.table_rows.fields.load(name, dense(entries[name]))
            elif not was_read:
                fill(name, row.cpu())
        self._counts_anew = was_read and entries is None and bool(self.probe.scalar_state)
        self._set_stepped(was_read or entries is not None)


def _in_own_memory(field: Tensor) -> Tensor:
    return field if isinstance(field, RowShard) else field.contiguous()


def state_of(rows: TrainedRows) -> AttachedState | None:
    """Returns the attached state of rows, or detaches them if their optimizer was deleted."""
    if not isinstance(state := rows.state, AttachedState):
        return None
    if state.optimizer() is None:
        rows.detach()
        return None
    return state


class SavedState:
    """Hooks of an attached optimizer's state_dict() and load_state_dict(), until remove().

    If a class defines its own load_state_dict(), that method loads first, and the loaded per-row
    state is then copied to the tables. The constructor raises ValueError if the class has its own
    state_dict() that does not call torch's hooks.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        _refuse_own_state_dict(optimizer)
        self.states: list[AttachedState] = []
        """The optimizer's per-row state, one object for each table."""
        self._handles = [
            optimizer.register_state_dict_pre_hook(lambda _: self._await_steps()),
            optimizer.register_state_dict_post_hook(self._complete),
        ]
        if calls_load_hooks(optimizer):
            self._handles.append(optimizer.register_load_state_dict_pre_hook(self._take))
            self._handles.append(optimizer.register_load_state_dict_post_hook(self._finish))
        else:
            # torch's copies and pickles of an optimizer omit this attribute, as they omit hooks.
            optimizer.load_state_dict = self._load_own  # type: ignore[method-assign]

    def remove(self, optimizer: Optimizer) -> None:
        """Removes the hooks and restores the class's own load_state_dict()."""
        for handle in self._handles:
            handle.remove()
        vars(optimizer).pop("load_state_dict", None)

    def shown(self, optimizer: Optimizer, *, to_write: bool) -> dict[Any, Any]:
        """Returns the optimizer's state with all rows; `to_write` allows writes in place."""
        shown = dict(optimizer.state)
        for state in self.states:
            if not state.names:
                continue
            parameter = state.table_rows.weight
            entries = state.to_write() if to_write else state.saved(optimizer)
            if entries is not None:
                shown[parameter] = entries
            else:
                shown.pop(parameter, None)
        return shown

    def was_written(self, shown: Mapping[Any, Any]) -> None:
        """Adopts state that a caller wrote to the result of shown()."""
        for state in self.states:
            entries = shown.get(state.table_rows.weight)
            if state.names and entries is not None:
                state.was_written(entries)

    def _complete(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        numbers = _numbers(optimizer, state_dict["param_groups"])
        for state in self.states:
            if not state.names:  # torch's own state is complete
                continue
            number = numbers[id(state.table_rows.weight)]
            entries = state.saved(optimizer)
            if entries is None:
                state_dict["state"].pop(number, None)
            else:
                state_dict["state"][number] = entries

    def _take(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Checks the state, and leaves the per-row state to complete().

        torch would copy all rows of it to the GPU.
        """
        self._await_steps()
        lengths = [len(group["params"]) for group in optimizer.param_groups]
        if lengths != [len(group["params"]) for group in state_dict["param_groups"]]:
            return state_dict  # torch raises, and nothing has changed
        numbers, rest = _numbers(optimizer, state_dict["param_groups"]), dict(state_dict["state"])
        found = [numbers.get(id(state.table_rows.weight)) for state in self.states]
        saved = [rest.get(number) or None for number in found]
        self._check(saved)
        self._write_back()
        replaced = optimizer.state, optimizer.param_groups
        for state, number, entries in zip(self.states, found, saved, strict=True):
            state.expect(Loading(entries, replaced))
            if number in rest:
                rest[number] = {n: v for n, v in rest[number].items() if n not in state.names}
        return {**state_dict, "state": rest}

    def _finish(self, optimizer: Optimizer) -> None:
        """Copies the per-row state to the tables; after an exception their next use repeats it."""
        for state in self.states:
            state.complete()

    def _load_own(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Like the class's load_state_dict(); if that or a check raises, no state has changed."""
        optimizer = self.states[0].optimizer()
        assert optimizer is not None  # this method is an attribute of the optimizer
        self._write_back()
        before = optimizer.state, optimizer.param_groups
        try:
            type(optimizer).load_state_dict(optimizer, state_dict, *args, **kwargs)
            own = optimizer.state
            saved = [dict(own.get(s.table_rows.weight) or {}) or None for s in self.states]
            self._check(saved)
            for state, entries in zip(self.states, saved, strict=True):
                state.expect(Loading(entries))
        except BaseException:
            for state in self.states:
                state.expect(None)
            optimizer.state, optimizer.param_groups = before
            raise
        self._finish(optimizer)

    def check_loads(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Raises ValueError if load_state_dict() would; changes nothing."""
        numbers, saved = _numbers(optimizer, state_dict["param_groups"]), state_dict["state"]
        found = [numbers[id(state.table_rows.weight)] for state in self.states]
        self._check([saved.get(number) or None for number in found])

    def _check(self, saved: list[Any]) -> None:
        """Raises ValueError unless each table's saved state, if any, is state of all rows."""
        for state, entries in zip(self.states, saved, strict=True):
            if entries is not None:
                state.check(entries)

    def _await_steps(self) -> None:
        """Waits for a step in another thread, whose plain rows replace the weights in the groups.

        Also completes an interrupted step, which may not have restored the weights.
        """
        for state in self.states:
            rows = state.table_rows
            with rows.lock:
                rows.exchange.stepping.await_step()
                rows.exchange.held.complete(ahead=False)

    def _write_back(self) -> None:
        """Discards announced ids and writes rows back to the tables, before state is loaded."""
        for state in self.states:
            state.table_rows.exchange.steps.give_up()
            state.table_rows.write_back()


def _refuse_own_state_dict(optimizer: Optimizer) -> None:
    if type(optimizer).state_dict is Optimizer.state_dict:
        return
    called: list[bool] = []
    handle = optimizer.register_state_dict_post_hook(lambda *_: called.append(True))
    try:
        optimizer.state_dict()
    finally:
        handle.remove()
    if not called:
        raise ValueError(
            f"{type(optimizer).__name__} cannot be used: its own state_dict() does not call torch's"
            " hooks, which add the state of all rows. Call super().state_dict() in it."
        )


def _numbers(optimizer: Optimizer, groups: list[dict[str, Any]]) -> dict[int, Any]:
    """Maps the id() of each parameter to its number in a state dict."""
    parameters = [id(param) for group in optimizer.param_groups for param in group["params"]]
    return dict(zip(parameters, [n for group in groups for n in group["params"]], strict=False))
