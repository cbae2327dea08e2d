"""A step as a value: which rows are held, where, planned by what, and in which phase.

A step is never changed. Another one becomes current by one assignment (exchange.py): what comes
before that can be thrown away, what comes after it can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speedtorch.step.planned_batch import PlannedBatch

__all__ = ["Coming", "Owed", "Placed", "Step", "place_of", "placed", "without_padding"]


class Owed(NamedTuple):
    """Rows of the step before that have yet to be written to the table."""

    rows: list[Tensor]
    ids: Tensor
    places: Tensor
    """Of the ids, in `rows`."""


class Coming(NamedTuple):
    """Rows that have arrived for the next batch, or are about to."""

    batch: PlannedBatch
    rows: list[Tensor]
    """Those that left the step before while they arrived are newer than the table's."""


class Step(NamedTuple):
    """The rows that are held; rows of a field are in the order of their ids, which ascend."""

    number: int
    """Counts steps: rows that a graph of an earlier one looked up have left."""
    ids: Tensor
    rows: list[Tensor]
    """Their memory, field by field `[n, ...]`; the padding's row stands after the last weight."""
    places: dict[int, Tensor]
    """Where rows of batches are that were looked up after others, once somebody has asked."""
    batches: tuple[PlannedBatch, ...] = ()
    """Those whose rows these are."""
    moved: int = 0
    """How many of the batches, the first ones, were looked up before other rows joined."""
    whole: PlannedBatch | None = None
    """The batch whose rows these are in its own order, if there is one."""
    gradient: Tensor | None = None
    """What the parameter's gradient is when the rows are first shown."""
    announced: bool = False
    """Whether lookups are still to come that were announced."""
    newer: bool = False
    """Whether rows may be newer here than in the table."""
    stale: bool = False
    """Whether rows may be newer in the table than here."""
    over: bool = False
    """Whether an optimizer has stepped them: the next lookup begins another step."""
    ahead: bool = False
    """Whether rows of the batch that is planned after this one are to be sent for."""
    owed: Owed | None = None
    coming: Coming | None = None

    @property
    def held(self) -> int:
        """Rows that are held, without the padding's."""
        return self.ids.shape[0]

    @classmethod
    def of_nothing(cls, number: int, rows: list[Tensor], device: torch.device) -> Step:
        """A step that holds no row."""
        ids = torch.empty(0, dtype=torch.int64, device=device)
        return cls(number, ids, rows, {}, over=True)


class Placed(NamedTuple):
    """A part of a batch whose rows a step holds."""

    batch: PlannedBatch
    part: int
    positions: Tensor
    """Which held rows the ids name, in their shape; the padding is one after the last."""
    has_moved: bool
    """Whether its rows had other positions when it was looked up first."""


def place_of(step: Step, ids: Tensor) -> Placed | None:
    """Where the rows of ids are, if they are known to be a part of what the step holds."""
    for number, batch in enumerate(step.batches):
        part = batch.part_of(ids)
        if part is not None:
            return placed(step, number, part)
    return None


def placed(step: Step, number: int, part: int) -> Placed:
    """A part of one of the step's batches."""
    batch = step.batches[number]
    places: Tensor | None = None
    if batch is not step.whole:
        # Only kept so that nobody computes it twice.
        places = step.places.get(number)
        if places is None:
            places = step.places[number] = batch.places_among(step.ids)
    return Placed(batch, part, batch.local(part, places), number < step.moved)


def without_padding(rows: Sequence[Tensor], count: int) -> list[Tensor]:
    """Memory of held rows, but for the padding's place."""
    weight, *state = rows
    return [weight if weight.shape[0] == count else weight[:count], *state]
