"""Step: the rows that are held for one step of an optimizer, as a value that is never changed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

from torch import Tensor

from speedtorch.plan.fixed_size_batch import FixedSizeBatch
from speedtorch.plan.planned_batch import PlannedBatch, SeenIds
from speedtorch.step.row_store import Block, Counted

__all__ = [
    "Batch",
    "Copy",
    "KnownParts",
    "LookupPlaces",
    "PendingTransfer",
    "Prefetched",
    "Rows",
    "Step",
    "due",
]

_FEW = 8  # batches that are looked at one by one

Rows: TypeAlias = list[Tensor]
"""Rows of every field `[n, ...]`, in the same order."""

Batch: TypeAlias = PlannedBatch | FixedSizeBatch
"""What a step holds the rows of; the number of the second's rows stays on the device."""


class Copy(Enum):
    """How held rows are to those of the table."""

    CLEAN = "as in the table"
    DIRTY = "may be newer than in the table"
    STALE = "may be older than in the table"


class PendingTransfer(NamedTuple):
    """A transfer that is to be queued beside what the device computes next."""

    leaving: Block | Counted | None
    """Rows of the step before that have yet to be written to the table."""
    prefetches: bool
    """Whether the rows of the batch that was planned after this step's are to be read."""
    waits: bool = False
    """Whether it is queued together with the next lookup's rows, if the step has another lookup."""


def due(transfer: object, *, ahead: bool, looks_up: bool = False) -> PendingTransfer | None:
    """The transfer if it is to be queued now; without `ahead` only for the rows that leave.

    `looks_up`: A lookup asks, whose rows may join the step.
    """
    if not isinstance(transfer, PendingTransfer) or (looks_up and transfer.waits):
        return None
    return transfer if ahead or transfer.leaving is not None else None


class Prefetched(NamedTuple):
    """A transfer of rows of the next batch, which was queued."""

    batch: Batch
    rows: Rows
    """Those that left the step before while they arrived are newer than the table's. Rows of
    blocks of a fixed size have memory of their own, and this is empty."""


class LookupPlaces(NamedTuple):
    """Where a step holds the rows of a lookup."""

    batch: Batch
    number: int
    """Of the batch, among the step's."""
    part: int
    """The lookup's, among those of the batch."""
    positions: Tensor
    """Which held rows the ids name, in their shape."""
    has_moved: bool
    """Whether its rows may have had other positions when it was looked up first."""


class KnownParts(dict[Hashable, list[tuple[int, int]]]):
    """The parts of a step's batches by their keys, which several may have."""

    count = 0
    """Batches that are here."""

    def add(self, batches: Sequence[Batch]) -> None:
        """Adds those that are new."""
        for number in range(self.count, len(batches)):
            for part, key in enumerate(batches[number].parts.keys()):
                self.setdefault(key, []).append((number, part))
        self.count = max(self.count, len(batches))


class Step(NamedTuple):
    """The rows that are held, where, planned by what, and in which phase.

    It is tentative while it has a step `before`; a lookup, or a read of the gradient, decides.
    """

    number: int
    """Counts steps: rows that a graph of an earlier one looked up have left."""
    ids: Tensor
    """Of the rows, ascending, without the padding's."""
    rows: Rows
    """The padding's is the last: it is loaded for each step and never written back."""
    places: dict[int, Tensor]
    """Where rows of batches are that were looked up after others, once a lookup needs it."""
    seen: set[tuple[int, int]]
    """Which of the planned parts lookups have named, the numbers of batch and part: ever more."""
    known: KnownParts
    """Parts of the batches, once there are many: ever more."""
    batches: tuple[Batch, ...] = ()
    """Those whose rows these are."""
    moved: int = 0
    """How many of the batches, the first ones, were looked up before other rows joined."""
    gradient: Tensor | None = None
    """What the parameter's gradient is when it is first given the rows."""
    planned: tuple[int, ...] = ()
    """Which of the batches were announced or planned by a loop; the others are lookups."""
    planned_parts: int = 0
    """How many parts these have."""
    since: int = 0
    """The first step whose graphs may bring a gradient: no optimizer has stepped rows since."""
    before: Step | None = None
    """The step before, without its rows, if this one began with those of other tables and none of
    its rows was asked for yet."""
    copy: Copy = Copy.CLEAN
    transfer: PendingTransfer | Prefetched | None = None
    captured: bool = False
    """Whether a CUDA graph was captured meanwhile: outside of it nothing has happened yet."""
    stepped: bool = False
    """Whether an optimizer has stepped them: the next lookup begins another step."""

    def after(
        self,
        batch: Batch,
        ids: Tensor,
        rows: Rows,
        seen: set[tuple[int, int]],
        *,
        is_told: bool,
        copy: Copy,
        leaving: Block | Counted | None = None,
        prefetches: bool = False,
        waits: bool = False,
        before: Step | None = None,
        captured: bool = False,
    ) -> Step:
        """The step after this one, of a batch whose rows these are.

        `is_told`: the batch was announced or planned by a loop. `leaving`, `prefetches`, `waits`:
        as PendingTransfer says.
        """
        transfer = None
        if leaving is not None or prefetches:
            transfer = PendingTransfer(leaving, prefetches, waits)
        return Step(
            self.number + 1,
            ids,
            rows,
            {},
            seen,
            KnownParts(),
            (batch,),
            planned=(0,) if is_told else (),
            planned_parts=len(batch.parts) if is_told else 0,
            since=self.number + 1 if self.stepped else self.since,
            before=before,
            copy=copy,
            transfer=transfer,
            captured=captured,
        )

    def part(self, number: int, part: int) -> LookupPlaces:
        """A part of one of the step's batches."""
        batch = self.batches[number]
        places = self.places.get(number)  # kept so that they are computed once
        if places is None and batch.ids is not self.ids:  # rows of others are among its own
            assert isinstance(batch, PlannedBatch)
            places = self.places[number] = batch.places_among(self.ids)
        return LookupPlaces(
            batch, number, part, batch.parts.local(part, places), number < self.moved
        )

    def find(self, ids: Tensor) -> LookupPlaces | None:
        """Where the rows of ids are, if they are known to be a part of what the step holds."""
        if len(self.batches) > _FEW:
            return self._find_by_key(ids)
        for number, batch in enumerate(self.batches):
            if (part := batch.parts.part_of(ids)) is not None:
                return self.part(number, part)
        return None

    def _find_by_key(self, ids: Tensor) -> LookupPlaces | None:
        """As find, without a look at each part."""
        self.known.add(self.batches)
        for key in SeenIds.keys_of(ids):
            for number, part in self.known.get(key, ()):
                if number < len(self.batches) and self.batches[number].parts.is_part(part, ids):
                    return self.part(number, part)
        return None

    def with_batch(self, batch: PlannedBatch, *, is_planned: bool) -> Step:
        """The step with a batch beside, all of whose rows it holds.

        Where it `is_planned`, its lookups are still to come.
        """
        beside = self._replace(batches=(*self.batches, batch))
        if not is_planned:
            return beside
        return beside._replace(
            planned=(*self.planned, len(self.batches)),
            planned_parts=self.planned_parts + len(batch.parts),
        )

    def without_prefetch(self) -> Step:
        """The step with no rows of another batch, on their way or to be sent for."""
        kept = None
        if isinstance(self.transfer, PendingTransfer) and self.transfer.leaving is not None:
            kept = self.transfer._replace(prefetches=False)
        return self if kept is self.transfer else self._replace(transfer=kept)

    def unseen(self) -> list[tuple[int, int]]:
        """Planned parts that no lookup has named, nor one of equal ids."""
        if len(self.seen) == self.planned_parts:
            return []
        left = [
            (number, part)
            for number in self.planned
            for part in range(len(self.batches[number].parts))
            if (number, part) not in self.seen
        ]
        return [each for each in left if not any(self._are_same(each, seen) for seen in self.seen)]

    def _are_same(self, one: tuple[int, int], other: tuple[int, int]) -> bool:
        parts = self.batches[one[0]].parts
        return parts.is_same(one[1], self.batches[other[0]].parts, other[1])
