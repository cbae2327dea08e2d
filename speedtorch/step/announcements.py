"""Announcements: the ids that were announced to a table, and the step that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from speedtorch.plan.fixed_size_batch import FixedSizeBatch
from speedtorch.step.step import Batch, Step

__all__ = ["Announced", "Announcements", "refuse_partial_step"]

Plan: TypeAlias = Callable[[Sequence[Tensor]], Batch]
"""Plans the ids of a step, part by part."""


class Announced(NamedTuple):
    """Ids that were announced for one step."""

    parts: tuple[Tensor, ...]
    begins: tuple[int, ...]
    """Which part is the first of each announce()."""
    batch: Batch
    """The plan of all parts."""


class Announcements:
    """Announced ids of which no lookup has come yet; what is given up brings no row into a step.

    announce() plans ids and moves no row. From then on:

    1. The first lookup of an announced tensor brings the rows of all tensors of its announce(), and
       of every announce() after that. What was announced before it is given up.
    2. A lookup of other ids brings its own rows alone. The announced ids wait.
    3. An announce() that follows a zero_grad() or an error begins a new batch, whose rows need no
       room beside those of the batch before. That one is not given up yet; rule 1 decides.
    4. A lookup without ids brings rows of the latest batch alone, unless that may be given up.
    5. A step of the rows' optimizer and load_state_dict() give up all that waits.

    So zero_grad() alone gives nothing up: it may stand between announce() and the lookups.
    """

    def __init__(self) -> None:
        self.latest: Announced | None = None
        """The batch that was announced last, and waits."""
        self._before: Announced | None = None
        """The batch before that."""
        self._is_over = False
        """Whether the next announce() begins a new batch."""
        self.batches_over = 0
        """How often a batch has ended, or may have been given up."""

    def planned(self, parts: Sequence[Tensor], plan: Plan) -> Announced:
        """What add() is to announce: these ids beside those of their batch; nothing has changed.

        Raises IndexError or RuntimeError if the rows are held on the CPU and cannot be those of a
        step.
        """
        latest = None if self._is_over else self.latest
        if latest is None:
            return _planned(parts, (0,), plan)
        return _planned([*latest.parts, *parts], (*latest.begins, len(latest.parts)), plan)

    def add(self, announced: Announced) -> None:
        """Lets ids of planned() wait for their lookups."""
        if self._is_over:
            self._before, self._is_over = self.latest, False
        self.latest = announced

    def end_batch(self) -> None:
        """Lets the next announce() begin a new batch."""
        self._is_over = self.latest is not None

    def note_end(self) -> None:
        """Called where a batch may have been given up."""
        self.batches_over += 1
        self.end_batch()

    def give_up(self) -> None:
        """Gives up all that waits, as a batch that has ended."""
        self.batches_over += 1
        self.forget()

    def forget(self) -> None:
        """Gives up all that waits."""
        self.latest, self._before, self._is_over = None, None, False

    def of(self, ids: Tensor, device: torch.device, plan: Plan) -> tuple[Announced, int] | None:
        """What a lookup of these ids brings, and which part they are, if they are known to be one.

        Raises IndexError or RuntimeError if announced ids cannot be those of a step; all are given
        up then.
        """
        if (latest := self.latest) is None:
            return None
        try:
            if latest.batch.device != device:  # the rows were moved
                latest = self.latest = _planned(latest.parts, latest.begins, plan)
            latest.batch.count()
            after: tuple[Tensor, ...] = ()
            waiting: tuple[Announced | None, ...] = (latest, self._before)
            if ids.numel() == 0:  # as any other empty tensor, of whatever batch
                waiting = () if self._is_over else (latest,)
            for announced in waiting:
                if announced is None or (part := announced.batch.parts.part_of(ids)) is None:
                    after = latest.parts
                    continue
                begins = announced.begins
                begin = 0 if len(begins) == 1 else max(each for each in begins if each <= part)
                if begin == 0 and not after:
                    return announced, part
                brought = _planned((*announced.parts[begin:], *after), (0,), plan)
                brought.batch.count()
                return brought, part - begin
        except (IndexError, RuntimeError):
            self.forget()
            raise
        return None

    @property
    def certain(self) -> Announced | None:
        """What waits, if nothing says that it may have been given up."""
        return None if self._is_over else self.latest


def _planned(parts: Sequence[Tensor], begins: tuple[int, ...], plan: Plan) -> Announced:
    batch = plan(parts)
    if isinstance(batch, FixedSizeBatch):
        batch.count()
    return Announced(tuple(parts), begins, batch)


def refuse_partial_step(
    name: str, now: Step, unseen: Sequence[tuple[int, int]], padding: int | None
) -> None:
    """Raises RuntimeError if lookups of a step have named some announced tensors and others not.

    Its optimizer would change rows that were announced in vain, other than the padding's. `unseen`
    are those of Step.unseen(). A lookup of other tensors, as of a slice or of a copy on another
    device, may have named any: ids on the CPU are compared then, and those of a GPU, for which the
    host would wait, raise nothing.
    """
    looked_up = [
        (batch.parts.values(part), number in now.planned)
        for number, batch in enumerate(now.batches)
        for part in range(len(batch.parts))
        if (number, part) not in unseen
    ]
    if any(values is None and not is_planned for values, is_planned in looked_up):
        return
    named = [each.reshape(-1).long() for each, _ in looked_up if each is not None]
    if padding is not None:
        named.append(torch.tensor([padding]))
    has_others = len(now.batches) > len(now.planned)
    for number, part in unseen:
        parts = now.batches[number].parts
        if (ids := parts.values(part)) is None and has_others:
            continue
        if ids is not None and named and bool(torch.isin(ids, torch.cat(named)).all()):
            continue
        if parts.shape(part).numel():
            raise RuntimeError(
                f"{name}: a step looks up all tensors of ids that announce() or prefetch's"
                f" ids names for it, or none: of {len(parts)} that were named, number {part}"
                f" (counted from 0), of shape {list(parts.shape(part))}, was not looked up, and"
                " the step would change its rows without a gradient. Name no other tensors"
                " (ids=lambda batch: batch[0] where a loader gives (ids, labels)), or give the"
                " step up by zero_grad(); nothing was stepped"
            )
