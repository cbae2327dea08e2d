"""Announcements: ids passed to announce() that no lookup of the table has used yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from speedtorch.plan.fixed_size_batch import FixedSizeBatch
from speedtorch.step.step import Batch, Step

__all__ = ["Announced", "Announcements", "check_all_looked_up"]

Plan: TypeAlias = Callable[[Sequence[Tensor]], Batch]
"""Plans a batch of the ids of a step, one tensor per lookup."""


class Announced(NamedTuple):
    """Ids that were announced for one step."""

    parts: tuple[Tensor, ...]
    begins: tuple[int, ...]
    """The index of the first part of each announce()."""
    batch: Batch
    """The batch plan of all parts."""


class Announcements:
    """Announced ids that wait for a lookup. Ids that are given up wait no longer and load no row.

    announce() plans ids and moves no row. Then these rules hold:

    1. The first lookup of an announced tensor loads the rows of all tensors of its announce() and
       of every later announce(). Earlier announced ids are given up.
    2. A lookup of other ids loads only its own rows. The announced ids wait. With a capacity, such
       a lookup loads the rows of the whole latest batch if the batch contains all of its rows.
    3. An announce() after zero_grad() or an error begins a new batch, whose rows do not share the
       capacity with the batch before. The batch before still waits, until a lookup of the new
       batch gives it up by rule 1.
    4. An empty tensor may belong to any batch. An empty lookup therefore loads rows only of the
       latest batch, and none after a zero_grad() or an error that followed announce().
    5. A step of the rows' optimizer, load_state_dict() and resize() give up all waiting ids. The
       end of a prefetch() loop gives up the loop's ids, unless later ids have joined their batch.

    zero_grad() does not give up ids, so it may run between announce() and the lookups.
    """

    def __init__(self) -> None:
        self.latest: Announced | None = None
        """The waiting batch that was announced last."""
        self._before: Announced | None = None
        """The batch before `latest`, if it waits."""
        self._is_over = False
        """Whether the next announce() begins a new batch."""
        self.batches_over = 0
        """How often a batch has ended, or may have been given up."""

    def planned(self, parts: Sequence[Tensor], plan: Plan) -> Announced:
        """Plans these ids together with the waiting ids of their batch; add() stores the result.

        Raises IndexError or RuntimeError if the rows are on the CPU and the ids are out of range or
        exceed the capacity.
        """
        latest = None if self._is_over else self.latest
        if latest is None:
            return _planned(parts, (0,), plan)
        return _planned([*latest.parts, *parts], (*latest.begins, len(latest.parts)), plan)

    def add(self, announced: Announced) -> None:
        """Stores the result of planned(), whose ids then wait for their lookups."""
        if self._is_over:
            self._before, self._is_over = self.latest, False
        self.latest = announced

    def end_batch(self) -> None:
        """Makes the next announce() begin a new batch."""
        self._is_over = self.latest is not None

    def note_end(self) -> None:
        """Counts a batch that may have been given up, and makes announce() begin a new batch."""
        self.batches_over += 1
        self._is_over = self.latest is not None

    def give_up(self) -> None:
        """Gives up all waiting ids and increments `batches_over`."""
        self.batches_over += 1
        self.forget()

    def give_up_batch(self, announced: Announced) -> None:
        """Gives up the ids of a batch, if they wait, and earlier ids."""
        if self.latest is announced:
            self.give_up()
        elif self._before is announced:
            self._before = None

    def forget(self) -> None:
        """Gives up all waiting ids."""
        self.latest, self._before, self._is_over = None, None, False

    def of(self, ids: Tensor, device: torch.device, plan: Plan) -> tuple[Announced, int] | None:
        """Returns the waiting ids that a lookup of `ids` loads, and the index of its part in them.

        Returns None if `ids` are not known to be announced. If announced ids are out of range or
        exceed the capacity, gives up all waiting ids and raises IndexError or RuntimeError.
        """
        if (latest := self.latest) is None:
            return None
        try:
            if latest.batch.device != device:  # the rows were moved
                latest = self.latest = _planned(latest.parts, latest.begins, plan)
            latest.batch.count()
            after: tuple[Tensor, ...] = ()
            waiting: tuple[Announced | None, ...] = (latest, self._before)
            if ids.numel() == 0:  # equals the empty tensors of every batch
                waiting = () if self._is_over else (latest,)
            for announced in waiting:
                if announced is None or (part := announced.batch.parts.part_of(ids)) is None:
                    after = latest.parts
                    continue
                begins = announced.begins
                begin = 0 if len(begins) == 1 else max(first for first in begins if first <= part)
                if begin == 0 and not after:
                    return announced, part
                combined = _planned((*announced.parts[begin:], *after), (0,), plan)
                combined.batch.count()
                return combined, part - begin
        except (IndexError, RuntimeError):
            self.forget()
            raise
        return None

    @property
    def certain(self) -> Announced | None:
        """The latest waiting batch, or None if the next announce() begins a new batch."""
        return None if self._is_over else self.latest


def _planned(parts: Sequence[Tensor], begins: tuple[int, ...], plan: Plan) -> Announced:
    batch = plan(parts)
    if isinstance(batch, FixedSizeBatch):
        batch.count()
    return Announced(tuple(parts), begins, batch)


def check_all_looked_up(
    name: str, now: Step, unseen: Sequence[tuple[int, int]], padding: int | None
) -> None:
    """Raises RuntimeError if a step looked up some announced tensors but not others.

    The optimizer would otherwise change rows without a gradient. The padding row is exempt.
    `unseen` is the result of Step.unseen(). A lookup of another tensor, such as a slice or a copy
    on another device, may have named the same ids. If both tensors are on the CPU, the error is
    raised only for ids that the step did not look up. If either is on a GPU, no error is raised,
    because the host would have to wait for the ids.
    """
    looked_up = [
        (batch.parts.values(part), number in now.planned)
        for number, batch in enumerate(now.batches)
        for part in range(batch.parts.number)
        if (number, part) not in unseen
    ]
    if any(values is None and not is_planned for values, is_planned in looked_up):
        return
    named = [values.reshape(-1).long() for values, _ in looked_up if values is not None]
    if padding is not None:
        named.append(torch.tensor([padding]))
    has_other_batches = len(now.batches) > len(now.planned)
    for number, part in unseen:
        parts = now.batches[number].parts
        if (ids := parts.values(part)) is None and has_other_batches:
            continue
        if ids is not None and named and bool(torch.isin(ids, torch.cat(named)).all()):
            continue
        if parts.shape(part).numel():
            raise RuntimeError(
                f"{name}: a step must look up all or none of the tensors of ids that announce() or"
                f" prefetch(ids=) announced for it. Of {parts.number} announced tensors, number"
                f" {part} (counted from 0), of shape {list(parts.shape(part))}, was not looked up."
                " The optimizer would change its rows without a gradient. Announce only tensors"
                " that the step looks up (ids=lambda batch: batch[0] if a loader returns (ids,"
                " labels)), or discard the step with zero_grad(). No row was stepped."
            )
