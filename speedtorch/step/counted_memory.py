"""CountedMemory: allocates each step's rows by their number, for which the host waits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from speedtorch.ops.functions import carry_rows, merge_rows
from speedtorch.plan.planned_batch import LoadedBatch, PlannedBatch
from speedtorch.step.gradient_sums import among_more
from speedtorch.step.held_rows import RowMemory
from speedtorch.step.joined_rows import JoinedRows
from speedtorch.step.row_store import Block
from speedtorch.step.step import Batch, Copy, PendingTransfer, Prefetched, Rows, Step

__all__ = ["CountedMemory"]

_MANY = 8
"""With so many batches a step on the CPU appends new rows, and sorts all rows once."""


class CountedMemory(RowMemory):
    """Memory for any number of rows; later lookups can add rows to a step."""

    takes_more = True
    _has_new_padding = False
    """Whether a lookup wrote the padding row to the table and prefetched rows may be older."""

    plan = RowMemory.planned

    def nothing(self) -> tuple[Tensor, Rows]:
        """See RowMemory.nothing."""
        return torch.empty(0, dtype=torch.int64, device=self.held.device), self._memory(0)

    def _memory(self, count: int) -> Rows:
        """Allocates memory for `count` rows of every field."""
        fields, device = self.held.fields.values(), self.held.device
        return [torch.empty((count, *shape), dtype=kind, device=device) for shape, kind in fields]

    def reloaded(self, step: Step) -> tuple[Tensor, Rows]:
        """See RowMemory.reloaded."""
        held, nothing = self.held, self._memory(0)
        if not step.batches:
            return step.ids, nothing
        ids = step.ids
        if held.padding is not None:
            ids = torch.cat([ids, ids.new_tensor([held.padding])])
        return step.ids, held.store.load(held.fields, Block(nothing, ids[:0]), ids)

    def before_lookup(self) -> None:
        """See RowMemory.before_lookup."""
        if self.held.on_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.held.name}: a CUDA graph cannot capture a lookup, because the number of"
                " rows changes from step to step. Create the module with capacity=, the maximum"
                " of unique rows in a step, or capture only the computation after the lookup."
            )

    def begun(
        self, batch: Batch, seen: set[tuple[int, int]], *, is_planned: bool, prefetches: bool
    ) -> Step:
        """See RowMemory.begun."""
        assert isinstance(batch, PlannedBatch)
        held = self.held
        transfer, outgoing, copy = held.now.transfer, None, Copy.DIRTY
        if isinstance(transfer, Prefetched) and transfer.batch is batch:
            rows = transfer.rows
            outgoing = self._carry_common(batch, rows)
        else:
            copy, left = self._all_outgoing()
            rows = held.store.load(held.view.attached.fields, left, batch.loaded)
        return held.now.after(
            batch,
            batch.ids,
            rows,
            seen,
            is_planned=is_planned,
            copy=copy,
            outgoing=outgoing,
            prefetches=prefetches,
        )

    def begun_alone(self, ids: Tensor) -> Step:
        """See RowMemory.begun_alone."""
        held, (copy, left) = self.held, self._all_outgoing()
        # If rows joined the last step, rows will probably join this step. The write-back then
        # shares a transfer with the joining rows. The lookup that counts these rows need not wait
        # for the write-back.
        waits = held.now.moved > 0 and copy is Copy.DIRTY and held.store.can_wait
        fields = held.view.attached.fields  # held.fields, inlined for speed
        load = partial(held.store.load_batch, fields, left, evicts=not waits)
        batch = LoadedBatch([ids], held.named_rows, held.device, held.padding, load, held.name)
        return held.now.after(
            batch,
            batch.ids,
            batch.results,
            set(),
            is_planned=False,
            copy=copy,
            outgoing=left if waits else None,
            waits=waits,
        )

    def _all_outgoing(self) -> tuple[Copy, Block]:
        """Returns the rows to write back before another step, and the copy state of that step.

        Rows of both steps are not written to the table, so the next step is DIRTY if this one is.
        """
        held = self.held
        if held.now.transfer is not None:  # write-backs that waited for a joining lookup
            held.complete(ahead=False)
        held.drop_prefetched()
        if (now := held.now).copy is Copy.DIRTY:
            return Copy.DIRTY, Block(held.view.rows_of(now), now.ids)
        return Copy.CLEAN, Block(now.rows, now.ids[:0])

    def _carry_common(self, batch: PlannedBatch, rows: Rows) -> Block | None:
        """Copies rows of both steps to the prefetched rows; returns the rows to write back."""
        held = self.held
        held.transfer_stream.join()
        old = held.view.rows_of(held.now)
        places, taken_from = batch.kept
        carry_rows(rows, places, old, taken_from)
        if self._has_new_padding:  # the prefetched padding row is older than the table's
            held.store.read(torch.tensor([held.padding]), rows[0][-1:])
            self._has_new_padding = False
        outgoing = Block(old, *batch.outgoing, are_ready=True)
        return outgoing if held.now.copy is Copy.DIRTY and len(outgoing.ids) > 0 else None

    def note_padding(self) -> None:
        """See RowMemory.note_padding."""
        self._has_new_padding = True

    def extended(self, parts: Sequence[Tensor], *, is_planned: bool, ordered: bool) -> Step:
        """See RowMemory.extended."""
        held = self.held
        if not ordered and len(held.now.batches) >= _MANY and not held.on_gpu:
            return self._joined(parts, is_planned=is_planned)
        if held.joint is not None or isinstance(held.now.transfer, Prefetched):
            # Prefetched rows remain if no row joins.
            batch = self.planned(parts, held.now.ids)
            if batch.new_row_count == 0:
                return held.now.with_batch(batch, is_planned=is_planned)
        outgoing, now = self._waiting(), held.now
        own = Block(held.view.rows_of(now), now.ids)
        load = partial(held.store.join_batch, held.fields, outgoing, own)
        loaded = LoadedBatch(parts, held.named_rows, held.device, held.padding, load, held.name)
        positions, *joined = loaded.results
        if not joined:
            return now.with_batch(loaded, is_planned=is_planned, positions=positions)
        ids, before, _, _, *rows = joined
        return self._among_more(now, ids, before, rows).with_batch(
            loaded,
            is_planned=is_planned,
            positions=positions,
            moved=len(now.batches),
            transfer=None,
        )

    def _waiting(self) -> Block | None:
        """Drops prefetched rows; returns rows whose write-back waited for a joining lookup."""
        held, outgoing = self.held, None
        held.drop_prefetched()
        if isinstance(held.now.transfer, PendingTransfer):
            outgoing = held.now.transfer.outgoing
        assert outgoing is None or isinstance(outgoing, Block)
        return outgoing

    def _among_more(self, step: Step, ids: Tensor, before: Tensor, rows: Rows) -> Step:
        """The step with more rows; `before` are the places of its own rows among them."""
        view = self.held.view
        gradient = view.parameter.grad if view.has_gradient() else None
        if gradient is not None:
            gradient = among_more(gradient, before, len(rows[0]))
        return step._replace(ids=ids, rows=rows, places={}, gradient=gradient)

    def _joined(self, parts: Sequence[Tensor], *, is_planned: bool) -> Step:
        """The step with the rows of one more batch, which are appended to JoinedRows."""
        held = self.held
        outgoing, now = self._waiting(), held.now
        joined = now.joined
        if joined is None:
            joined = JoinedRows.of(held.view.rows_of(now), now.ids, held.padding)
        load = partial(held.store.append_batch, held.fields, outgoing, joined)
        loaded = LoadedBatch(parts, held.named_rows, held.device, held.padding, load, held.name)
        positions, more, *longer = loaded.results
        return now.with_batch(
            loaded,
            is_planned=is_planned,
            positions=positions,
            joined=joined.with_batch(more, longer),
            moved=len(now.batches) if len(more) else now.moved,
            transfer=None if len(more) else now.transfer,
        )

    def ordered(self) -> Step:
        """See RowMemory.ordered."""
        held, now = self.held, self.held.now
        joined = now.joined
        assert joined is not None
        load, order = joined.ids[joined.first : joined.size].sort()
        ids, before, places, *rows = merge_rows(held.view.rows_of(now), now.ids, load)
        carry_rows(rows, places, joined.rows, order.add_(joined.first))
        zeros = held.view.gradient_of_zeros
        ordered = self._among_more(now, ids, before, rows)
        if zeros is not None:  # of zero_grad() after the lookups of the joined rows
            zeros = among_more(zeros, before, len(rows[0]))
            held.view.note_zeros(zeros)
            ordered = ordered._replace(gradient=zeros)
        return ordered._replace(joined=None, moved=len(now.batches))

    def sent(self, pending: PendingTransfer, following: Batch | None) -> Prefetched | None:
        """See RowMemory.sent."""
        assert following is None or isinstance(following, PlannedBatch)
        held = self.held
        outgoing, incoming, prefetched = pending.outgoing, None, None
        assert outgoing is None or isinstance(outgoing, Block)
        if following is not None:
            try:
                load = following.incoming
            except IndexError:
                following = None  # the lookup of these ids raises the error
        if following is not None or outgoing is not None:
            if outgoing is not None:
                held.transfer_stream.uses(outgoing.tensors)
            with held.transfer_stream.after_current(held.device):
                if following is not None:  # allocated on the stream that writes to it
                    count = following.held + (held.padding is not None)
                    prefetched = Prefetched(following, self._memory(count))
                    incoming = Block(prefetched.rows, *load, are_ready=True)
                held.store.exchange(held.fields, outgoing, incoming)
        return prefetched

    def put_back(self, prefetched: Prefetched) -> None:
        """See RowMemory.put_back."""
        batch = prefetched.batch
        assert isinstance(batch, PlannedBatch)
        count = batch.new_row_count  # excludes the padding row, which is never written back
        ids, places = batch.incoming
        new = Block(prefetched.rows, ids[:count], places[:count])
        self.held.store.exchange(self.held.fields, new, None)

    def written_back(self, *, changes: bool) -> Step:
        """See RowMemory.written_back."""
        held, now = self.held, self.held.now
        # An exchange of 0 rows would draw the initial values of a lazy table.
        if now.copy is Copy.DIRTY and now.ids.shape[0]:
            held.store.exchange(held.fields, Block(held.view.rows_of(now), now.ids), None)
        if now.copy is Copy.DIRTY or (changes and now.copy is Copy.CLEAN):
            return now._replace(copy=Copy.STALE if changes else Copy.CLEAN)
        return now
