"""AttachedState: what an attached optimizer keeps of an Embedding's rows, held and in the table."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtorch.optim.optimizer_copy import group_of, settings_of, snapshot
from speedtorch.optim.probe import OptimizerProbe, learn_state, probe_optimizer
from speedtorch.step.trained_rows import TrainedRows

__all__ = ["AttachedState", "attached_to"]


class StepOfOptimizer(Protocol):
    """One call of an optimizer's step()."""

    @property
    def has_begun(self) -> bool:
        """Whether the optimizer's own code has run, to its end or into an exception."""


class AttachedState:
    """The state that an optimizer keeps of one Embedding's rows.

    Args:
        optimizer: holds the parameter.
        rows: the Embedding's rows.
        probe: what the optimizer keeps.
        release: removes the optimizer's hooks, of all its tables.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rows: TrainedRows,
        probe: OptimizerProbe,
        release: Callable[[], None],
    ) -> None:
        self.release = release
        self.optimizer = weakref.ref(optimizer)
        self.table_rows = rows
        self.probe = probe
        self.names = tuple(probe.row_state)
        self._has_stepped = False
        self._last: tuple[StepOfOptimizer, bool] | None = None
        """The optimizer's last step, and whether the rows had a gradient then."""
        self._entries: dict[str, Any] = {}
        self.counts_anew = False
        """Whether the rows' state comes from a file, and the step count from nowhere."""
        self._note_settings(optimizer, group_of(optimizer, rows.parameter))

    @property
    def sparse(self) -> bool:
        """Whether the optimizer takes sparse gradients only."""
        return self.probe.sparse

    @property
    def has_stepped(self) -> bool:
        """Whether the state is that of after some step."""
        if self._last is not None and not self._has_stepped:
            step, had_gradient = self._last
            self._has_stepped = had_gradient and step.has_begun
        return self._has_stepped

    @has_stepped.setter
    def has_stepped(self, has_stepped: bool) -> None:
        self._last, self._has_stepped = None, has_stepped

    def entries(self) -> dict[str, Any]:
        """The optimizer's own state of the parameter; the last one if the optimizer is gone."""
        optimizer = self.optimizer()
        if optimizer is not None:
            self._entries = optimizer.state.setdefault(self.table_rows.parameter, {})
        return self._entries

    def rows(self) -> list[Tensor]:
        """The state of the held rows, field by field."""
        entries, rows = self.entries(), []
        for name in self.names:
            value = entries.get(name)
            if not isinstance(value, Tensor):
                raise RuntimeError(
                    f"{self.table_rows.name}: the optimizer has lost its state {name!r} of the held"
                    " rows; detach it before its state is cleared"
                )
            rows.append(value.detach() if value.requires_grad else value)
        return rows

    def hold(self, rows: Sequence[Tensor]) -> None:
        """Puts the state of other rows in its place."""
        entries = self.entries()
        for name, value in self.probe.scalar_state.items():
            if name not in entries:
                entries[name] = snapshot(value)
        entries.update(zip(self.names, rows, strict=True))

    # --------------------------------------------------------------------------------------------
    # Steps

    def before_step(self, optimizer: Optimizer, step: StepOfOptimizer) -> None:
        """Called before the optimizer's step.

        Args:
            optimizer: the optimizer.
            step: this call of its step.

        Raises:
            RuntimeError: with the group's settings of now it would keep other state.
        """
        parameter = self.table_rows.parameter
        _ = self.has_stepped
        if self.counts_anew:
            self.counts_anew = False
            warnings.warn(
                f"{self.table_rows.name}: {_listed(self.names)} of the rows come from a file, but"
                f" {_listed(self.probe.scalar_state)} starts anew; load the optimizer's state_dict"
                " to go on as before",
                stacklevel=4,
            )
        group = group_of(optimizer, parameter)
        for name, value in self._noted:
            if group.get(name) is not value:
                self._follow_settings(optimizer, group)
                break
        if group.get("fused") and "momentum_buffer" in self.names and not group["dampening"]:
            # torch's fused SGD wants all of a group's buffers or none.
            for other in group["params"]:
                if other.grad is not None and optimizer.state[other].get("momentum_buffer") is None:
                    optimizer.state[other]["momentum_buffer"] = torch.zeros_like(other)

        self._last = (step, parameter.grad is not None)

    def _note_settings(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        """Remembers the settings, and None of what is none: it may refer to the optimizer."""
        self._settings = settings_of(optimizer, group)
        self._noted = [(name, self._settings.get(name)) for name in optimizer.defaults]

    def _follow_settings(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        parameter, settings = self.table_rows.parameter, settings_of(optimizer, group)
        if settings != self._settings:
            if _switches(settings) != _switches(self._settings):
                self._follow(optimizer, probe_optimizer(optimizer, parameter))
            elif not self.has_stepped:
                # Until the first step, rows' state starts as the settings say: Rprop's with its lr.
                self._follow(optimizer, learn_state(optimizer, parameter))
        self._note_settings(optimizer, group)

    def _follow(self, optimizer: Optimizer, probe: OptimizerProbe) -> None:
        """Lets the state start as the optimizer's settings of now say."""
        rows = self.table_rows
        if set(probe.row_state) != set(self.names):
            raise RuntimeError(
                f"{type(optimizer).__name__} keeps {_listed(probe.row_state)} of each row of"
                f" {rows.name} with its settings of now, and kept {_listed(self.names)} when it was"
                " attached: give it its settings first, or detach and attach it again; nothing was"
                " stepped"
            )
        if self.has_stepped:
            return
        before, self.probe = self.probe, probe
        entries = self.entries()
        for name, row in probe.row_state.items():
            if torch.equal(row.initial, before.row_state[name].initial):
                continue
            rows.flush()
            rows.store.fill(name, row.initial.cpu())
            if name in entries:
                entries[name].copy_(row.initial.expand_as(entries[name]))
        entries.update({name: snapshot(value) for name, value in probe.scalar_state.items()})

    def after_step(self) -> None:
        """Called after the optimizer's step.

        Raises:
            RuntimeError: the optimizer keeps more of each row now than when it was attached.
        """
        entries = self.entries()
        if len(entries) > len(self.names) + len(self.probe.scalar_state):
            self._refuse_unknown(entries, self.table_rows.parameter.shape, RuntimeError)

    def _refuse_unknown(
        self, entries: Mapping[str, Any], shape: tuple[int, ...], error: type[Exception]
    ) -> None:
        for name, value in entries.items():
            known = name in self.names or name in self.probe.scalar_state
            if known or not isinstance(value, Tensor) or value.shape[:1] != shape[:1]:
                continue
            if shape[0] != 1 or value.shape == shape:  # one number is no row of one
                raise error(
                    f"{self.table_rows.name}: there is a state {name!r} of each row, but the"
                    f" attached optimizer kept {_listed(self.names)} when it was attached: give it"
                    " its settings first, then attach it"
                )

    # --------------------------------------------------------------------------------------------
    # state_dict

    def complete(self) -> dict[str, Any] | None:
        """The state of all rows, as views of the table; None before the first step.

        Copies where views would be of no use: torch.save takes no views of one memory with several
        dtypes, and torch's fused optimizers on the CPU take a field's rows for a matrix.
        """
        if not self.has_stepped:
            return None
        self.table_rows.flush()
        rows = {name: self.table_rows.store.field(name) for name in self.names}
        optimizer, parameter = self.optimizer(), self.table_rows.parameter
        group = {} if optimizer is None else group_of(optimizer, parameter)
        dtypes = {parameter.dtype, *(field.dtype for field in rows.values())}
        if len(dtypes) > 1 or (parameter.is_cpu and group.get("fused")):
            rows = {name: field.contiguous() for name, field in rows.items()}
        return {**self.entries(), **rows}

    def check(self, entries: dict[str, Any]) -> None:
        """Raises ValueError unless saved state is that of all rows."""
        row_shape = self.table_rows.parameter.shape[1:]
        self._refuse_unknown(entries, (self.table_rows.store.rows, *row_shape), ValueError)
        missing = [name for name in self.probe.scalar_state if name not in entries]
        if missing:
            raise ValueError(
                f"the state of {self.table_rows.name} has no {_listed(missing)}; nothing was loaded"
            )
        for name, row in self.probe.row_state.items():
            expected = (self.table_rows.store.rows, *row.shape)
            value = entries.get(name)
            found = value
            if isinstance(value, Tensor):
                if value.shape == expected and value.layout == torch.strided and not value.is_meta:
                    continue
                found = f"{value.layout} {list(value.shape)} on {value.device}"
            raise ValueError(
                f"the state {name!r} of {self.table_rows.name} must be dense and have the shape"
                f" {list(expected)}, got {found}; nothing was loaded"
            )

    def take(self, entries: dict[str, Any] | None) -> None:
        """Puts saved state, or that before the first step, into the table."""
        self.table_rows.bring_home()
        for name, row in self.probe.row_state.items():
            if entries is None:
                self.table_rows.store.fill(name, row.initial.cpu())
            else:
                self.table_rows.store.load(name, entries[name])
        self.has_stepped = entries is not None
        self.counts_anew = False


def _switches(settings: Mapping[str, Any]) -> dict[str, bool]:
    """Which settings are not zero: momentum that is switched on keeps a buffer."""
    return {name: bool(value) for name, value in settings.items() if name != "lr"}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


def attached_to(rows: TrainedRows) -> Optimizer | None:
    """The optimizer that keeps state of the rows; one that is gone is detached now."""
    state = rows.state
    if not isinstance(state, AttachedState):
        return None
    optimizer = state.optimizer()
    if optimizer is None:
        rows.detach()
    return optimizer
