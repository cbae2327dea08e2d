"""CountedExchange: steps in as much memory as each needs, which the host counts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

import torch
from torch import Tensor

from speedtorch.ops.functions import carry_rows, merge_rows
from speedtorch.plan.planned_batch import LoadedBatch, PlannedBatch
from speedtorch.step.exchange import Exchange
from speedtorch.step.gradient_sums import among_more
from speedtorch.step.row_store import Block, Fields
from speedtorch.step.step import Batch, Copy, PendingTransfer, Prefetched, Rows, Step

__all__ = ["CountedExchange"]


class CountedExchange(Exchange):
    """Rows of any number, of which more can join a step, and steps of several tables at once."""

    takes_more = True

    def _plan(self, parts: Sequence[Tensor], after: Batch | None = None) -> PlannedBatch:
        # Not by planned(): this is every step's.
        rows, device, padding = self._named_rows, self.device, self._padding
        return PlannedBatch(parts, rows, device, padding, after=after, name=self.name)

    def _nothing(self) -> tuple[Tensor, Rows]:
        return torch.empty(0, dtype=torch.int64, device=self.device), self._memory(0)

    def _memory(self, count: int) -> Rows:
        """Memory for rows of every field."""
        rows: Rows = []
        for shape, dtype in self._view.kept.fields.values():
            rows.append(torch.empty((count, *shape), dtype=dtype, device=self.device))
        return rows

    def _loaded_again(self, step: Step) -> tuple[Tensor, Rows]:
        nothing = self._memory(0)
        if not step.batches:
            return step.ids, nothing
        ids = step.ids
        if self._padding is not None:
            ids = torch.cat([ids, ids.new_tensor([self._padding])])
        return step.ids, self._store.load(self.fields, Block(nothing, ids[:0]), ids)

    def _before_lookup(self) -> None:
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.name}: a CUDA graph cannot hold a lookup, because the number of rows"
                " changes from step to step; build it with capacity=, the most rows of a step, or"
                " capture what comes after it"
            )

    def _begun(
        self, batch: Batch, seen: set[tuple[int, int]], *, is_told: bool, prefetches: bool
    ) -> Step:
        assert isinstance(batch, PlannedBatch)
        transfer, leaving, copy = self.now.transfer, None, Copy.DIRTY
        if isinstance(transfer, Prefetched) and transfer.batch is batch:
            rows = transfer.rows
            leaving = self._joined(batch, rows)
        else:
            copy, held = self._all_leaving()
            rows = self._store.load(self.fields, held, batch.loaded)
        return self.now.after(
            batch,
            batch.ids,
            rows,
            seen,
            is_told=is_told,
            copy=copy,
            leaving=leaving,
            prefetches=prefetches,
        )

    def _begun_alone(self, ids: Tensor) -> Step:
        copy, held = self._all_leaving()
        # If rows joined the step before, rows will probably join this one: rows that leave and
        # rows that join then cross the link at once, and the lookup that counts them need not wait
        # for the former.
        waits = self.now.moved > 0 and copy is Copy.DIRTY and self._store.can_wait
        load = partial(self._store.load_batch, self.fields, held, evicts=not waits)
        batch = LoadedBatch(ids, self._named_rows, self.device, self._padding, load, self.name)
        leaving = held if waits else None
        return self.now.after(
            *(batch, batch.ids, batch.brought, set()),
            is_told=False,
            copy=copy,
            leaving=leaving,
            waits=waits,
        )

    def _all_leaving(self) -> tuple[Copy, Block]:
        """The rows of now that leave where others take their place, and how those are then.

        Those that stay have not been in the table in between.
        """
        if self.now.transfer is not None:  # rows that waited for a lookup that has not come
            self.complete(ahead=False)
        self._drop_prefetched()
        if (now := self.now).copy is Copy.DIRTY:
            return Copy.DIRTY, Block(self._view.rows_of(now), now.ids)
        return Copy.CLEAN, Block(now.rows, now.ids[:0])

    def _joined(self, batch: PlannedBatch, rows: Rows) -> Block | None:
        """Carries staying rows into the prefetched rows; returns the rows that leave."""
        now = self.now
        self._travel.join()
        old = self._view.rows_of(now)
        places, taken_from = batch.staying
        carry_rows(rows, places, old, taken_from)
        self._read_padding(rows)
        leaving = Block(old, *batch.leaving)
        return leaving if now.copy is Copy.DIRTY and len(leaving.ids) > 0 else None

    def _extended(self, parts: Sequence[Tensor], *, is_planned: bool) -> Step:
        batch = self.planned(parts, self.now.ids)
        if batch.brings == 0:
            return self.now.with_batch(batch, is_planned=is_planned)
        self._drop_prefetched()
        now, load, leaving = self.now, batch.arriving[0][: batch.brings], None
        if isinstance(now.transfer, PendingTransfer):
            leaving = now.transfer.leaving
        assert leaving is None or isinstance(leaving, Block)
        ids, before, places, *rows = merge_rows(self._view.rows_of(now), now.ids, load)
        self._store.exchange(self._view.kept.fields, leaving, Block(rows, load, places))
        gradient = self._view.parameter.grad if self._view.has_gradient() else None
        return now.with_batch(batch, is_planned=is_planned)._replace(
            ids=ids,
            rows=rows,
            places={},
            transfer=None,
            moved=len(now.batches),
            gradient=None if gradient is None else among_more(gradient, before, len(rows[0])),
        )

    def _sent(self, pending: PendingTransfer, following: Batch | None) -> Prefetched | None:
        assert following is None or isinstance(following, PlannedBatch)
        leaving, arriving, prefetched = pending.leaving, None, None
        assert leaving is None or isinstance(leaving, Block)
        if following is not None:
            try:
                load = following.arriving
            except IndexError:
                following = None  # a lookup of its bad ids raises it
        if following is not None or leaving is not None:
            if leaving is not None:
                self._travel.uses(leaving.rows)
            with self._travel.after_current(self.device):
                if following is not None:  # in memory that only this stream is given again
                    count = following.held + (self._padding is not None)
                    prefetched = Prefetched(following, self._memory(count))
                    arriving = Block(prefetched.rows, *load)
                self._store.exchange(self._view.kept.fields, leaving, arriving)
        return prefetched

    def _return(self, prefetched: Prefetched) -> None:
        batch = prefetched.batch
        assert isinstance(batch, PlannedBatch)
        brings = batch.brings  # the padding's row is never written back
        arrived = Block(prefetched.rows, *(each[:brings] for each in batch.arriving))
        self._store.exchange(self._view.kept.fields, arrived, None)

    def _written_back(self, *, changes: bool) -> Step:
        now = self.now
        if now.copy is Copy.DIRTY and now.ids.shape[0]:  # none without first values
            leaving = Block(self._view.rows_of(now), now.ids)
            self._store.exchange(self._view.kept.fields, leaving, None)
        if now.copy is Copy.DIRTY or (changes and now.copy is Copy.CLEAN):
            return now._replace(copy=Copy.STALE if changes else Copy.CLEAN)
        return now

    # ---- steps of several tables at once

    def layout(self) -> Hashable:
        """What exchanges that can be joined have in common; None if this one cannot be."""
        if self._padding is not None or self._joint is not None or not self._can_join():
            return None
        return (self.device, *self.fields.items(), *self._store.stored.items())

    def _can_join(self) -> bool:
        """Whether this trains the rows, and the device reaches them."""
        return self._view.parameter.requires_grad and self._store.can_join(self.device)

    @property
    def rows(self) -> int:
        """Of the table."""
        return self._store.rows

    def reach(self, fields: Fields) -> list[Tensor]:
        """All rows of the table."""
        return self._store.fields(fields)

    def may_begin(self, batch: PlannedBatch, fields: Fields, *, asked: bool) -> bool:
        """Whether a step of a batch may begin, before its own first lookup unless that asks."""
        self.complete(ahead=False)
        is_expected = self._expected is batch and self._announced.latest is None
        is_expected = (asked or (is_expected and self.is_over())) and not self._is_idle
        alike = self.fields is fields and self.device == batch.device
        return is_expected and alike and self._can_join()

    def trained(self) -> Rows:
        """The held rows as the optimizer has them now."""
        return self._view.rows_of(self.now)

    def begun_jointly(
        self, batch: PlannedBatch, rows: Rows, nothing: Rows, *, asked: bool, copy: Copy
    ) -> Step:
        """The step of a batch whose rows are these, for take(); `nothing` are none of every field.

        It is tentative unless a lookup of this table asks: the step before is kept, without its
        rows.
        """
        batch.count()
        before = None
        if not asked:
            before = self.now._replace(rows=nothing, gradient=self._view.parameter.grad)
        seen = {(0, 0)} if len(batch.parts) == 1 else set()
        return self.now.after(batch, batch.ids, rows, seen, is_told=True, copy=copy, before=before)
