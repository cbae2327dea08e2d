"""HotRows: a cache of a table's most used rows, in memory of the device that trains them.

A row with a slot is current in its slot, and its copy in the table may be older. The rows in slots
change only between two exchanges. The slot map is on the device, so an exchange that was planned,
queued or captured earlier finds each row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from speedtorch.memory.byte_count import text_of
from speedtorch.ops.functions import exchange_rows
from speedtorch.torch_internals import current_stream

__all__ = ["BYTES_OF_SLOT", "CacheReport", "HotRows", "Refresh", "planned_refresh"]

BYTES_OF_SLOT = 8
"""Bytes of a slot besides its row: the int64 id."""
CHUNK_BYTES = 64 << 20
"""The most bytes of rows that enter slots in one exchange, through temporary memory."""
FIRST, EVERY = (4, 16, 64), 64
"""The exchanges with a write-back at which the cache is refreshed, and the later interval."""
_MOST = 255  # larger counts are treated as this count
_SURE = 2.0  # standard deviations


class Refresh(NamedTuple):
    """Thresholds of use that select the rows to admit to the cache and to evict from it."""

    admitted: int
    """The number of rows to admit, the most used rows without a slot."""
    admit_above: int
    """All rows with more uses than this are admitted, and some rows with exactly as many."""
    evicted: int
    """The number of rows to evict, the least used rows with a slot."""
    evict_below: int
    """All rows with fewer uses than this are evicted, and some rows with exactly as many."""


def surely_above(uses: int) -> int:
    """The smallest number of uses that is significantly more than `uses`.

    Uses are counts of events: the standard deviation of their difference is the root of their sum.
    """
    more = uses + 1
    while more - uses <= _SURE * sqrt(more + uses):
        more += 1
    return more


def planned_refresh(outside: Sequence[int], inside: Sequence[int], free: int) -> Refresh:
    """Plans a refresh; a row replaces another only if it is significantly more used.

    Args:
        outside: The number of rows without a slot that were used 0, 1, 2, ... times.
        inside: The same numbers for rows with a slot.
        free: The number of empty slots, which any used row may enter.
    """
    above = [*accumulate(reversed(outside))][::-1]  # entry u: number of rows with u uses or more
    admitted = evicted = 0
    room = free
    for least in range(-1, len(inside)):
        room += inside[least] if least >= 0 else 0
        needed = surely_above(least) if least >= 0 else 1
        if needed >= len(outside):
            break
        if (count := min(room, above[needed])) > admitted:
            admitted, evicted = count, max(0, count - free)
    admit_above = next((uses for uses in range(len(above)) if above[uses] <= admitted), len(above))
    below = [0, *accumulate(inside)]
    evict_below = 0
    if evicted:
        evict_below = max(uses for uses in range(len(below)) if below[uses] <= evicted)
    return Refresh(admitted, admit_above - 1, evicted, evict_below)


def _uses_of(counted: Sequence[int]) -> int:
    """The sum of uses, from the numbers of rows that were used 0, 1, 2, ... times."""
    return sum(uses * rows for uses, rows in enumerate(counted))


class CacheReport(NamedTuple):
    """Contents and hit rates of a cache of hot rows."""

    slots: int
    """The maximum number of rows in the cache."""
    rows: int
    """The number of rows in slots now."""
    nbytes: int
    """Bytes of all slots on the device: rows and their ids."""
    map_nbytes: int
    """Bytes of the slot map on the device, which has an entry for every row of the table."""
    hit_rate: float | None
    """The share of recent row loads whose row had a slot at the last refresh. None before the first
    refresh, and always with `cache_rows`, whose rows are never replaced."""
    hit_rate_of_half: float | None
    """The expected hit rate with half as many slots, from the counts of uses."""
    hit_rate_of_double: float | None
    """The expected hit rate with twice as many slots."""
    refreshes: int
    """The number of refreshes."""
    failed: int
    """The number of updates that failed because the device was out of memory."""
    rows_moved: int
    """The number of rows that entered or left a slot, over all refreshes."""
    seconds: float
    """Time of all refreshes on the device, in seconds."""

    def __str__(self) -> str:
        text = f"{self.rows:,} of {self.slots:,} slots have rows, {text_of(self.nbytes)}"
        if self.hit_rate is None:
            return text
        assert self.hit_rate_of_half is not None
        assert self.hit_rate_of_double is not None
        return (
            f"{text}. {self.hit_rate:.1%} of recently loaded rows had a slot (half as many slots:"
            f" {self.hit_rate_of_half:.1%}, twice as many: {self.hit_rate_of_double:.1%})."
            f" {self.refreshes} refreshes moved {self.rows_moved:,} rows in"
            f" {self.seconds * 1e3:,.1f} ms."
        )


class HotRows:
    """The slots of one table, the slot of each row, and how often each row was loaded.

    Args:
        rows: The number of rows of the table.
        fields: All rows of each field of the table; a slot has one row of each field.
        slots: The number of slots.
        device: The device of the slots.
        members: Unique ids `[n]` of the only rows that have slots, from the first exchange on that
            writes rows back. By default the most used rows have slots, once uses are counted.
    """

    def __init__(
        self,
        rows: int,
        fields: dict[str, Tensor],
        slots: int,
        device: torch.device,
        members: Tensor | None,
    ) -> None:
        with torch.inference_mode(False):
            self.fields = [
                torch.zeros((slots, *field.shape[1:]), dtype=field.dtype, device=device)
                for field in fields.values()
            ]
            self.map = torch.zeros((rows, 2), dtype=torch.int32, device=device)
            """`[rows, 2]`: the slot of each row, or -1, and how often the row was loaded."""
            self._ids = torch.full((slots,), -1, dtype=torch.int64, device=device)
            """The id of each slot's row, valid only if the map names this slot for it."""
            self._row_slots, self._uses = self.map[:, 0], self.map[:, 1]
            self._row_slots.fill_(-1)
            if members is not None:
                self._ids[: members.shape[0]] = members.to(device)
        self.names = tuple(fields)
        self.device, self.slots = device, slots
        self._is_fixed = members is not None
        self.needs_reload = members is not None
        """Whether the table has the current rows of `_ids`, for before_exchange() to load."""
        self._exchanges = self._refreshes = self._failed = self._moved = 0
        self._histogram: list[int] | None = None
        self._hits: float | None = None
        self._times: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    @property
    def _nbytes(self) -> int:
        return sum(field.nbytes for field in self.fields)

    # ---- between two exchanges

    def before_exchange(self, fields: Sequence[Tensor]) -> None:
        """Loads rows into slots after a write-back, and refreshes the slots if due.

        `fields` are all rows of the table. Called before an exchange that writes rows back, or
        before the replay of a CUDA graph that contains exchanges.
        """
        self._exchanges += 1
        is_due = self._exchanges in FIRST or self._exchanges % EVERY == 0
        try:
            if self.needs_reload:
                self._reload(fields)
            if is_due and not self._is_fixed:
                self.refresh(fields)
        except torch.OutOfMemoryError:  # not raised: other ranks may wait for this exchange
            self._failed += 1

    def refresh(self, fields: Sequence[Tensor]) -> None:
        """Replaces the rows of slots by rows that are significantly more used.

        After an exception at any point, the map names the current copy of each row.
        """
        begin = self._now()
        is_cached, used = self._row_slots >= 0, self._uses.clamp(max=_MOST)
        size = _MOST + 1
        counted = torch.bincount(used + size * is_cached, minlength=2 * size).tolist()
        outside, inside = counted[:size], counted[size:]
        of_slots = self._slots_with_rows()
        free = self.slots - sum(inside)
        plan = planned_refresh(outside, inside, free)
        if plan.admitted:
            ids = self._select(~is_cached, used, plan.admitted, plan.admit_above, most=True)
            uses = torch.where(of_slots, used[self._ids.clamp(min=0)], _MOST + 1)
            evicted = self._select(of_slots, uses, plan.evicted, plan.evict_below, most=False)
            (unused,) = torch.where(~of_slots)
            self._move(fields, ids, evicted, unused[: max(0, plan.admitted - plan.evicted)])
        self._histogram = [a + b for a, b in zip(outside, inside, strict=True)]
        loaded = _uses_of(self._histogram)
        self._hits = _uses_of(inside) / loaded if loaded else None
        self._refreshes += 1
        self._moved += plan.admitted + plan.evicted
        if self._exchanges >= EVERY:  # old uses count half
            self._uses.bitwise_right_shift_(1)
        self._note_time(begin)

    @staticmethod
    def _select(among: Tensor, uses: Tensor, number: int, edge: int, *, most: bool) -> Tensor:
        """Ascending indices of `number` entries of `among`: beyond the edge first, then at it."""
        (beyond,) = torch.where(among & ((uses > edge) if most else (uses < edge)))
        (at,) = torch.where(among & (uses == edge))
        return torch.cat([beyond[:number], at[: max(0, number - beyond.shape[0])]]).sort().values

    def _move(self, fields: Sequence[Tensor], ids: Tensor, evicted: Tensor, free: Tensor) -> None:
        """Writes back rows of `evicted` slots; loads rows of ids into these and `free` slots."""
        rows = max(1, CHUNK_BYTES // (self._nbytes // self.slots))
        evicted_ids, order = self._ids[evicted].sort()
        evicted = evicted[order]
        slots = torch.cat([evicted, free])
        for first in range(0, ids.shape[0], rows):
            chunk = slice(first, first + rows)
            new_ids, new_slots = ids[chunk], slots[chunk]
            old_ids, old_slots = evicted_ids[chunk], evicted[chunk]
            count = new_ids.shape[0]
            loaded = [field.new_empty((count, *field.shape[1:])) for field in self.fields]
            places = torch.arange(count, device=self.device)
            exchange_rows(fields, self.fields, old_ids, old_slots, loaded, new_ids, places)
            # The table has the evicted rows now. The map drops their slots before new rows are
            # stored there, so that after an exception the map names no overwritten slot.
            self._row_slots[old_ids] = -1
            self._ids[old_slots] = -1
            for field, rows_of_field in zip(self.fields, loaded, strict=True):
                field[new_slots] = rows_of_field
            self._ids[new_slots] = new_ids
            self._row_slots[new_ids] = new_slots.int()

    def _slots_with_rows(self) -> Tensor:
        """Mask `[slots]` of slots with a row: the map names the slot for its id."""
        slots = torch.arange(self.slots, device=self.device)
        return (self._ids >= 0) & (self._row_slots[self._ids.clamp(min=0)] == slots)

    # ---- empty slots

    def write_back(self, fields: Sequence[Tensor]) -> None:
        """Writes cached rows to the table; before_exchange() loads them again."""
        has_row = self._slots_with_rows()
        (slots,) = torch.where(has_row)
        ids, order = self._ids[slots].sort()
        nothing, none = [field[:0] for field in self.fields], ids[:0]
        exchange_rows(fields, self.fields, ids, slots[order], nothing, none, none)
        if not self._is_fixed:  # drop ids of rows without a slot
            self._ids.masked_fill_(~has_row, -1)
        self._row_slots.fill_(-1)
        self.needs_reload = True

    def _reload(self, fields: Sequence[Tensor]) -> None:
        (slots,) = torch.where(self._ids >= 0)
        ids, order = self._ids[slots].sort()
        slots = slots[order]
        nothing, none = [field[:0] for field in self.fields], ids[:0]
        exchange_rows(fields, nothing, none, none, self.fields, ids, slots)
        self.needs_reload = False  # before the map names the slots, which exchanges then change
        self._row_slots[ids] = slots.int()

    # ---- single rows

    def read(self, ids: Tensor, out: Tensor, name: str) -> None:
        """Overwrites rows of `out` `[*ids.shape, ...]`, read from the table, with rows of slots."""
        field = self.fields[self.names.index(name)]
        found = self._row_slots[ids.to(self.device).clamp(0, self.map.shape[0] - 1)]
        found = found.to(torch.int64)
        rows = field[found.clamp(min=0)]
        mask = (found >= 0).view(*found.shape, *[1] * (field.dim() - 1))
        out.copy_(torch.where(mask, rows, out.to(self.device, rows.dtype)))

    # ---- report

    def report(self) -> CacheReport:
        """Makes the report; waits for the device."""
        for _, end in self._times:
            end.synchronize()
        self._add_times(lambda _: True)
        half, double = (self._expected(slots) for slots in (self.slots // 2, self.slots * 2))
        return CacheReport(
            self.slots,
            0 if self.needs_reload else int(self._slots_with_rows().sum()),
            self._nbytes + self.slots * BYTES_OF_SLOT,
            self.map.nbytes,
            self._hits,
            half,
            double,
            self._refreshes,
            self._failed,
            self._moved,
            self._seconds,
        )

    def _expected(self, slots: int) -> float | None:
        """The share of loads that the `slots` most used rows had at the last refresh."""
        counted = self._histogram
        if counted is None or self._hits is None:
            return None
        hits, free = 0, slots
        for uses in reversed(range(len(counted))):
            count = min(free, counted[uses])
            hits, free = hits + count * uses, free - count
        return hits / _uses_of(counted)

    def _now(self) -> torch.cuda.Event | float:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(current_stream(self.device))
        return event

    def _note_time(self, begin: torch.cuda.Event | float) -> None:
        end = self._now()
        if isinstance(begin, float):
            assert isinstance(end, float)
            self._seconds += end - begin
        else:
            assert not isinstance(end, float)
            self._times.append((begin, end))
            self._add_times(lambda event: bool(event.query()))  # type: ignore[no-untyped-call]

    def _add_times(self, is_done: Callable[[torch.cuda.Event], bool]) -> None:
        while self._times and is_done(self._times[0][1]):
            begin, end = self._times.pop(0)
            self._seconds += begin.elapsed_time(end) / 1e3
