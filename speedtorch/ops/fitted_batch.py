"""The distinct rows of a batch whose number stays on the device: at most so many fit a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speedtorch.ops.functions import _ops, plan_ids
from speedtorch.ops.planned_batch import Parts

__all__ = ["BAD_IDS", "TOO_MANY", "Changes", "FittedBatch", "raises_at_once", "too_many"]

BAD_IDS, TOO_MANY = 1, 2
"""Why no step can hold a batch; those who hold rows together have more reasons."""


def raises_at_once(device: torch.device) -> bool:
    """Whether what is wrong with a batch is raised before its step begins; a GPU says it later."""
    return device.type == "cpu"


def too_many(name: str, named: int, capacity: int, so: str) -> RuntimeError:
    """The error about a step that names more rows than fit, and what came of it."""
    return RuntimeError(
        f"{name}: a step names {named} distinct rows, capacity={capacity} fit; use smaller batches"
        f" or a larger capacity: {so}"
    )


class Changes(NamedTuple):
    """Which rows arrive, stay and leave, of which only the first so many entries are some."""

    arriving: Tensor
    arriving_places: Tensor
    stay_places: Tensor
    stay_from: Tensor
    leaving: Tensor
    leaving_places: Tensor
    counts: Tensor
    """Of the rows that are named, stay, arrive and leave."""


class FittedBatch:
    """The distinct rows of a batch, in address order, as a block of `capacity` rows holds them.

    Nobody waits for their number. The padding's row stands after the block. `following()` is the
    batch that was planned after this one. Known once a step holds the rows are `ids`, those of the
    block, always the same tensor, and `number`, how many they are: `[1]`.

    Raises:
        IndexError: rows are held on the CPU and an id is out of range; a GPU's are written to the
            `fault` of `compared`.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        rows: int,
        device: torch.device,
        padding: int | None,
        capacity: int,
        *,
        after: FittedBatch | None = None,
        name: str = "ids",
    ) -> None:
        self.device = device
        self.capacity = capacity
        self.parts = Parts(parts, rows, device, name)
        self.parts.plan_by(plan_ids)
        self.following: Callable[[], FittedBatch | None] = lambda: None
        self._padding = -1 if padding is None else padding
        self._place: Tensor | None = None
        """Of each distinct id, or None where that is its place in the order."""
        unique, many = self.parts.plan[0], self.parts.count > capacity
        self.named = unique
        """Its rows, ascending, before entries that are none."""
        if padding is not None:
            is_padding = unique == padding
            follows = is_padding.cumsum(0) > 0
            order = torch.arange(self.parts.count, device=device)
            place = (order - follows.long()).clamp(max=capacity - 1)
            self._place = torch.where(is_padding, capacity, place)
            self.named = torch.where(follows, unique.roll(-1), unique)
        elif many:  # what does not fit is looked up as zeros, which then all of the block are
            self._place = torch.arange(self.parts.count, device=device).clamp_(max=capacity - 1)
        self._is_counted = False
        if after is not None:
            after.following = weakref.ref(self)

    def compared(self, held: Tensor, held_status: Tensor, halt: Tensor, fault: Tensor) -> Changes:
        """What changes when its rows follow on held ones; see compare_rows.fitting."""
        unique, _, _, _, status = self.parts.plan
        compare, rows = _ops.compare_rows.fitting, self.parts.rows
        padding, size = self._padding, self.capacity
        lists = compare(unique, status, held, held_status, padding, size, rows, halt, fault)
        return Changes(*lists)

    def held(self, ids: Tensor, number: Tensor) -> None:
        """Says that a block holds the rows."""
        self.ids, self.number = ids, number

    def tensors(self) -> Iterator[Tensor]:
        """All that is kept on the device of the rows."""
        yield from self.parts.tensors()
        yield self.named
        if self._place is not None:
            yield self._place

    def count(self) -> None:
        """Raises RuntimeError if the CPU holds the rows and too many are named; nobody waits."""
        if not self._is_counted and raises_at_once(self.device):
            if (named := int(self._named())) > self.capacity:
                raise too_many(self.parts.name, named, self.capacity, "nothing has changed")
            self._is_counted = True

    def _named(self) -> Tensor:
        """How many rows it names."""
        unique, _, _, _, status = self.parts.plan
        if self._padding < 0:  # -1 stands behind the distinct ids
            return status[3]
        return status[3] - (unique == self._padding).any().long()

    def fault(self) -> Tensor:
        """Why no step can hold the batch, or 0: `[1]`, on the device."""
        are_too_many = (self._named() > self.capacity) * TOO_MANY
        return torch.where(self.parts.plan[4][0] > 0, BAD_IDS, are_too_many).view(1)

    def spoil(self, fault: Tensor, own: Tensor) -> None:
        """Lets no step hold the batch unless `fault`, the largest of all ranks' fault(), is 0.

        Unless `own`, that of this batch, is as large, the position of a bad id then says which:
        less than 0.
        """
        status = self.parts.plan[4]
        is_anothers = fault > own
        status[:1].masked_fill_(is_anothers, 1)
        status[1:2].copy_(torch.where(is_anothers, -fault, status[1:2]))

    def local(self, part: int, places: Tensor | None = None) -> Tensor:
        """The places of the rows that a part names, in the part's shape."""
        return self.parts.local(part, self._place if places is None else places)

    def summed(self, rows: Tensor, part: int, source: Tensor | None) -> Tensor:
        """The gradients of a part's rows, added up: `[capacity, ...]`; see PlannedBatch.summed.

        A padding stands behind the last row of the table here, and its gradients are zeros.
        """
        size, named = self.capacity, self.number
        if self._padding >= 0:  # the sum that follows those of the rows
            size, named = size + 1, self.parts.plan[4][3:4].where(named > 0, 0)
        summed: Tensor = _ops.sum_rows.counted(
            rows,
            self.parts.plan,
            named,
            self.parts.rows,
            self.parts.begin(part),
            size,
            source,
        )
        return summed[: self.capacity]
