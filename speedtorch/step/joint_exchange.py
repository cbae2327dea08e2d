"""JointExchange: one exchange for the rows of several tables.

If the batches of several tables are planned together, their steps begin together at the first
lookup in any table. Each table's step then has a range of rows in common blocks. If the step of a
table is not over, or its rows were read or changed since, all tables exchange separately. Each
table's rows are the same in both cases.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from speedtorch.memory.side_stream import MemoryStream, SideStream
from speedtorch.ops.functions import carry_rows, exchange_rows, plan_batch
from speedtorch.plan.joint_batch import JointBatch
from speedtorch.plan.planned_batch import BatchIds
from speedtorch.step.exchange import Exchange
from speedtorch.step.held_rows import HeldRows
from speedtorch.step.joint_table import JointTable
from speedtorch.step.row_lock import RowLocks, merge_locks
from speedtorch.step.row_store import Block, exchange_arguments
from speedtorch.step.step import Copy, PendingTransfer, Step, due
from speedtorch.torch_internals import split_with_versions

__all__ = ["JointExchange", "join_exchanges"]

_Key = TypeVar("_Key", bound=Hashable)


class Prefetched(NamedTuple):
    """A queued transfer that loads rows of the next batch."""

    batch: JointBatch
    rows: list[Tensor]
    has_newer_rows: bool
    """Whether some rows may be copies from a step and newer than the tables' rows."""


class Moves(NamedTuple):
    """The common rows of the tables and the work that remains, as an immutable value."""

    batch: JointBatch | None = None
    """The joint batch of the rows."""
    rows: Sequence[Tensor] = ()
    """One tensor for each field with the rows of all tables."""
    steps: tuple[Step, ...] = ()
    """The Step of each table."""
    taken: bool = True
    """Whether all tables have begun their Steps."""
    transfer: PendingTransfer | Prefetched | None = None


class JointExchange:
    """Begins the steps of several tables of one layout together.

    One assignment, of a Moves to `_now`, makes a batch's rows the current ones. An exception before
    the assignment leaves the old rows current and discards the loaded rows. After the assignment,
    the next use of a table repeats the remaining work; see complete().

    Args:
        tables: Tables with the same device, fields and stored dtypes; see JointTable.layout().
    """

    def __init__(self, tables: Sequence[JointTable]) -> None:
        self._tables = tables
        self._fields = [table.held.fields for table in tables]
        self._planning, self._transfer_stream = SideStream("planning"), SideStream("exchange")
        self._now = Moves()
        self._memory_stream = MemoryStream(self._device)
        with torch.inference_mode(False):  # the tensors are kept and may be trained later
            self._nothing = self._memory(0)
        for table in tables:
            table.held.join(self)

    def plan_ahead(self, parts: Sequence[Sequence[Tensor]], after: JointBatch | None) -> JointBatch:
        """Plans a loop's batch from the ids of each table and the joint batch before it."""
        for ids in parts:
            self._planning.uses(ids)  # keeps their memory if the plan is discarded early
        with self._planning.after_current(self._device):
            pairs = zip(self._tables, parts, strict=True)
            apart = [BatchIds(ids, of.rows, self._device, of.held.name) for of, ids in pairs]
            try:
                batch = JointBatch(apart, self._device, after)
            except IndexError:
                for table_ids in apart:
                    # raises an error that names ids and table
                    table_ids.plan_by(plan_batch, table_ids.ids, -1, -1)
                raise
        batch.planned_until(self._planning.end)
        return batch

    @property
    def _device(self) -> torch.device:
        return self._tables[0].held.device

    def complete(self, *, ahead: bool = True) -> None:
        """Finishes the work that the current rows need; see HeldRows.complete()."""
        now = self._now
        self._memory_stream.follow(self._held_tensors)
        if not now.taken:
            for table, step in zip(self._tables, now.steps, strict=True):
                if table.held.now.number < step.number:
                    table.take(step)
            now = self._now = now._replace(taken=True)
        if (pending := due(now.transfer, ahead=ahead)) is not None:
            if torch.is_inference_mode_enabled():  # the next rows could not be trained
                with torch.inference_mode(False):
                    return self.complete(ahead=ahead)
            self._send(now, pending, ahead)

    def _held_tensors(self) -> Iterator[Tensor]:
        """Current tensors that a stream other than their own may use later."""
        now, transfer = self._now, self._now.transfer
        yield from now.rows
        if now.batch is not None:
            yield from now.batch.tensors()
        if isinstance(transfer, Prefetched):
            yield from (*transfer.rows, *transfer.batch.tensors())
        elif transfer is not None and transfer.outgoing is not None:
            yield from (*transfer.outgoing.rows, transfer.outgoing.ids)

    def begin(self, batch: JointBatch, requester: HeldRows) -> bool:
        """Begins a step in all tables; returns False if the tables must exchange separately."""
        if len(parts := batch.batches) != len(self._tables):  # the batch is already released
            return False
        self.complete(ahead=False)
        pairs = list(zip(self._tables, parts, self._fields, strict=True))
        batch.join()
        if self._memory_stream.has_changed:  # planned beside a stream that is no longer current
            self._memory_stream.record(batch.tensors())
        if not batch.count() or not all(
            table.may_begin(part, fields, starts=table.held is requester)
            for table, part, fields in pairs
        ):
            self.drop_prefetched()
            batch.forget_batches()
            return False
        now, ahead, outgoing = self._now, self._now.transfer, None
        if isinstance(ahead, Prefetched) and ahead.batch is batch and self._are_current(now):
            rows = ahead.rows
            self._transfer_stream.join()
            before = self._rows_now(now)
            places, taken_from = batch.kept
            carry_rows(rows, places, before, taken_from)
            outgoing = Block(before, *batch.outgoing)
        else:  # load all rows from the tables
            self.drop_prefetched()
            for table in self._tables:
                table.held.write_back(changes=False)
            rows = self._memory(batch.bounds[-1])
            numbers = batch.row_numbers[: batch.bounds[-1]]
            self._exchange(None, Block(rows, numbers))
        # Own version counters: a write to one table's rows must not count as a change of others.
        held = [end - first for first, end in pairwise(batch.bounds)]
        apart = zip(*(split_with_versions(field, held) for field in rows), strict=True)
        copy = Copy.CLEAN if outgoing is None else Copy.DIRTY
        steps = tuple(
            table.begun(part, list(own), self._nothing, starts=table.held is requester, copy=copy)
            for (table, part, _), own in zip(pairs, apart, strict=True)
        )
        transfer = PendingTransfer(outgoing, prefetches=batch.following() is not None)
        self._now = Moves(batch, rows, steps, taken=False, transfer=transfer)
        batch.forget_batches()
        self.complete()
        return True

    def _are_current(self, now: Moves) -> bool:
        """Whether every table still has the rows of its Step, newer than those of the table."""
        return all(
            table.held.now.rows is step.rows and table.held.now.copy is Copy.DIRTY
            for table, step in zip(self._tables, now.steps, strict=True)
        )

    def _rows_now(self, now: Moves) -> Sequence[Tensor]:
        """The rows of all tables with the optimizers' current values."""
        for table, step in zip(self._tables, now.steps, strict=True):
            for own, trained in zip(step.rows, table.trained(), strict=True):
                if own.data_ptr() != trained.data_ptr():
                    own.copy_(trained)
        return now.rows

    def _memory(self, count: int) -> list[Tensor]:
        kinds = self._fields[0].values()
        return [torch.empty((count, *s), dtype=d, device=self._device) for s, d in kinds]

    def _send(self, now: Moves, pending: PendingTransfer, ahead: bool) -> None:
        """Writes back the last step's rows and prefetches the next batch's on a side stream."""
        outgoing, incoming, following = pending.outgoing, None, None
        assert outgoing is None or isinstance(outgoing, Block)
        if ahead and pending.prefetches and now.batch is not None:
            following = now.batch.following()
        if following is not None and not following.count():
            following = None  # the lookup of its invalid ids raises
        transfer: PendingTransfer | Prefetched | None = None
        if pending.prefetches and not ahead:
            transfer = PendingTransfer(None, prefetches=True)
        if following is not None or outgoing is not None:
            if outgoing is not None:
                self._transfer_stream.uses(outgoing.tensors)
            if following is not None:
                following.join()
            with self._transfer_stream.after_current(self._device):
                if following is not None:  # memory allocated here is reused by this stream only
                    memory = self._memory(following.bounds[-1])
                    transfer = Prefetched(following, memory, has_newer_rows=outgoing is not None)
                    incoming = Block(memory, *following.incoming)
                self._exchange(outgoing, incoming)
        self._now = now._replace(transfer=transfer)

    def _exchange(self, outgoing: Block | None, incoming: Block | None) -> None:
        lists = exchange_arguments(outgoing, incoming)
        host_fields = [
            field
            for table, fields in zip(self._tables, self._fields, strict=True)
            for field in table.host_fields(fields)
        ]
        exchange_rows(host_fields, *lists, len(self._tables))

    def drop_prefetched(self) -> None:
        """Writes prefetched rows back if some have no current copy in the tables."""
        self.complete(ahead=False)
        self._transfer_stream.join()
        now, transfer = self._now, self._now.transfer
        if isinstance(transfer, Prefetched) and transfer.has_newer_rows:
            self._exchange(Block(transfer.rows, *transfer.batch.incoming), None)
        if transfer is not None:
            self._now = now._replace(transfer=None)


def join_exchanges(exchanges: Mapping[_Key, Exchange]) -> list[tuple[list[_Key], JointExchange]]:
    """Joins two or more exchanges of one layout; returns each JointExchange with its keys."""
    alike: dict[Hashable, dict[_Key, JointTable]] = {}
    for key, exchange in exchanges.items():
        table = JointTable(exchange)
        if (layout := table.layout()) is not None:
            alike.setdefault(layout, {})[key] = table
    made = []
    for layout, of_keys in alike.items():
        if len(of_keys) == 1:
            continue
        group = list(of_keys.values())
        locks = [table.held.lock for table in group]
        with RowLocks(*locks):
            if all(table.layout() == layout for table in group):
                merge_locks(locks)  # a step of one table changes the rows of the others
                made.append((list(of_keys), JointExchange(group)))
    return made
