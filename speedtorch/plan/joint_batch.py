"""The batches of several tables, planned as one with one sort, one comparison and one wait.

The rows of all tables are numbered consecutively, table after table. The unique rows of a batch are
sorted by number, so the rows of each table form one contiguous range.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from speedtorch.ops.functions import _ops, plan_batch, table_ids
from speedtorch.plan.host_copy import HostCopy
from speedtorch.plan.planned_batch import BatchIds, PlannedBatch
from speedtorch.torch_internals import current_stream

__all__ = ["JointBatch"]

# The counts of plan_batch(): first PlanStatus of csrc/plan/plan_launch.h, which begins with the
# number of ids out of range. Then the numbers of rows in this batch, also in the previous batch,
# only in this batch, and only in the previous batch.
_STATUS_FIELDS, _COMPARED = 8, 4
_IN_BOTH, _ONLY_HERE, _ONLY_BEFORE = 1, 2, 3
# The tensors of plan_batch(): the plan, whose last tensor has the counts, and three pairs of lists.
_COUNTS, _LISTS = 4, slice(5, 11)
_INCOMING, _KEPT, _OUTGOING = 0, 2, 4

_NO_PADDING = _NO_CAPACITY = -1


def _to_device(values: Sequence[Any], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # later calls outside inference mode use the cached tensor
        made = torch.tensor(values, device="cpu")
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def _device_and_stream(device: torch.device) -> tuple[torch.device, int]:
    """The cache key of a constant: its device, and the stream on which its copy is complete."""
    return device, current_stream(device).stream_id if device.type == "cuda" else 0


@lru_cache(maxsize=64)
def _ascending(sizes: tuple[int, ...], place: tuple[torch.device, int]) -> Tensor:
    """The cumulative sums of `sizes`: where each of the consecutive ranges begins and ends."""
    return _to_device([0, *accumulate(sizes)], place[0])


@lru_cache(maxsize=64)
def _ranges(rows: tuple[int, ...], place: tuple[torch.device, int]) -> Tensor:
    """The first row number and the count of rows of each table, `[tables, 2]`."""
    return _to_device(list(zip([0, *accumulate(rows)], rows, strict=False)), place[0])


class JointBatch:
    """The unique rows of a batch in several tables, in ascending order, table after table.

    split_by_table() returns one batch per table. `following()` is the joint batch that was planned
    after this one, or None. `bounds` and the lists of incoming, kept and outgoing rows relative to
    `previous` are valid only after count() has returned True.

    Args:
        parts: The unplanned ids of each table.
        device: The device of the rows.
        previous: The joint batch of the same tables in the step before.

    Raises:
        IndexError: The rows are on the CPU and an id is out of range. For rows on a GPU, count()
            returns False.
    """

    row_numbers: Tensor
    """The numbers of the unique rows, ascending, `[ids]`. Entries after the last row are unused."""
    bounds: list[int]
    """`tables + 1` ints: table k has the entries `bounds[k]` to `bounds[k + 1]` of the rows."""
    _status: Tensor

    def __init__(
        self, parts: Sequence[BatchIds], device: torch.device, previous: JointBatch | None = None
    ) -> None:
        self.parts = parts
        self.following: Callable[[], JointBatch | None] = lambda: None
        rows = tuple(part.rows for part in parts)
        sizes = tuple(part.count for part in parts)
        place = _device_and_stream(device)
        offsets, ranges = _ascending(sizes, place), _ranges(rows, place)
        ids = torch.cat([part.ids for part in parts])
        id_numbers, _ = table_ids(ids, offsets, ranges, samples=1)
        held = id_numbers[:0] if previous is None else previous.row_numbers
        held_status = held if previous is None else previous._status
        made = plan_batch(id_numbers, sum(rows), _NO_PADDING, _NO_CAPACITY, held, held_status)
        counts, self._lists = made[_COUNTS], made[_LISTS]
        plan = [*made[:_COUNTS], counts[:_STATUS_FIELDS]]
        *split, status, bounds = _ops.split_plan(plan, offsets, ranges, sum(rows))
        lengths = [sizes, sizes, sizes, tuple(size + 1 for size in sizes)]
        by_table = [tensor.split(size) for tensor, size in zip(split, lengths, strict=True)]
        for part, *of_table in zip(parts, *by_table, status.unbind(), strict=True):
            part.planned_as(of_table)
        self.row_numbers, self._status = plan[0], plan[4]
        self._counts = HostCopy(torch.cat([counts, bounds]))
        self.bounds = []
        self._compared: list[int] = []
        self._planned: torch.cuda.Event | None = None
        self._device = device
        self._batches: list[weakref.ref[PlannedBatch]] = []
        if previous is not None:
            previous.following = weakref.ref(self)

    def planned_until(self, event: torch.cuda.Event | None) -> None:
        """Sets the event after which the plans are complete, for plans on a side stream."""
        self._planned = event
        for part in self.parts:
            part.planned_until(event)

    def join(self) -> None:
        """Makes the current stream wait until the plans are complete.

        Only the first call waits, so all later work on the plans must follow on this stream.
        """
        if self._planned is not None:
            self.parts[0].join()
            self.planned_until(None)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that this batch keeps on the device of the rows."""
        yield from (self.row_numbers, self._status, *self._lists)
        for part in self.parts:
            yield from part.tensors()

    def count(self) -> bool:
        """Waits for the counts and returns whether all ids are in range."""
        counts = self._counts.read()
        self._compared = counts[_STATUS_FIELDS : _STATUS_FIELDS + _COMPARED]
        self.bounds = counts[_STATUS_FIELDS + _COMPARED :]
        return counts[0] == 0

    def split_by_table(self) -> list[PlannedBatch]:
        """Creates one batch per table; this object keeps only weak references to the batches."""
        made = [
            PlannedBatch(part, part.rows, self._device, joint=self, number=table)
            for table, part in enumerate(self.parts)
        ]
        self._batches = [weakref.ref(batch) for batch in made]
        return made

    @property
    def batches(self) -> list[PlannedBatch]:
        """The batches of split_by_table() that are still alive; empty after forget_batches()."""
        return [batch for reference in self._batches if (batch := reference()) is not None]

    def forget_batches(self) -> None:
        """Empties `batches`, so that the tables begin no second joint step with them."""
        self._batches = []

    @property
    def incoming(self) -> tuple[Tensor, Tensor]:
        """Ascending numbers and positions of the rows that are not in the previous batch."""
        return self._listed(_INCOMING, _ONLY_HERE)

    @property
    def kept(self) -> tuple[Tensor, Tensor]:
        """Positions in this batch and in the previous batch of the rows in both."""
        return self._listed(_KEPT, _IN_BOTH)

    @property
    def outgoing(self) -> tuple[Tensor, Tensor]:
        """Ascending numbers and positions of the rows that are only in the previous batch."""
        return self._listed(_OUTGOING, _ONLY_BEFORE)

    def _listed(self, first: int, counted: int) -> tuple[Tensor, Tensor]:
        count = self._compared[counted]
        return self._lists[first][:count], self._lists[first + 1][:count]
