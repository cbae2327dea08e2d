"""FixedBlocks: the rows of a step in blocks of one size; their number remains on the device.

The op that moves rows records on the device which rows the blocks hold. Therefore a step can follow
an eager step or a CUDA graph, and work that an exception interrupted can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import is_

import torch
from torch import Tensor

from speedtorch.memory import empty
from speedtorch.ops.functions import _ops
from speedtorch.plan.fixed_size_batch import BAD_IDS, TOO_MANY, Changes, FixedSizeBatch, too_many
from speedtorch.step.capturing_graphs import CapturingGraphs
from speedtorch.step.row_store import Counted, Fields, RowStore

__all__ = ["OTHER_MODULE", "OVER_SHARE", "REFUSED", "FixedBlocks", "rank_error"]

OVER_SHARE, OTHER_MODULE, REFUSED = 3, 4, 5
"""Faults of ranks that share rows, in addition to the faults of a batch."""


def rank_error(name: str, fault: int, outcome: str) -> IndexError | RuntimeError:
    """The error for a fault code of any rank; `outcome` is a sentence about the consequences."""
    if fault == BAD_IDS:
        return IndexError(f"{name}: an id on some rank is out of range. {outcome}")
    why = "another rank could not load the rows of its step, and its error states the reason."
    if fault == TOO_MANY:
        why = (
            "the lookups of all ranks in a step have more unique rows of one rank than its"
            " capacity. Use smaller batches or a larger capacity."
        )
    if fault == OVER_SHARE:
        why = (
            "a lookup on some rank has more unique rows of one rank than a fair share of the"
            " capacity. Use smaller batches or a larger capacity."
        )
    if fault == OTHER_MODULE:
        why = (
            "other ranks look up rows of another module now. All ranks must make the same lookups"
            " in the same order, with an empty batch if they have no ids."
        )
    return RuntimeError(f"{name}: {why} {outcome}")


class FixedBlocks:
    """Blocks of `capacity` rows: the step's rows, rows to load, and rows to write back.

    `rows` has the step's rows of every field: the batch's rows in order, then zeros, and last the
    padding row, if there is one. The memory remains the same until forget() or make().

    Args:
        name: The module's name in errors.
        store: All rows of the table.
        capacity: Rows in a block.
        padding: Id of the row that is never trained, or None. The id after the last row stands for
            a row of zeros that the table does not have.
    """

    def __init__(self, name: str, store: RowStore, capacity: int, padding: int | None) -> None:
        self.capacity = capacity
        self.rows: list[Tensor] = []
        self.may_have_rows = False
        """False only if the host knows that the blocks hold no row."""
        self._name = name
        self.store = store
        self._padding = padding
        self.changes = 0
        """The number of times that the blocks began a batch or were emptied."""
        self.has_outgoing = False
        """Whether `_outgoing_rows` may have rows that are not yet written back."""
        self._graph_prefetches = False
        """Whether a CUDA graph prefetches the rows of its next replay."""
        self._device: torch.device | None = None
        """The device of the blocks, or None without blocks."""
        self._fields: Fields = {}
        self.graphs = CapturingGraphs()

    def use(self, store: RowStore) -> None:
        """Sets another store of the same table for later exchanges."""
        self.store = store

    def are_for(self, device: torch.device, fields: Fields) -> bool:
        """Whether there are blocks for rows of these fields on a device."""
        return self._device == device and self._fields is fields

    def make(self, device: torch.device, fields: Fields) -> None:
        """Allocates empty blocks for rows of these fields on a device."""
        size = self.capacity
        with torch.inference_mode(False):

            def block(rows: int) -> list[Tensor]:
                """Allocates a zero tensor of `rows` rows for each field."""
                return [
                    torch.zeros((rows, *shape), dtype=dtype, device=device)
                    for shape, dtype in fields.values()
                ]

            numbers = partial(torch.zeros, dtype=torch.int64, device=device)
            rows = block(size + (self._padding is not None))
            self._trained = rows if self._padding is None else [field[:size] for field in rows]
            """The rows without the padding's."""
            self._incoming_rows, self._outgoing_rows = block(size), block(size)
            self.ids, self._status = numbers(size), numbers(8)
            self._number = self._status[3:4]
            """The number of the step's rows, `[1]`."""
            self._outgoing_ids, self._outgoing_count = numbers(size), numbers(1)
            self._halt, self._none = numbers(2), numbers(1)
            self.is_halted = self._halt[:1]
            """`[1]`, not 0 while a fault stops all loads of rows, except for the padding row."""
            self._prefetched = numbers(2 * size + 1)
            """Ids, places and number of the rows that a graph prefetched; number -1 for none."""
            self._prefetched[-1:] = -1
            self._every = torch.arange(size, device=device)
            # Allocated by empty(): ops check other memory at each use, because it may be freed.
            self._fault = empty(
                8, dtype=torch.int64, memory="registered" if device.type == "cuda" else "plain"
            )
            if self._padding is not None:
                self._padding_id = torch.tensor([self._padding], device=device)
        # Every lookup reads this; numpy avoids a torch call.
        self._seen_fault = self._fault.numpy()
        self.has_outgoing = False
        self._device, self._fields, self.rows = device, fields, rows

    def tensors(self) -> Iterator[Tensor]:
        """All memory of the blocks on their device."""
        if self._device is not None:
            yield from (*self.rows, *self._incoming_rows, *self._outgoing_rows)
            yield from (self.ids, self._status, self._outgoing_ids, self._outgoing_count)
            yield from (self._halt, self._none, self._prefetched, self._every)

    @property
    def outgoing(self) -> Counted:
        """The rows of the last step that send() will write back."""
        return Counted(self._outgoing_rows, self._outgoing_ids, self._every, self._outgoing_count)

    def forget(self, capacity: int) -> None:
        """Frees the memory; the next blocks have `capacity` rows."""
        self.capacity = capacity
        self._device, self.rows = None, []
        self._incoming_rows = self._outgoing_rows = []

    def ids_held(self, changes: int) -> Tensor:
        """Ids of the rows if `self.changes` is still `changes`; waits for the device."""
        if changes != self.changes:
            raise NotImplementedError(
                f"{self._name}: the row ids of an earlier step's gradient are no longer known,"
                " because with capacity= the device has the ids of only one step. Use the gradient"
                " before zero_grad() and the next lookup."
            )
        return self.ids[: int(self._number)].clone()

    def _held(self) -> Counted:
        return Counted(self.rows, self.ids, self._every, self._number)

    def _none_of(self, rows: Sequence[Tensor]) -> Counted:
        return Counted(rows, self.ids, self._every, self._none, are_none=True)

    def begin(self, batch: FixedSizeBatch, *, are_prefetched: bool | None) -> None:
        """Replaces the rows of the blocks with the rows of a batch.

        `are_prefetched`: True if send() has prefetched the incoming rows. With False, this call
        loads them and writes the outgoing rows back; otherwise the next send() writes these back.
        Pass None in the capture of a CUDA graph that prefetches: each replay then loads its
        incoming rows, unless the previous replay has prefetched exactly these.
        """
        self.changes += 1
        if self.has_outgoing:
            self.send(None)
        changes = batch.compared(self.ids, self._status, self._halt, self._fault)
        lists = (changes.incoming, changes.incoming_places)
        if not are_prefetched:
            outgoing, number = self._none_of(self.rows), changes.counts[2:3]
            if are_prefetched is None:
                number = self._missing_count(changes)
            else:
                lists_of_old = (changes.outgoing, changes.outgoing_places, changes.counts[3:4])
                outgoing = Counted(self.rows, *lists_of_old)
                self._drop_prefetched()
            incoming = Counted(self._incoming_rows, *lists, number)
            self.store.exchange_counted(self._fields, outgoing, incoming)
        waits = are_prefetched is not False  # the rows for their write-back
        self.has_outgoing, self.may_have_rows = waits, True
        _ops.hold_rows(
            self._trained,
            self._incoming_rows,
            self._outgoing_rows if waits else [],
            changes.kept_places,
            changes.kept_from,
            changes.outgoing,
            changes.outgoing_places,
            changes.counts,
            batch.named,
            self.ids,
            self._status,
            self._outgoing_ids,
            self._outgoing_count,
        )
        batch.set_ids(self.ids, self._number)
        self.fetch_padding()

    def _missing_count(self, changes: Changes) -> Tensor:
        """The number of rows still to load, `[1]`: 0 if the graph prefetched exactly these rows."""
        number, size = changes.counts[2:3], self.capacity
        differ = torch.cat([changes.incoming, changes.incoming_places]) != self._prefetched[:-1]
        differ = (differ.view(2, size) & (self._every < number)).any()
        return number * (differ | (self._prefetched[-1:] != number))

    def _drop_prefetched(self) -> None:
        """Marks the rows that a graph prefetched as outdated."""
        # A replay of another graph cannot know that this graph was replayed in between.
        if self._graph_prefetches or (
            self.ids.is_cuda and torch.cuda.is_current_stream_capturing()
        ):
            self._prefetched[-1:].fill_(-1)

    def fetch_padding(self) -> None:
        """Reads all fields of the padding row."""
        if self._padding is not None and self._padding < self.store.rows:
            for name, rows in zip(self._fields, self.rows, strict=True):
                self.store.read(self._padding_id, rows[-1:], name)

    def send(self, following: FixedSizeBatch | None, *, for_replay: bool = False) -> None:
        """Writes back outgoing rows, and prefetches the rows of the batch `following`, if any.

        `for_replay`: A CUDA graph captures this call. The graph's next replay uses the prefetched
        rows only if its batch loads exactly these.
        """
        incoming = self._none_of(self._incoming_rows)
        if following is not None:
            # Errors of this batch are reported when the batch begins.
            halt, unreported = self._halt.clone(), torch.empty_like(self._status)
            changes = following.compared(self.ids, self._status, halt, unreported)
            lists = (changes.incoming, changes.incoming_places, changes.counts[2:3])
            incoming = Counted(self._incoming_rows, *lists)
            if for_replay:
                torch.cat(lists, out=self._prefetched)
                self._graph_prefetches = True
        if not for_replay:
            self._drop_prefetched()
        self.store.exchange_counted(self._fields, self.outgoing, incoming)
        self._outgoing_count.zero_()
        self.has_outgoing = False

    def write_back(self, *, keep: bool) -> None:
        """Writes the rows to the table; without `keep` the blocks are empty afterwards."""
        if self._device is None:
            return
        if self.has_outgoing:
            self.send(None)
        self._drop_prefetched()
        self.store.exchange_counted(self._fields, self._held(), self._none_of(self._incoming_rows))
        if not keep:
            self.clear()

    def stop(self, fault: Tensor) -> None:
        """If `fault`, `[1]`, is not 0: writes the rows back as they are and empties the blocks.

        The blocks load no row until resume().
        """
        number = torch.where(fault > 0, self._number, self._none)
        held = Counted(self.rows, self.ids, self._every, number)
        self.store.exchange_counted(self._fields, held, self._none_of(self._incoming_rows))
        self._status.masked_fill_(fault > 0, 0)
        torch.maximum(self.is_halted, fault, out=self.is_halted)

    def clear(self) -> None:
        """Marks the blocks as empty."""
        self._drop_prefetched()
        self.changes += 1
        self._status.zero_()
        self.may_have_rows = False

    def read_again(self) -> None:
        """Reads the blocks' rows from the table again."""
        self._drop_prefetched()
        self.store.exchange_counted(self._fields, self._none_of(self._outgoing_rows), self._held())
        self.fetch_padding()

    def with_fields(self, fields: Fields) -> FixedBlocks:
        """Makes blocks of other fields; read_again() then loads the same rows into them."""
        assert self._device is not None
        made = FixedBlocks(self._name, self.store, self.capacity, self._padding)
        made.make(self._device, fields)
        made.ids, made._status, made._halt = self.ids, self._status, self._halt
        made._number, made.is_halted = self._number, self.is_halted
        made._fault, made._seen_fault = self._fault, self._seen_fault
        return made

    def have(self, rows: Sequence[Tensor]) -> bool:
        """Whether `rows` are the tensors of the blocks."""
        return len(rows) == len(self.rows) and all(map(is_, self.rows, rows))

    def take(self, rows: Sequence[Tensor]) -> bool:
        """Copies rows in other memory to the blocks; returns whether there were any."""
        pairs = zip(self.rows, rows, strict=True)
        moved = [(own, new) for own, new in pairs if own.data_ptr() != new.data_ptr()]
        for own, new in moved:
            own.copy_(new)
        return bool(moved)

    def clear_unused(self) -> None:
        """Zeros the memory after the step's rows, which an optimizer may have changed."""
        if self.rows:  # before the first lookup there are no blocks
            _ops.clear_rows(self._trained, self._number)

    def resume(self) -> None:
        """Resumes the moves of rows after a fault."""
        self._halt.zero_()

    def check(self) -> None:
        """Raises a fault that the device found since the last call; rows can then move again.

        Raises IndexError for ids out of range and RuntimeError for other faults.
        """
        if self._device is None or not self._seen_fault[0]:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        kind, distinct, size, bad, position, bad_id, count, rows = self._fault.tolist()
        more = int(self._halt[1])
        self._halt.zero_()
        self._fault.zero_()
        since = f" (and those of {more} later batches)" if more else ""
        nothing = (
            f"Until this error, lookups of the batch{since} returned zeros. No row has changed."
            " Optimizer steps since then changed other parameters, except for fused optimizers that"
            " also step these rows."
        )
        if kind == TOO_MANY:
            raise too_many(self._name, distinct, size, nothing)
        assert kind == BAD_IDS
        if position < 0:
            raise rank_error(self._name, -position, nothing)
        raise IndexError(
            f"{self._name}: id {bad_id} at position {position} is out of range for a table of"
            f" {rows} rows ({bad} of {count} ids are out of range). {nothing}"
        )
