"""The distinct rows of a batch whose number stays on the device: at most so many fit a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speedtorch.ops.functions import _ops
from speedtorch.plan.planned_batch import BatchIds

__all__ = ["BAD_IDS", "TOO_MANY", "Changes", "FixedSizeBatch", "raises_at_once", "too_many"]

BAD_IDS, TOO_MANY = 1, 2
"""Why no step can hold a batch; ranks that hold rows together have more reasons."""


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


class FixedSizeBatch:
    """The distinct rows of a batch, in address order, as a block of `capacity` rows holds them.

    The host does not wait for their number. The padding's row stands after the block.
    `following()` is the batch that was planned after this one. Known once a step holds the rows are
    `ids`, those of the block, always the same tensor, and `number`, how many they are: `[1]`.

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
        after: FixedSizeBatch | None = None,
        name: str = "ids",
    ) -> None:
        self.device = device
        self.capacity = capacity
        self.parts = BatchIds(parts, rows, device, name)
        self._has_padding = padding is not None
        self.parts.plan_by_itself(-1 if padding is None else padding, capacity)
        self.following: Callable[[], FixedSizeBatch | None] = lambda: None
        self._is_counted = False
        if after is not None:
            after.following = weakref.ref(self)

    @property
    def named(self) -> Tensor:
        """Its rows, ascending, before entries that are none."""
        return self.parts.plan[0]

    def compared(self, held: Tensor, held_status: Tensor, halt: Tensor, fault: Tensor) -> Changes:
        """What changes when its rows follow on held ones; see csrc/ops/diff_ids.cpp."""
        unique, status, parts = self.parts.plan[0], self.parts.plan[4], self.parts
        compare = _ops.diff_ids
        return Changes(*compare(unique, status, held, held_status, parts.rows, halt, fault))

    def held(self, ids: Tensor, number: Tensor) -> None:
        """Says that a block holds the rows."""
        self.ids, self.number = ids, number

    def tensors(self) -> Iterator[Tensor]:
        """All that is kept on the device of the rows."""
        yield from self.parts.tensors()

    def count(self) -> None:
        """Raises RuntimeError if the CPU holds the rows and too many are named; never waits."""
        if not self._is_counted and raises_at_once(self.device):
            if (named := int(self.parts.plan[4][3])) > self.capacity:
                raise too_many(self.parts.name, named, self.capacity, "nothing has changed")
            self._is_counted = True

    def fault(self) -> Tensor:
        """Why no step can hold the batch, or 0: `[1]`, on the device; raises as count()."""
        self.count()
        fault: Tensor = _ops.plan_fault(self.parts.plan[4], self.capacity)
        return fault

    def spoil(self, fault: Tensor) -> None:
        """Lets no step hold the batch unless `fault`, the largest of all ranks' fault(), is 0.

        Unless its own is as large, the position of a bad id then says which: less than 0.
        """
        _ops.spoil_plan(self.parts.plan[4], self.capacity, fault)

    def summed(self, rows: Tensor, part: int, source: Tensor | None) -> Tensor:
        """The gradients of a part's rows, added up: those of the block and the padding's."""
        summed: Tensor = _ops.sum_rows(
            rows,
            list(self.parts.plan),
            self.parts.rows,
            self.parts.begin(part),
            self.capacity + self._has_padding,
            source,
            self.number,
        )
        return summed
