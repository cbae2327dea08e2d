"""JointTable: one table of a JointExchange."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from speedtorch.plan.planned_batch import PlannedBatch
from speedtorch.step.exchange import Exchange
from speedtorch.step.held_rows import HeldRows
from speedtorch.step.row_store import Fields
from speedtorch.step.step import Copy, Rows, Step

__all__ = ["JointTable"]


class JointTable:
    """One table whose steps JointExchange begins together with steps of other tables."""

    def __init__(self, exchange: Exchange) -> None:
        self.held: HeldRows = exchange.held
        self._steps = exchange.steps

    def layout(self) -> Hashable:
        """The key that tables must share to be joined; None if this table cannot be joined."""
        held = self.held
        is_alone = held.padding is not None or held.joint is not None
        if is_alone or not held.memory.takes_more or not self._can_join():
            return None
        return (held.device, *held.fields.items(), *held.store.stored.items())

    def _can_join(self) -> bool:
        """Whether the rows are trained and one op may exchange them with other tables."""
        held = self.held
        return held.view.parameter.requires_grad and held.store.can_join(held.device)

    @property
    def rows(self) -> int:
        """The number of rows of the table."""
        return self.held.store.rows

    def host_fields(self, fields: Fields) -> list[Tensor]:
        """The host tensors of all rows, one for each field."""
        return self.held.store.fields(fields)

    def may_begin(self, batch: PlannedBatch, fields: Fields, *, starts: bool) -> bool:
        """Whether a step may begin; `starts`: this table's own lookup begins the step."""
        held, steps = self.held, self._steps
        held.complete(ahead=False)
        is_expected = steps.expected is batch and held.announced.latest is None
        is_expected = (starts or (is_expected and held.is_over())) and not steps.is_idle
        alike = held.fields is fields and held.device == batch.device
        return is_expected and alike and self._can_join()

    def trained(self) -> Rows:
        """The step's rows with the optimizer's current values."""
        return self.held.view.rows_of(self.held.now)

    def begun(
        self, batch: PlannedBatch, rows: Rows, nothing: Rows, *, starts: bool, copy: Copy
    ) -> Step:
        """The Step of a batch and its rows, for take(); `nothing` has zero rows of every field.

        Unless `starts`, the Step is tentative and keeps the step before, without its rows.
        """
        batch.count()
        now, before = self.held.now, None
        if not starts:
            before = now._replace(rows=nothing, gradient=self.held.view.parameter.grad)
        seen = {(0, 0)} if batch.parts.number == 1 else set()
        return now.after(batch, batch.ids, rows, seen, is_planned=True, copy=copy, before=before)

    def take(self, step: Step) -> None:
        """Makes a Step that has begun in all tables the current step of this table."""
        self._steps.take_expected()
        self.held.take(step)
        self.held.view.show(step)
