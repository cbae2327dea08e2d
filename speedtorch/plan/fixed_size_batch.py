"""The unique rows of a batch with a capacity; their number remains on the device of the rows."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speedtorch.ops.functions import _ops, plan_batch
from speedtorch.plan.planned_batch import BatchIds

__all__ = ["BAD_IDS", "TOO_MANY", "Changes", "FixedSizeBatch", "raises_at_once", "too_many"]

BAD_IDS, TOO_MANY = 1, 2
"""Why a step cannot load a batch; embeddings that span several ranks have more reasons."""


def raises_at_once(device: torch.device) -> bool:
    """Whether a bad batch raises before its step begins; a GPU reports the error later."""
    return device.type == "cpu"


def too_many(name: str, named: int, capacity: int, outcome: str) -> RuntimeError:
    """The error for a step with more rows than `capacity`; `outcome` is a sentence."""
    return RuntimeError(
        f"{name}: a step has {named} unique rows, but capacity={capacity}. Use smaller batches or a"
        f" larger capacity. {outcome}"
    )


class Changes(NamedTuple):
    """Incoming, kept and outgoing rows; only the first entries of each list are valid."""

    incoming: Tensor
    incoming_places: Tensor
    kept_places: Tensor
    kept_from: Tensor
    outgoing: Tensor
    outgoing_places: Tensor
    counts: Tensor
    """The numbers of named, kept, incoming and outgoing rows."""


class FixedSizeBatch:
    """The unique rows of a batch, in ascending order, for tensors of `capacity` rows.

    The host does not wait for the number of rows. The padding's row follows the `capacity` rows.
    `following()` returns the next planned batch, or None.

    FixedBlocks calls set_ids() when it begins the step of the batch. Then `ids` are the ids of its
    `capacity` rows, in the same tensor for all batches, and `number` `[1]` is the number of rows in
    use.

    Raises:
        IndexError: The rows are on the CPU and an id is out of range. A GPU writes this error to
            the `fault` of `compared()`.
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
        number = -1 if padding is None else padding
        self.parts.plan_by(plan_batch, self.parts.ids, number, capacity)
        self.following: Callable[[], FixedSizeBatch | None] = lambda: None
        self._is_counted = False
        self.is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        """Whether a CUDA graph has captured the plan, so that each replay plans the ids again."""
        if after is not None:
            after.following = weakref.ref(self)

    @property
    def named(self) -> Tensor:
        """The ascending ids of the rows, followed by unused entries."""
        return self.parts.plan[0]

    def compared(self, held: Tensor, held_status: Tensor, halt: Tensor, fault: Tensor) -> Changes:
        """Compares the rows with the step's rows `held`; see csrc/ops/diff_ids.cpp."""
        unique, status, parts = self.parts.plan[0], self.parts.plan[4], self.parts
        compare = _ops.diff_ids
        return Changes(*compare(unique, status, held, held_status, parts.rows, halt, fault))

    def set_ids(self, ids: Tensor, number: Tensor) -> None:
        """Sets the attributes `ids` and `number`."""
        self.ids, self.number = ids, number

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that this batch keeps on the device of the rows."""
        yield from self.parts.tensors()

    def count(self) -> None:
        """Raises RuntimeError if rows are on the CPU and the batch has too many. Never waits."""
        if not self._is_counted and raises_at_once(self.device):
            # plan[0] are the unique ids. plan[4] is the status, whose entry 3 is their number.
            if (named := int(self.parts.plan[4][3])) > self.capacity:
                raise too_many(self.parts.name, named, self.capacity, "Nothing has changed.")
            self._is_counted = True

    def fault(self) -> Tensor:
        """Why no step can load the batch, or 0: `[1]`, on the device. Raises as count() does."""
        self.count()
        fault: Tensor = _ops.plan_fault(self.parts.plan[4], self.capacity)
        return fault

    def mark_bad(self, fault: Tensor) -> None:
        """Marks the plan as bad unless `fault`, the maximum of fault() over all ranks, is 0.

        If `fault` exceeds this batch's own fault(), the plan's status then has one bad id at the
        position `-fault`. FixedBlocks reads a negative position as the fault of another rank.
        """
        _ops.spoil_plan(self.parts.plan[4], self.capacity, fault)

    def alone(self, part: int) -> tuple[FixedSizeBatch, int]:
        """Returns this batch and the part; PlannedBatch may return another batch."""
        return self, part

    def summed(self, rows: Tensor, part: int, source: Tensor | None) -> Tensor:
        """Sums a part's gradients: one for each of `capacity` rows, then one for the padding."""
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
