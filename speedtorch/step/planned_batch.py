"""The distinct rows that a batch names, where each of them will be held, and how many they are.

Everything is computed on the device of the rows without waiting; only the counts come to the host,
and only when somebody asks for them. With the rows of an earlier batch given, a batch also knows
which rows it has in common with that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from speedtorch.ops.batch_ids import SeenIds
from speedtorch.ops.functions import plan_rows
from speedtorch.step.host_numbers import HostNumbers

__all__ = ["PlannedBatch"]

_STATUS_BAD, _STATUS_BAD_POSITION, _STATUS_BAD_ID, _STATUS_DISTINCT = range(4)
_STATUS_FIELDS = 8


class PlannedBatch:
    """The distinct rows of a batch, in address order: the order in which a step holds them.

    The padding's row is no row of the batch; it stands after the last one.

    Args:
        parts: ids of any shape on either device; all of them together are the batch.
        rows: rows of the table.
        device: where rows are held.
        padding: id of a row that is never trained, or None.
        after: the batch whose rows are held before this one's, or ids of held rows, ascending.
        name: what errors call who looks them up.

    Raises:
        IndexError: rows are held on the CPU and an id is out of range; a GPU's are reported by
            `count`.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        rows: int,
        device: torch.device,
        padding: int | None = None,
        *,
        after: PlannedBatch | Tensor | None = None,
        name: str = "ids",
    ) -> None:
        self.device = device
        self._name = name
        self._rows = rows
        self._padding = padding
        parts = parts or [torch.empty(0, dtype=torch.int64)]
        self._seen = [SeenIds(part, device) for part in parts]
        flat = [seen.flat(device) for seen in self._seen]
        index = flat[0] if len(flat) == 1 else torch.cat(flat)
        self._size = index.numel()
        self._begins = [0, *accumulate(part.shape[0] for part in flat)]
        # A plan has as many entries as the batch has ids, as nobody has counted them yet: -1
        # follows the distinct ids.
        try:
            self.plan = plan_rows(index, rows)
        except IndexError as error:
            raise IndexError(str(error).replace("plan_rows", name, 1)) from None
        self.following: PlannedBatch | None = None
        """The batch that was planned after this one."""
        self._place: Tensor | None = None
        """Of each distinct id, or None where that is its place in the order."""
        self._ids: Tensor | None = None
        self._held_ids: Tensor | None = None
        self._known_counts: list[int] | None = None
        unique, _, _, _, status = self.plan
        counts = [status]
        if padding is not None:
            self._ids, *_, sums = self._compared(unique[:0], unique[:0])
            held = sums[:1]
            named = status[_STATUS_DISTINCT : _STATUS_DISTINCT + 1] - held
            places = torch.arange(self._size, device=device) - (unique > padding) * named
            self._place = torch.where(unique == padding, held, places)
            counts.append(held)
        if after is not None:
            held, held_status = (
                (after, after[:0]) if isinstance(after, Tensor) else (after.plan[0], after.plan[4])
            )
            *lists, sums = self._compared(held, held_status)
            self._arriving, self._staying, self._leaving = lists[0:2], lists[2:4], lists[4:6]
            counts.append(sums)
        self._counted = HostNumbers(counts[0] if len(counts) == 1 else torch.cat(counts))

    def _compared(self, held: Tensor, held_status: Tensor) -> list[Tensor]:
        """Which rows arrive, stay and leave when this batch follows on held rows.

        Returns:
            Ids and places of those that arrive, places now and before of those that stay, ids and
            places before of those that leave; with the counts of all, arriving and leaving rows.
        """
        padding = -1 if self._padding is None else self._padding
        lists: list[Tensor] = torch.ops.speedtorch.compare_rows(
            self.plan[0], self.plan[4], held, held_status, padding
        )
        return lists

    # --------------------------------------------------------------------------------------------

    def count(self) -> None:
        """Waits for the counts; the numbers below are known after it.

        Raises:
            IndexError: an id on a GPU is out of range.
        """
        self._counts()

    def _counts(self) -> list[int]:
        if self._known_counts is None:
            self._known_counts = self._counted.read()
        counts = self._known_counts
        if counts[_STATUS_BAD]:
            bad, at, id = (counts[n] for n in (_STATUS_BAD, _STATUS_BAD_POSITION, _STATUS_BAD_ID))
            raise IndexError(
                f"{self._name}: id {id} at position {at} is out of range for a table of"
                f" {self._rows} rows ({bad} of {self._size} ids are out of range); no row was moved"
            )
        return counts

    @property
    def distinct(self) -> int:
        """Distinct ids, with that of the padding."""
        return self._counts()[_STATUS_DISTINCT]

    @property
    def held(self) -> int:
        """Distinct rows."""
        return self._counts()[_STATUS_DISTINCT if self._padding is None else _STATUS_FIELDS]

    @property
    def ids(self) -> Tensor:
        """The rows, ascending: `[held]`; always the same tensor."""
        if self._held_ids is None:
            self._held_ids = (self.plan[0] if self._ids is None else self._ids)[: self.held]
        return self._held_ids

    @property
    def arriving(self) -> tuple[Tensor, Tensor]:
        """Ids and places of the rows that were not held before."""
        ids, places = self._arriving
        fresh = self._counts()[-2]
        return ids[:fresh], places[:fresh]

    @property
    def staying(self) -> tuple[Tensor, Tensor]:
        """Places now and before of the rows that were held before as well."""
        now, before = self._staying
        common = self.held - self._counts()[-2]
        return now[:common], before[:common]

    @property
    def leaving(self) -> tuple[Tensor, Tensor]:
        """Ids and places before of the rows that this batch does not name."""
        ids, places = self._leaving
        gone = self._counts()[-1]
        return ids[:gone], places[:gone]

    def places_among(self, ids: Tensor) -> Tensor:
        """Where its distinct rows are among others, which are held with them: `ids` ascending."""
        places = torch.searchsorted(ids, self.plan[0])
        if self._padding is not None:
            places = torch.where(self.plan[0] == self._padding, len(ids), places)
        return places

    def local(self, part: int, places: Tensor | None = None) -> Tensor:
        """The places of the rows that a part names, in the part's shape.

        Args:
            part: which one.
            places: of the distinct rows; by default those of the batch alone.
        """
        entries, places = self.plan[1], self._place if places is None else places
        if len(self._seen) > 1:
            entries = entries[self._begins[part] : self._begins[part + 1]]
        local, shape = entries if places is None else places[entries], self._seen[part].shape
        return local if local.shape == shape else local.view(shape)

    def begin(self, part: int) -> int:
        """How many ids come before those of a part."""
        return self._begins[part]

    def part_of(self, ids: Tensor) -> int | None:
        """Which of the parts these ids are, if they are known to be one."""
        for part, seen in enumerate(self._seen):
            if seen.are(ids):
                return part
        return None
