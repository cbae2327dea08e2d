"""AttachedState: what an attached optimizer keeps of an Embedding's rows, held and in the table."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from speedtorch.optimizer_copy import snapshot
from speedtorch.optimizer_state import OptimizerProbe
from speedtorch.table_rows import TableRows

__all__ = ["AttachedState", "attached_to"]


class AttachedState:
    """The state that an optimizer keeps of one Embedding's rows.

    Args:
        optimizer: holds the parameter.
        rows: the Embedding's rows.
        probe: what the optimizer keeps.
    """

    def __init__(self, optimizer: Optimizer, rows: TableRows, probe: OptimizerProbe) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.table_rows = rows
        self.probe = probe
        self.names = tuple(probe.row_state)
        self.has_stepped = False
        self._entries: dict[str, Any] = {}

    def entries(self) -> dict[str, Any]:
        """The optimizer's own state of the parameter; the last one if the optimizer is gone."""
        optimizer = self.optimizer()
        if optimizer is not None:
            self._entries = optimizer.state.setdefault(self.table_rows.parameter, {})
        return self._entries

    def rows(self) -> list[Tensor]:
        """The state of the held rows, field by field."""
        entries = self.entries()
        for name in self.names:
            if not isinstance(entries.get(name), Tensor):
                raise RuntimeError(
                    f"{self.table_rows.name}: the optimizer has lost its state {name!r} of the held"
                    " rows; detach it before its state is cleared"
                )
        return [entries[name].detach() for name in self.names]

    def hold(self, rows: Sequence[Tensor]) -> None:
        """Puts the state of other rows in its place."""
        entries = self.entries()
        for name, value in self.probe.scalar_state.items():
            if name not in entries:
                entries[name] = snapshot(value)
        entries.update(zip(self.names, rows, strict=True))

    # --------------------------------------------------------------------------------------------
    # state_dict

    def complete(self) -> dict[str, Any] | None:
        """The state of all rows, as views of the table; None before the first step."""
        if not self.has_stepped:
            return None
        self.table_rows.swapper.flush()
        return {**self.entries(), **{name: self.table_rows.field(name) for name in self.names}}

    def check(self, entries: dict[str, Any]) -> None:
        """Raises ValueError unless saved state is that of all rows."""
        for name, row in self.probe.row_state.items():
            expected = (self.table_rows.rows, *row.shape)
            value = entries.get(name)
            if not isinstance(value, Tensor) or value.shape != expected:
                found = list(value.shape) if isinstance(value, Tensor) else value
                raise ValueError(
                    f"the state {name!r} of {self.table_rows.name} must have the shape"
                    f" {list(expected)}, got {found}; nothing was loaded"
                )

    def take(self, entries: dict[str, Any] | None) -> None:
        """Puts saved state, or that before the first step, into the table."""
        self.table_rows.let_go()
        for name, row in self.probe.row_state.items():
            if entries is None:
                self.table_rows.fill(name, row.initial.cpu())
            else:
                self.table_rows.write(name, entries[name])
        self.has_stepped = entries is not None


def attached_to(rows: TableRows) -> Optimizer | None:
    """The optimizer that keeps state of the rows; one that is gone is detached now."""
    state = rows.state
    if not isinstance(state, AttachedState):
        return None
    optimizer = state.optimizer()
    if optimizer is None:
        rows.detach()
    return optimizer
