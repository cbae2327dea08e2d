"""StepState: makes `optimizer.state` contain only the step's rows while an optimizer steps.

Outside of the optimizer's own step function, `optimizer.state` has views of all rows (RowWeight).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtorch.optim.optimizer_copy import settings_of, snapshot
from speedtorch.optim.probe import OptimizerProbe, learn_state, probe_optimizer
from speedtorch.step.row_weight import RowWeight, dense
from speedtorch.step.trained_rows import TrainedRows

__all__ = ["StepState", "listed"]


class StepState:
    """The state of one optimizer for the rows of one table.

    This class implements most of OptimizerState in speedtorch/step/parameter_view.py.
    """

    def __init__(self, optimizer: Optimizer, rows: TrainedRows, probe: OptimizerProbe) -> None:
        self.optimizer = weakref.ref(optimizer)
        self._rows_reference = weakref.ref(rows)
        self.probe = probe
        self.names = tuple(probe.row_state)
        self.sparse = probe.sparse
        self._has_stepped = False
        """Whether a step has run or stepped state was loaded: `optimizer.state` then has state."""
        self._held: list[Tensor] = []
        """The state of the step's rows."""
        self._views: dict[str, Any] = {}
        """The optimizer's state of all rows, from before its own step function."""
        self._is_replaced = False
        """Whether begin_step() has put the step's rows into `optimizer.state`, until end_step()."""
        self._entries: dict[str, Any] = {}
        self._settings = settings_of(optimizer, rows.weight)

    @property
    def table_rows(self) -> TrainedRows:
        """The table's rows. Their module or weight keeps the rows, and so this object, alive."""
        if (rows := self._rows_reference()) is None:
            raise RuntimeError(
                "an attached optimizer has outlived its Embedding. Keep a reference to the module."
            )
        return rows

    def entries(self) -> dict[str, Any]:
        """The optimizer's state of the weight, or its last scalars if either is deleted."""
        optimizer, rows = self.optimizer(), self._rows_reference()
        if optimizer is not None and rows is not None:
            entries = optimizer.state.get(rows.parameter)  # within its own step function
            if entries is None and (weight := rows._weight()) is not None:
                entries = optimizer.state.get(weight)
            return {} if entries is None else entries
        return self._entries

    def _keep(self, entries: Mapping[str, Any]) -> None:
        """Keeps the scalar entries. Views of all rows would keep the rows and this object alive."""
        self._entries = {n: value for n, value in entries.items() if n not in self.names}

    def rows(self) -> list[Tensor]:
        """The state of the step's rows, one tensor for each name in `names`."""
        if self._is_replaced:  # within the own step function, or interrupted there
            optimizer, rows = self.optimizer(), self._rows_reference()
            if optimizer is not None and rows is not None:
                entries = optimizer.state.get(rows.parameter)
                if entries is not None:
                    self._take_step(entries)
        return list(self._held)

    def hold(self, rows: Sequence[Tensor]) -> None:
        """Replaces the state of the step's rows with the state of other rows."""
        self._held = list(rows)

    def _take_step(self, entries: Mapping[str, Any]) -> None:
        """Adopts the state of the step's rows that the optimizer's own step function has set."""
        held = []
        for name, before in zip(self.names, self._held, strict=True):
            value = entries.get(name)
            if isinstance(value, RowWeight):
                value = before  # interrupted within end_step()
            if not isinstance(value, Tensor):
                raise self._lost(name)
            held.append(value.detach() if value.requires_grad else value)
        self._held = held

    def _lost(self, name: str) -> RuntimeError:
        return RuntimeError(
            f"{self.table_rows.name}: the state {name!r} was removed from the optimizer, or is no"
            " longer a tensor. To start with new state, call speedtorch.detach(optimizer), and then"
            " attach() again."
        )

    def follow_table(self) -> None:
        """Replaces the views of all rows in `optimizer.state`, after the table was resized."""
        rows, entries = self.table_rows, self.entries()
        entries.update({n: self._of_all(rows, n) for n in self.names if n in entries})

    def _set_stepped(self, has_stepped: bool) -> None:
        """Sets whether a step has run. If so, puts the state of all rows into `optimizer.state`.

        Before the first step the optimizer has no state, as in plain torch: torch's
        get_state_dict() initializes the state only of an optimizer that has none.
        """
        self._has_stepped, rows = has_stepped, self._rows_reference()
        optimizer, weight = self.optimizer(), None if rows is None else rows._weight()
        if not (has_stepped and self.names) or rows is None or optimizer is None or weight is None:
            return
        entries = optimizer.state.setdefault(weight, {})
        of_all = {name: self._of_all(rows, name) for name in self.names}
        entries.update(self._missing(entries) | of_all)
        self._keep(entries)

    def _missing(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """The initial values of the scalars that `entries` do not have."""
        scalars = self.probe.scalar_state.items()
        return {name: snapshot(value) for name, value in scalars if name not in entries}

    def _of_all(self, rows: TrainedRows, name: str) -> Tensor:
        """The state of all rows, which the optimizer has outside of its own step function.

        The returned view keeps the rows alive, so this object must not refer to the view.
        """
        before = self._views.get(name)
        return RowWeight.of(rows, rows, field=name) if before is None else before

    def first_rows(self) -> Mapping[str, Tensor]:
        """Returns the initial state of a new row, by name.

        Before that, loads a state of all rows that user code has assigned to `optimizer.state`.
        """
        self._take_given()
        return self.probe.row_state

    def _take_given(self) -> None:
        """Loads into the table a state of all rows that user code has assigned to an entry."""
        rows = self.table_rows
        entries = self.entries()
        for name in self.names:
            value = entries.get(name)
            if isinstance(value, RowWeight) and value._rows is rows and value._field == name:
                if value._assigned != rows.assigned[name]:  # each step comes here
                    value.check_age()
                continue
            if value is None and not self._has_stepped:
                continue
            if not isinstance(value, Tensor):
                raise self._lost(name)
            rows.load(dense(value), name)
            rows.assigned[name] += 1
            entries[name] = self._of_all(rows, name)

    def _follow(self, optimizer: Optimizer) -> None:
        """Adapts initial state to changed settings; RuntimeError if they need other row state."""
        rows, before, probe = self.table_rows, self.probe, self.probe
        settings = settings_of(optimizer, rows.weight)
        if _switches(settings) != _switches(self._settings):
            probe = probe_optimizer(optimizer, rows.weight, sparse=probe.sparse)
        elif settings != self._settings and not self._has_stepped:  # Rprop's state starts as its lr
            probe = learn_state(optimizer, rows.weight, sparse=probe.sparse)
        if probe.row_state.keys() != set(self.names):
            raise RuntimeError(
                f"{type(optimizer).__name__} keeps {listed(probe.row_state)} of each row of"
                f" {rows.name} with its current settings, and {listed(self.names)} with those of"
                " attach(). Nothing was stepped. Change the settings back, or detach the optimizer"
                " and attach it again."
            )
        if probe is not before and not self._has_stepped:
            for (name, row), held in zip(probe.row_state.items(), self._held, strict=True):
                if not torch.equal(row, before.row_state[name]):
                    rows.flush()
                    rows.fields.begin(name, row.cpu())
                    held.copy_(row.expand_as(held))
            if made := optimizer.state.get(rows.weight):  # made by the constructor
                made.update({n: snapshot(value) for n, value in probe.scalar_state.items()})
            self.probe, self.sparse = probe, probe.sparse
        self._settings = settings

    def begin_step(self, rows: TrainedRows, weight: RowWeight) -> None:
        """Puts the state of the step's rows into `optimizer.state`, before its own step runs."""
        optimizer = self.optimizer()
        if optimizer is None or not (self._has_stepped or rows.parameter.grad is not None):
            return
        if self.names:
            entries = optimizer.state.get(weight, {})
            of_step = dict(zip(self.names, self._held, strict=True))
            if not entries.keys() >= self.probe.scalar_state.keys():
                of_step = self._missing(entries) | of_step
            self._views = {n: v for n in self.names if type(v := entries.get(n)) is RowWeight}
            optimizer.state.setdefault(weight, entries).update(of_step)
            self._is_replaced = True
        self._has_stepped = True

    def end_step(self, rows: TrainedRows, weight: RowWeight) -> None:
        """Restores the state of all rows in `optimizer.state`, after its own step has ended."""
        if not self.names or (optimizer := self.optimizer()) is None:
            return
        entries = optimizer.state.get(rows.parameter)
        if entries is None:
            entries = optimizer.state.get(weight)
        if entries is None or entries.keys().isdisjoint(self.names):
            return
        if self._is_replaced:
            self._take_step(entries)
            if len(self._views) != len(self.names):
                self._views = {name: self._of_all(rows, name) for name in self.names}
            entries.update(self._views)
            self._keep(entries)
            self._is_replaced, self._views = False, {}
            return
        for name, held in zip(self.names, self._held, strict=True):
            if entries.get(name) is held:  # interrupted within begin_step()
                entries[name] = self._of_all(rows, name)

    def begin_replay(self) -> None:
        """Marks the state as stepped, before a CUDA graph steps the rows."""
        if not self._has_stepped:
            self._set_stepped(True)


def _switches(settings: Mapping[str, Any]) -> dict[str, bool]:
    """Whether each setting except lr is nonzero: a nonzero momentum needs a buffer."""
    return {name: bool(value) for name, value in settings.items() if name != "lr"}


def listed(names: Iterable[str]) -> str:
    """Formats state names for error messages."""
    return ", ".join(names) or "nothing"
