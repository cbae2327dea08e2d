"""JointTable: one of the tables whose rows are exchanged together."""

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
    """The steps of one table as JointExchange begins them with those of others."""

    def __init__(self, exchange: Exchange) -> None:
        self.held: HeldRows = exchange.held
        self._steps = exchange.steps

    def layout(self) -> Hashable:
        """What tables that can be joined have in common; None if this one cannot be."""
        held = self.held
        is_alone = held.padding is not None or held.joint is not None
        if is_alone or not held.memory.takes_more or not self._can_join():
            return None
        return (held.device, *held.fields.items(), *held.store.stored.items())

    def _can_join(self) -> bool:
        """Whether this trains the rows, and the device reaches them."""
        held = self.held
        return held.view.parameter.requires_grad and held.store.can_join(held.device)

    @property
    def rows(self) -> int:
        """Of the table."""
        return self.held.store.rows

    def reach(self, fields: Fields) -> list[Tensor]:
        """All rows of the table."""
        return self.held.store.fields(fields)

    def may_begin(self, batch: PlannedBatch, fields: Fields, *, asked: bool) -> bool:
        """Whether a step of a batch may begin, before its own first lookup unless that asks."""
        held, steps = self.held, self._steps
        held.complete(ahead=False)
        is_expected = steps.expected is batch and held.announced.latest is None
        is_expected = (asked or (is_expected and held.is_over())) and not steps.is_idle
        alike = held.fields is fields and held.device == batch.device
        return is_expected and alike and self._can_join()

    def trained(self) -> Rows:
        """The held rows as the optimizer has them now."""
        return self.held.view.rows_of(self.held.now)

    def begun(
        self, batch: PlannedBatch, rows: Rows, nothing: Rows, *, asked: bool, copy: Copy
    ) -> Step:
        """The step of a batch whose rows are these, for take(); `nothing` are none of every field.

        It is tentative unless a lookup of this table asks: the step before is kept, without its
        rows.
        """
        batch.count()
        now, before = self.held.now, None
        if not asked:
            before = now._replace(rows=nothing, gradient=self.held.view.parameter.grad)
        seen = {(0, 0)} if len(batch.parts) == 1 else set()
        return now.after(batch, batch.ids, rows, seen, is_told=True, copy=copy, before=before)

    def take(self, step: Step) -> None:
        """Begins a step that has begun in all tables."""
        self._steps.take_expected()
        self.held.take(step)
        self.held.view.show(step)
