"""The batches of several tables, planned as one: a sort, a comparison and a wait for all of them.

The rows of all tables are numbered, table after table. The distinct rows of a batch ascend by their
numbers, so those of one table are one range of them.
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

_STATUS_FIELDS, _COMPARED = 8, 4


def _sent(values: Sequence[Any], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # it is kept, for whatever comes
        made = torch.tensor(values, device="cpu")
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def _place(device: torch.device) -> tuple[torch.device, int]:
    """The device, and its current stream: no other stream waits until a constant is there."""
    return device, current_stream(device).stream_id if device.type == "cuda" else 0


@lru_cache(maxsize=64)
def _ascending(sizes: tuple[int, ...], place: tuple[torch.device, int]) -> Tensor:
    """Where things of these sizes begin that lie one after another, and where they end."""
    return _sent([0, *accumulate(sizes)], place[0])


@lru_cache(maxsize=64)
def _ranges(rows: tuple[int, ...], place: tuple[torch.device, int]) -> Tensor:
    """The first row of each table, and how many it has."""
    return _sent(list(zip([0, *accumulate(rows)], rows, strict=False)), place[0])


class JointBatch:
    """The distinct rows of a batch in several tables, in address order, table after table.

    take_apart() gives what each table's part is by itself; `following()` is the joint batch that
    was planned after this one. Known after count(), if it says so, are `bounds`, where the rows of
    each table begin among all, and the lists of those that arrive, stay and leave when they follow
    on those of `after`.

    Args:
        parts: The ids of each table, not planned yet.
        device: Where rows are held.
        after: The joint batch of the same tables whose rows are held before this one's.

    Raises:
        IndexError: rows are held on the CPU and an id is out of range; a GPU's are found by
            count().
    """

    numbers: Tensor
    """Of the rows, ascending, before entries that are none."""
    _status: Tensor

    def __init__(
        self, parts: Sequence[BatchIds], device: torch.device, after: JointBatch | None = None
    ) -> None:
        self.parts = parts
        self.following: Callable[[], JointBatch | None] = lambda: None
        rows = tuple(each.rows for each in parts)
        sizes = tuple(each.count for each in parts)
        place = _place(device)
        offsets, ranges = _ascending(sizes, place), _ranges(rows, place)
        ids = torch.cat([each.ids for each in parts if each.ids is not None])
        numbers, _ = table_ids(ids, offsets, ranges, 1)
        held = numbers[:0] if after is None else after.numbers
        held_status = held if after is None else after._status
        made = plan_batch(numbers, sum(rows), -1, -1, held, held_status)
        counts, plan = made[4], [*made[:4], made[4][:8]]
        self._lists = made[5:11]
        *split, status, bounds = _ops.split_plan(plan, offsets, ranges, sum(rows))
        lengths = [sizes, sizes, sizes, tuple(size + 1 for size in sizes)]
        pieces = [each.split(size) for each, size in zip(split, lengths, strict=True)]
        for each, *of_table in zip(parts, *pieces, status.unbind(), strict=True):
            each.planned_as(of_table)
        self.numbers, self._status = plan[0], plan[4]
        self._numbers = HostCopy(torch.cat([counts, bounds]))
        self.bounds: list[int] = []
        self._compared: list[int] = []
        self._planned: torch.cuda.Event | None = None
        self._device = device
        self._batches: list[weakref.ref[PlannedBatch]] = []
        if after is not None:
            after.following = weakref.ref(self)

    def planned_until(self, event: torch.cuda.Event | None) -> None:
        """Says after which event the plans are there; see BatchIds."""
        self._planned = event
        for each in self.parts:
            each.planned_until(event)

    def join(self) -> None:
        """What the current stream gets from now on begins when the plans are there."""
        if self._planned is not None:
            self.parts[0].join()
            self.planned_until(None)

    def tensors(self) -> Iterator[Tensor]:
        """All that is kept on the device of the rows."""
        yield from (self.numbers, self._status, *self._lists)
        for each in self.parts:
            yield from each.tensors()

    def count(self) -> bool:
        """Waits for the counts; whether all ids are good."""
        counts = self._numbers.read()
        self._compared = counts[_STATUS_FIELDS : _STATUS_FIELDS + _COMPARED]
        self.bounds = counts[_STATUS_FIELDS + _COMPARED :]
        return counts[0] == 0

    def take_apart(self) -> list[PlannedBatch]:
        """The batches of the tables, which know this one; the caller alone keeps them."""
        made = [
            PlannedBatch(each, each.rows, self._device, joint=self, number=number)
            for number, each in enumerate(self.parts)
        ]
        self._batches = [weakref.ref(each) for each in made]
        return made

    @property
    def batches(self) -> list[PlannedBatch]:
        """Those that were taken apart and are still there; none once it has begun."""
        return [batch for each in self._batches if (batch := each()) is not None]

    def let_go(self) -> None:
        """Says that a step of it has begun, or never will."""
        self._batches = []

    @property
    def arriving(self) -> tuple[Tensor, Tensor]:
        """Numbers, ascending, and places of the rows that were not held before."""
        return self._listed(0, 2)

    @property
    def staying(self) -> tuple[Tensor, Tensor]:
        """Places now and before of the rows that were held before as well."""
        return self._listed(2, 1)

    @property
    def leaving(self) -> tuple[Tensor, Tensor]:
        """Numbers, ascending, and places before of the rows that this batch does not name."""
        return self._listed(4, 3)

    def _listed(self, first: int, counted: int) -> tuple[Tensor, Tensor]:
        count = self._compared[counted]
        return self._lists[first][:count], self._lists[first + 1][:count]
