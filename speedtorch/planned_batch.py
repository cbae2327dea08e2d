"""The distinct rows that a batch names, where each of them will be held, and how many they are.

Everything is computed on the device of the rows without waiting; only the counts come to the host,
and only when somebody asks for them. With the rows of an earlier batch given, a batch also knows
which rows it has in common with that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speedtorch.batch_ids import SeenIds
from speedtorch.ops import plan_rows

__all__ = ["PlannedBatch", "SortedRows"]

_PAST = 2**63 - 1  # after the last id of a list that is sorted
_STATUS_BAD, _STATUS_BAD_POSITION, _STATUS_BAD_ID, _STATUS_DISTINCT = range(4)
_STATUS_FIELDS = 8


@dataclass(frozen=True)
class SortedRows:
    """Rows that are held, for a batch to be compared with.

    Attributes:
        ids: ascending, with any number of entries past them all at the end.
        counted: which entries are held.
        places: where the row of each entry is held.
    """

    ids: Tensor
    counted: Tensor
    places: Tensor

    @classmethod
    def of(cls, ids: Tensor) -> SortedRows:
        """Rows that are held in the order of their ids."""
        return cls(ids, torch.ones_like(ids, dtype=torch.bool), _places(ids))


class PlannedBatch:
    """The distinct rows of a batch, in address order: the order in which a step holds them.

    The padding's row is no row of the batch; it stands after the last one.

    Args:
        parts: ids of any shape on either device; all of them together are the batch.
        rows: rows of the table.
        device: where rows are held.
        padding: id of a row that is never trained, or None.
        after: the batch whose rows are held before this one's, or rows that are held.

    Raises:
        IndexError: an id on the CPU is out of range; ids on a GPU are reported by `count`.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        rows: int,
        device: torch.device,
        padding: int | None = None,
        *,
        after: PlannedBatch | SortedRows | None = None,
    ) -> None:
        self.after = after
        self._rows = rows
        self._padding = padding
        self._seen = [SeenIds(part, device) for part in parts]
        flat = [seen.flat(device) for seen in self._seen]
        index = flat[0] if len(flat) == 1 else torch.cat(flat)
        self._size = index.numel()
        # A plan has as many entries as the batch has ids, as nobody has counted them yet: -1
        # follows the distinct ids. `_compact` puts those first that a mask selects.
        self._unique, self._inverse, _, _, status = plan_rows(index, rows)
        self._place: Tensor | None = None
        """Of each distinct id, or None where that is its place in the order."""
        self._ids = self._unique
        sums = [status]
        if padding is not None:
            counted = self._counted()
            ranks = _ranks(counted)
            self._ids = _compact(self._unique, counted, ranks)
            held = _count(counted)
            self._place = torch.where(counted | (self._unique < 0), ranks, held)
            sums.append(held)
        else:
            sums.append(status[_STATUS_DISTINCT : _STATUS_DISTINCT + 1])
        self._known_counts: list[int] | None = None
        if after is not None:
            sums += self._compare(after.sorted() if isinstance(after, PlannedBatch) else after)
        self._on_host, self._event = _to_host(torch.cat(sums))

    def _compare(self, held: SortedRows) -> list[Tensor]:
        """Finds out which rows arrive, stay and leave when this batch follows on held rows."""
        counted, places = self._counted(), self._places()
        common, at = _find(self._unique, counted, held.ids)
        fresh = counted & ~common
        ranks = _ranks(fresh)
        self._arriving_ids = _compact(self._unique, fresh, ranks)
        self._arriving_places = _compact(places, fresh, ranks)
        common_ranks = _ranks(common)
        self._stay_places = _compact(places, common, common_ranks)
        stay_from = held.places[at] if held.ids.numel() else at
        self._stay_from = _compact(stay_from, common, common_ranks)
        size = held.ids.numel()
        stays = torch.zeros(size + 1, dtype=torch.bool, device=at.device)
        stays.scatter_(0, torch.where(common, at, size), True)
        gone = held.counted & ~stays[:-1]
        gone_ranks = _ranks(gone)
        self._leaving_ids = _compact(held.ids, gone, gone_ranks)
        self._leaving_places = _compact(held.places, gone, gone_ranks)
        return [_count(fresh), _count(gone)]

    def _counted(self) -> Tensor:
        named = self._unique >= 0
        return named if self._padding is None else named & (self._unique != self._padding)

    def _places(self) -> Tensor:
        return _places(self._unique) if self._place is None else self._place

    def sorted(self) -> SortedRows:
        """The rows, for the next batch to be compared with."""
        ids = torch.where(self._unique >= 0, self._unique, _PAST)
        return SortedRows(ids, self._counted(), self._places())

    # --------------------------------------------------------------------------------------------

    def count(self) -> None:
        """Waits for the counts; the numbers below are known after it.

        Raises:
            IndexError: an id on a GPU is out of range.
        """
        self._counts()

    def _counts(self) -> list[int]:
        if self._known_counts is None:
            if self._event is not None:
                self._event.synchronize()
            counts = self._on_host.tolist()
            if counts[_STATUS_BAD]:
                raise IndexError(
                    f"id {counts[_STATUS_BAD_ID]} at position {counts[_STATUS_BAD_POSITION]} is out"
                    f" of range for a table of {self._rows} rows ({counts[_STATUS_BAD]} of"
                    f" {self._size} ids are out of range); no row was moved"
                )
            self._known_counts = counts[_STATUS_FIELDS:]
        return self._known_counts

    @property
    def held(self) -> int:
        """Distinct rows."""
        return self._counts()[0]

    @property
    def ids(self) -> Tensor:
        """The rows, ascending: `[held]`."""
        return self._ids[: self.held]

    @property
    def arriving(self) -> tuple[Tensor, Tensor]:
        """Ids and places of the rows that were not held before."""
        fresh = self._counts()[1]
        return self._arriving_ids[:fresh], self._arriving_places[:fresh]

    @property
    def staying(self) -> tuple[Tensor, Tensor]:
        """Places now and before of the rows that were held before as well."""
        common = self.held - self._counts()[1]
        return self._stay_places[:common], self._stay_from[:common]

    @property
    def leaving(self) -> tuple[Tensor, Tensor]:
        """Ids and places before of the rows that this batch does not name."""
        gone = self._counts()[2]
        return self._leaving_ids[:gone], self._leaving_places[:gone]

    def place_among(self, ids: Tensor) -> None:
        """Takes the places of rows that are held with others: `ids` ascending."""
        places = torch.searchsorted(ids, self._unique)
        if self._padding is not None:
            places = torch.where(self._unique == self._padding, len(ids), places)
        self._place = places

    def local(self, part: int) -> Tensor:
        """The places of the rows that a part names, in the part's shape."""
        shape = self._seen[part].shape
        begin = sum(seen.shape.numel() for seen in self._seen[:part])
        entries = self._inverse[begin : begin + shape.numel()]
        local = entries if self._place is None else self._place[entries]
        return local.view(shape)

    def part_of(self, ids: Tensor) -> int | None:
        """Which of the parts these ids are, if they are known to be one."""
        for part, seen in enumerate(self._seen):
            if seen.are(ids):
                return part
        return None


def _places(ids: Tensor) -> Tensor:
    return torch.arange(ids.numel(), device=ids.device)


def _to_host(counts: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if counts.is_cpu:
        return counts, None
    on_host = torch.empty_like(counts, device="cpu", pin_memory=True)
    on_host.copy_(counts, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return on_host, event


def _count(mask: Tensor) -> Tensor:
    return mask.sum().view(1)


def _ranks(mask: Tensor) -> Tensor:
    """How many entries before each are selected."""
    return mask.cumsum(0) - mask.long()


def _compact(values: Tensor, mask: Tensor, ranks: Tensor) -> Tensor:
    """The selected values first; what follows is undefined."""
    size = values.numel()
    made = values.new_empty(size + 1)
    made.scatter_(0, torch.where(mask, ranks, size), values)
    return made


def _find(ids: Tensor, counted: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """Which ids are among others that are sorted, and at which entry."""
    if among.numel() == 0:
        return torch.zeros_like(counted), torch.zeros_like(ids)
    at = torch.searchsorted(among, ids).clamp_(max=among.numel() - 1)
    return counted & (among[at] == ids), at
