"""Step: the rows on the device for one optimizer step, as an immutable value."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from speedtorch.plan.fixed_size_batch import FixedSizeBatch
from speedtorch.plan.planned_batch import PlannedBatch, SeenIds
from speedtorch.step.joined_rows import JoinedRows
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

_FEW = 8  # find() searches so many batches, or planned parts, without keys

Rows: TypeAlias = list[Tensor]
"""One tensor of rows `[n, ...]` for each field, all in the same row order."""

Batch: TypeAlias = PlannedBatch | FixedSizeBatch
"""The plan of a step's rows. A FixedSizeBatch has its number of rows on the device only."""


class Copy(Enum):
    """How the step's rows compare with their copies in the table."""

    CLEAN = "as in the table"
    DIRTY = "may be newer than in the table"
    STALE = "may be older than in the table"


class PendingTransfer(NamedTuple):
    """A transfer to queue so that it overlaps with the device's next computation."""

    outgoing: Block | Counted | None
    """Rows of the step before that are not yet written to the table."""
    prefetches: bool
    """Whether the transfer loads the rows of the next planned batch."""
    waits: bool = False
    """Whether the transfer waits for the step's next lookup, to be queued with its rows."""


def due(transfer: object, *, ahead: bool, looks_up: bool = False) -> PendingTransfer | None:
    """Returns the transfer if the caller must queue it now, else None.

    Without `ahead` only a transfer that writes rows to the table is due. With `looks_up` the caller
    is a lookup, and a transfer with `waits` is not due, because the lookup may add rows.
    """
    if not isinstance(transfer, PendingTransfer) or (looks_up and transfer.waits):
        return None
    return transfer if ahead or transfer.outgoing is not None else None


class Prefetched(NamedTuple):
    """A queued transfer that loads rows of the next batch."""

    batch: Batch
    rows: Rows
    """Rows that the transfer copied from the step before may be newer than the table's. Empty for a
    FixedSizeBatch, whose rows have their own memory."""


class LookupPlaces(NamedTuple):
    """The positions of a lookup's rows in a step."""

    batch: Batch
    number: int
    """Index of the batch in the step."""
    part: int
    """Index of the lookup's ids in the batch."""
    positions: Tensor
    """Index of the step's row for each id, in the shape of the ids."""
    has_moved: bool
    """Whether rows that joined the step may have changed these positions since the first lookup."""
    joined: Tensor | None = None
    """The rows, if they are JoinedRows; else they are the parameter's."""


class KnownParts(dict[Hashable, list[tuple[int, int]]]):
    """The parts of a step's batches by key; several parts may have the same key."""

    count = 0
    """The number of batches whose parts are added."""

    def add(self, batches: Sequence[Batch]) -> None:
        """Adds the parts of batches that are not added yet."""
        for number in range(self.count, len(batches)):
            for part, key in enumerate(batches[number].parts.keys()):
                self.setdefault(key, []).append((number, part))
        self.count = max(self.count, len(batches))


class Step(NamedTuple):
    """The rows of a step, their batches and the state of the step.

    A Step with `before` is tentative: the next lookup or read of the gradient keeps or undoes it.
    """

    number: int
    """Counts steps. Rows that a graph of an earlier step looked up may be missing in this step."""
    ids: Tensor
    """Ids of the rows, ascending, without the padding's id."""
    rows: Rows
    """The padding row, if any, is the last: each step loads it, and no transfer writes it back."""
    places: dict[int, Tensor]
    """The row of each id of a batch, by batch index, computed when a lookup first needs them."""
    seen: set[tuple[int, int]]
    """Planned parts (batch index, part index) that lookups have named. Parts are only added."""
    known: KnownParts
    """Parts of the batches by key, filled once a step has many. Parts are only added."""
    batches: tuple[Batch, ...] = ()
    """The batches whose rows the step has."""
    moved: int = 0
    """The number of leading batches that were looked up before other rows joined."""
    gradient: Tensor | None = None
    """The gradient to set when the parameter first shows the rows."""
    planned: tuple[int, ...] = ()
    """Indices of batches that were announced or planned by a loop; the others are lookups."""
    planned_parts: int = 0
    """The number of parts of the planned batches."""
    since: int = 0
    """The first step whose graphs may add a gradient, as no optimizer has stepped since."""
    before: Step | None = None
    """The step before, without its rows, if this step began together with steps of other tables
    and no lookup has used its rows yet."""
    copy: Copy = Copy.CLEAN
    transfer: PendingTransfer | Prefetched | None = None
    captured: bool = False
    """Whether the step began in the capture of a CUDA graph, which runs nothing until replay."""
    joined: JoinedRows | None = None
    """All rows, if many lookups have loaded some of them. `ids` and `rows` then have only those of
    the first lookups, and `places` are places in these rows."""
    stepped: bool = False
    """Whether an optimizer has stepped the rows: the next lookup begins another step."""

    def after(
        self,
        batch: Batch,
        ids: Tensor,
        rows: Rows,
        seen: set[tuple[int, int]],
        *,
        is_planned: bool,
        copy: Copy,
        outgoing: Block | Counted | None = None,
        prefetches: bool = False,
        waits: bool = False,
        before: Step | None = None,
        captured: bool = False,
    ) -> Step:
        """The step after this one, with a batch and its rows.

        `is_planned`: Whether the batch was announced or planned by a loop. `outgoing`, `prefetches`
        and `waits` are the fields of PendingTransfer.
        """
        transfer = None
        if outgoing is not None or prefetches:
            transfer = PendingTransfer(outgoing, prefetches, waits)
        return Step(
            self.number + 1,
            ids,
            rows,
            {},
            seen,
            KnownParts(),
            (batch,),
            planned=(0,) if is_planned else (),
            planned_parts=batch.parts.number if is_planned else 0,
            since=self.number + 1 if self.stepped else self.since,
            before=before,
            copy=copy,
            transfer=transfer,
            captured=captured,
        )

    def part(self, number: int, part: int) -> LookupPlaces:
        """The positions of part `part` of batch `number` in the step."""
        batch = self.batches[number]
        places = self.places.get(number)
        if places is None and batch.ids is not self.ids:  # the step has rows of other batches, too
            assert isinstance(batch, PlannedBatch)
            places = self.places[number] = batch.places_among(self.ids)
        positions = batch.parts.local(part, places)
        joined = None if self.joined is None else self.joined.rows[0]
        return LookupPlaces(batch, number, part, positions, number < self.moved, joined)

    def find(self, ids: Tensor) -> LookupPlaces | None:
        """The positions of the rows of ids if the ids are a known part of the step, else None."""
        if len(self.batches) > _FEW or self.planned_parts > _FEW:
            return self._find_by_key(ids)
        for number, batch in enumerate(self.batches):
            if (part := batch.parts.part_of(ids)) is not None:
                return self.part(number, part)
        return None

    def _find_by_key(self, ids: Tensor) -> LookupPlaces | None:
        """Finds ids by key instead of a search through all parts."""
        self.known.add(self.batches)
        for key in SeenIds.keys_of(ids):
            for number, part in self.known.get(key, ()):
                if number < len(self.batches) and self.batches[number].parts.is_part(part, ids):
                    return self.part(number, part)
        return None

    def note_lookup(self, found: LookupPlaces, ids: Tensor) -> None:
        """Adds the planned part that a lookup has named to `seen`."""
        if found.number in self.planned:
            self.seen.add((found.number, found.part))
            return
        for number in self.planned:  # an earlier lookup had equal ids before they were announced
            if (part := self.batches[number].parts.part_of(ids)) is not None:
                self.seen.add((number, part))

    def with_batch(
        self,
        batch: PlannedBatch,
        *,
        is_planned: bool,
        positions: Tensor | None = None,
        **changed: Any,
    ) -> Step:
        """The step with one more batch, and with the `changed` fields.

        With `is_planned` the batch was announced: its lookups follow. `positions` are the row of
        each id of the batch, if they are known.
        """
        number = len(self.batches)
        self.places.pop(number, None)  # of a lookup that an exception ended
        if positions is not None:
            self.places[number] = positions
        if is_planned:
            changed["planned"] = (*self.planned, number)
            changed["planned_parts"] = self.planned_parts + batch.parts.number
        return self._replace(batches=(*self.batches, batch), **changed)

    def without_prefetch(self) -> Step:
        """The step without prefetched rows and without a prefetch in its pending transfer."""
        kept = None
        if isinstance(self.transfer, PendingTransfer) and self.transfer.outgoing is not None:
            kept = self.transfer._replace(prefetches=False)
        return self if kept is self.transfer else self._replace(transfer=kept)

    def unseen(self) -> list[tuple[int, int]]:
        """Planned parts whose ids no lookup has named, directly or by a part with equal ids."""
        unseen = [
            (number, part)
            for number in self.planned
            for part in range(self.batches[number].parts.number)
            if (number, part) not in self.seen
        ]
        return [key for key in unseen if not any(self._are_same(key, seen) for seen in self.seen)]

    def _are_same(self, key: tuple[int, int], other: tuple[int, int]) -> bool:
        parts = self.batches[key[0]].parts
        return parts.is_same(key[1], self.batches[other[0]].parts, other[1])
