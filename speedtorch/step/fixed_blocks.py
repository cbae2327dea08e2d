"""FixedBlocks: the rows of a step in blocks of one size, whose numbers stay on the device.

Which rows the blocks hold is written on the device, by the op that moves them. So a step can follow
on whatever the device has done before, an eager step or a CUDA graph, and what an exception has
interrupted is done again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from speedtorch.memory import empty
from speedtorch.ops.functions import _ops
from speedtorch.plan.fixed_size_batch import BAD_IDS, TOO_MANY, Changes, FixedSizeBatch, too_many
from speedtorch.step.capturing_graphs import CapturingGraphs
from speedtorch.step.row_store import Counted, Fields, RowStore

__all__ = ["OTHER_MODULE", "OVER_SHARE", "REFUSED", "FixedBlocks", "of_ranks"]

OVER_SHARE, OTHER_MODULE, REFUSED = 3, 4, 5
"""Why ranks that hold rows together cannot, beside what may be wrong with a batch."""


def of_ranks(name: str, fault: int, so: str) -> IndexError | RuntimeError:
    """The error about a step that is wrong on some rank, and what came of it on all."""
    if fault == BAD_IDS:
        return IndexError(f"{name}: an id on some rank is out of range; {so}")
    why = "another rank cannot hold its rows of a step, and says why"
    if fault == TOO_MANY:
        why = (
            "ranks name more distinct rows of one of them in a step than its capacity; use smaller"
            " batches or a larger capacity"
        )
    if fault == OVER_SHARE:
        why = (
            "a lookup on some rank names more distinct rows of one rank than a fair share of the"
            " capacity; use smaller batches or a larger capacity"
        )
    if fault == OTHER_MODULE:
        why = (
            "other ranks look up rows of another module now; all ranks make the same lookups in"
            " the same order, with an empty batch where they have none"
        )
    return RuntimeError(f"{name}: {why}: {so}")


class FixedBlocks:
    """Blocks of `capacity` rows for those that are held, that arrive and that leave.

    `rows` are the held ones of every field, always in the same memory: those that a batch names in
    their order, then zeros, and the padding's as the last.

    Args:
        name: what errors call it.
        store: all rows.
        capacity: rows of a block.
        padding: id of the row that is never trained, or None. That behind the last is of a row
            that is none, whose weights are zeros.
    """

    def __init__(self, name: str, store: RowStore, capacity: int, padding: int | None) -> None:
        self.capacity = capacity
        self.rows: list[Tensor] = []
        self.hold_some = False
        """Whether rows may be held, for all that the host knows."""
        self._name = name
        self.store = store
        self._padding = padding
        self.begun = 0
        """How many batches have begun."""
        self.left_some = False
        """Whether rows may lie in `_left` that have yet to go home."""
        self._foresees = False
        """Whether a CUDA graph sends for the rows of the step after it."""
        self._device: torch.device | None = None
        """Where there are blocks, if there are."""
        self._fields: Fields = {}
        self.graphs = CapturingGraphs()

    def use(self, store: RowStore) -> None:
        """Exchanges rows with another store of the same table from now on."""
        self.store = store

    def are_for(self, device: torch.device, fields: Fields) -> bool:
        """Whether there are blocks for rows of these fields on a device."""
        return self._device == device and self._fields is fields

    def make(self, device: torch.device, fields: Fields) -> None:
        """Makes blocks for rows of these fields on a device, which hold none."""
        size = self.capacity
        with torch.inference_mode(False):

            def block(rows: int) -> list[Tensor]:
                return [
                    torch.zeros((rows, *shape), dtype=dtype, device=device)
                    for shape, dtype in fields.values()
                ]

            def numbers(count: int) -> Tensor:
                return torch.zeros(count, dtype=torch.int64, device=device)

            rows = block(size + (self._padding is not None))
            self._trained = rows if self._padding is None else [each[:size] for each in rows]
            """The rows without the padding's."""
            self._coming, self._left = block(size), block(size)
            self.ids, self._status = numbers(size), numbers(8)
            self._number = self._status[3:4]
            """How many rows are held."""
            self._left_ids, self._left_count = numbers(size), numbers(1)
            self._halt, self._none = numbers(2), numbers(1)
            self.is_halted = self._halt[:1]
            """Whether a fault lets no row move: `[1]`, not 0 then."""
            self._came = numbers(2 * size + 1)
            """Ids of the rows that a graph has sent for, their places, and how many; -1: none."""
            self._came[-1:] = -1
            self._every = torch.arange(size, device=device)
            # Memory of ours, as an op asks at each use whether that of others may go.
            self._fault = empty(
                8, dtype=torch.int64, memory="registered" if device.type == "cuda" else "plain"
            )
            if self._padding is not None:
                self._padding_id = torch.tensor([self._padding], device=device)
        # Read without a call of torch, at every lookup.
        self._seen_fault = self._fault.numpy()
        self.left_some = False
        self._device, self._fields, self.rows = device, fields, rows

    def tensors(self) -> Iterator[Tensor]:
        """All memory of the blocks on their device."""
        if self._device is not None:
            yield from (*self.rows, *self._coming, *self._left)
            yield from (self.ids, self._status, self._left_ids, self._left_count)
            yield from (self._halt, self._none, self._came, self._every)

    @property
    def put_aside(self) -> Counted:
        """The rows that have left for the table and are still here."""
        return Counted(self._left, self._left_ids, self._every, self._left_count)

    def forget(self, capacity: int) -> None:
        """Gives the memory back; the next blocks have `capacity` rows."""
        self.capacity = capacity
        self._device, self.rows = None, []
        self._coming = self._left = []

    def ids_held(self, begun: int) -> Tensor:
        """Ids of the rows of the last batch, when `begun` had this number; waits for the device."""
        if begun != self.begun:
            raise NotImplementedError(
                f"{self._name}: which rows a gradient of an earlier step has is no longer known, as"
                " a capacity keeps the ids of one step on the device; use it before the next lookup"
            )
        return self.ids[: int(self._number)].clone()

    def _held(self) -> Counted:
        return Counted(self.rows, self.ids, self._every, self._number)

    def _nowhere(self, rows: Sequence[Tensor]) -> Counted:
        return Counted(rows, self.ids, self._every, self._none, are_none=True)

    def begin(self, batch: FixedSizeBatch, *, come: bool | None) -> None:
        """Lets the rows of a batch take the place of those that are held.

        With `come` those that arrive were sent for before; those that leave are put aside then, and
        go home with the next that are sent for. None stands for a CUDA graph that sends for the
        next rows: those that the last replay has foreseen have come, or all are read now.
        """
        self.begun += 1
        if self.left_some:
            self.send(None)
        changes = batch.compared(self.ids, self._status, self._halt, self._fault)
        lists = (changes.arriving, changes.arriving_places)
        if not come:
            leaving, number = self._nowhere(self.rows), changes.counts[2:3]
            if come is None:
                number = self._not_foreseen(changes)
            else:
                left = (changes.leaving, changes.leaving_places, changes.counts[3:4])
                leaving = Counted(self.rows, *left)
                self._forget_foreseen()
            self.store.exchange_counted(
                self._fields, leaving, Counted(self._coming, *lists, number)
            )
        put_aside = come is not False
        self.left_some, self.hold_some = put_aside, True
        _ops.hold_rows(
            self._trained,
            self._coming,
            self._left if put_aside else [],
            changes.stay_places,
            changes.stay_from,
            changes.leaving,
            changes.leaving_places,
            changes.counts,
            batch.named,
            self.ids,
            self._status,
            self._left_ids,
            self._left_count,
        )
        batch.held(self.ids, self._number)
        self.fetch_padding()

    def _not_foreseen(self, changes: Changes) -> Tensor:
        """How many rows are still to arrive, `[1]`: none if those that have come are they."""
        number, size = changes.counts[2:3], self.capacity
        differ = torch.cat([changes.arriving, changes.arriving_places]) != self._came[:-1]
        differ = (differ.view(2, size) & (self._every < number)).any()
        return number * (differ | (self._came[-1:] != number))

    def _forget_foreseen(self) -> None:
        """Says that rows which a graph has sent for are not as the table has them, or others."""
        # Another graph's replay would not know that this one's has been between.
        if self._foresees or (self.ids.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._came[-1:].fill_(-1)

    def fetch_padding(self) -> None:
        """Reads the padding's row, all fields of it."""
        if self._padding is not None and self._padding < self.store.rows:
            for name, rows in zip(self._fields, self.rows, strict=True):
                self.store.read(self._padding_id, rows[-1:], name)

    def send(self, following: FixedSizeBatch | None, *, foreseen: bool = False) -> None:
        """Rows that were put aside go home, those of the next batch arrive, but do not yet stay.

        With `foreseen` within a CUDA graph, whose next replay looks whether they are of its batch.
        """
        arriving = self._nowhere(self._coming)
        if following is not None:
            # Errors of this batch are reported when the batch begins.
            halt, untold = self._halt.clone(), torch.empty_like(self._status)
            changes = following.compared(self.ids, self._status, halt, untold)
            lists = (changes.arriving, changes.arriving_places, changes.counts[2:3])
            arriving = Counted(self._coming, *lists)
            if foreseen:
                torch.cat(lists, out=self._came)
                self._foresees = True
        if not foreseen:
            self._forget_foreseen()
        self.store.exchange_counted(self._fields, self.put_aside, arriving)
        self._left_count.zero_()
        self.left_some = False

    def go_home(self, *, stay: bool) -> None:
        """Writes the held rows to the table; without `stay` none is held after that."""
        if self._device is None:
            return
        if self.left_some:
            self.send(None)
        self._forget_foreseen()
        self.store.exchange_counted(self._fields, self._held(), self._nowhere(self._coming))
        if not stay:
            self.hold_none()

    def stop(self, fault: Tensor) -> None:
        """Where `fault`, `[1]`, is not 0: held rows go home as they are, and no row moves then."""
        number = torch.where(fault > 0, self._number, self._none)
        held = Counted(self.rows, self.ids, self._every, number)
        self.store.exchange_counted(self._fields, held, self._nowhere(self._coming))
        self._status.masked_fill_(fault > 0, 0)
        torch.maximum(self.is_halted, fault, out=self.is_halted)

    def hold_none(self) -> None:
        """Says that no row is held."""
        self._forget_foreseen()
        self._status.zero_()
        self.hold_some = False

    def read_again(self) -> None:
        """Held rows are those of the table again."""
        self._forget_foreseen()
        self.store.exchange_counted(self._fields, self._nowhere(self._left), self._held())
        self.fetch_padding()

    def with_fields(self, fields: Fields) -> FixedBlocks:
        """Blocks for rows of other fields, which hold the same ones once they are read again."""
        assert self._device is not None
        made = FixedBlocks(self._name, self.store, self.capacity, self._padding)
        made.make(self._device, fields)
        made.ids, made._status, made._halt = self.ids, self._status, self._halt
        made._number, made.is_halted = self._number, self.is_halted
        made._fault, made._seen_fault = self._fault, self._seen_fault
        return made

    def have(self, rows: Sequence[Tensor]) -> bool:
        """Whether these are the blocks' own."""
        same = (own is each for own, each in zip(self.rows, rows, strict=False))
        return len(rows) == len(self.rows) and all(same)

    def take(self, rows: Sequence[Tensor]) -> bool:
        """Takes held rows from where they are now; whether that was elsewhere."""
        others = [
            (o, r) for o, r in zip(self.rows, rows, strict=True) if o.data_ptr() != r.data_ptr()
        ]
        for own, other in others:
            own.copy_(other)
        return bool(others)

    def clear_others(self) -> None:
        """Makes what lies beyond the held rows zeros again, whatever an optimizer made of it."""
        if self.rows:  # a step before the first lookup finds none made
            _ops.clear_rows(self._trained, self._number)

    def go_on(self) -> None:
        """Lets rows move again."""
        self._halt.zero_()

    def check(self) -> None:
        """Raises what was found wrong on the device since the last time, and lets rows move again.

        Raises IndexError for ids out of range and RuntimeError for too many rows.
        """
        if self._device is None or not self._seen_fault[0]:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        kind, distinct, size, bad, position, bad_id, count, rows = self._fault.tolist()
        more = int(self._halt[1])
        self._halt.zero_()
        self._fault.zero_()
        since = f" (and {more} later batches)" if more else ""
        nothing = (
            f"its rows{since} were looked up as zeros and none of the table's was moved or changed;"
            " parameters of other layers were stepped, unless their optimizer is a fused one"
        )
        if kind == TOO_MANY:
            raise too_many(self._name, distinct, size, nothing)
        assert kind == BAD_IDS
        if position < 0:
            raise of_ranks(self._name, -position, nothing)
        raise IndexError(
            f"{self._name}: id {bad_id} at position {position} is out of range for a table of"
            f" {rows} rows ({bad} of {count} ids are out of range); {nothing}"
        )
