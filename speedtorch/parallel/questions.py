"""Questions: what ranks ask each other for, at a lookup or ahead of it.

Ids go to the owners of their rows, each distinct one once. Questions of a batch that is announced,
or planned by a loop, are asked then; at the lookup they are known again by their tensors, never by
values: all ranks run the same code, and have other values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from speedtorch.ops.planned_batch import PlannedBatch, SeenIds
from speedtorch.parallel.dealt_rows import DealtRows
from speedtorch.parallel.ranks import Asked, Ranks
from speedtorch.step.exchange import Batch, Exchange

__all__ = ["Question", "Questions"]


class Question(NamedTuple):
    """The distinct rows of a lookup, and what ranks have asked each other for."""

    batch: PlannedBatch
    order: Tensor | None
    """Of the rows asked for, where the padding's does not come last by itself."""
    asked: Asked

    @property
    def places(self) -> Tensor:
        """Where the rows of the ids are among those of in_order()."""
        return self.batch.local(0)

    def in_order(self, rows: Tensor) -> Tensor:
        """The rows that were asked for, ascending by owner and place, the padding's last."""
        return rows if self.order is None else rows.index_select(0, self.order)


class PlannedQuestions(NamedTuple):
    """The questions of a batch, and the batch of the rows that this rank is asked for."""

    seen: list[SeenIds]
    questions: list[Question]
    own: Batch | None = None


class Questions:
    """Asks for rows of a table, ahead where it is told to; every call is one of all ranks.

    Args:
        exchange: of the rows that this rank owns.
        dealt: who owns which.
        ranks: that own them.
        number: of the table, the same on all ranks.
        padding: id of the row that is never trained, or None.
    """

    def __init__(
        self, exchange: Exchange, dealt: DealtRows, ranks: Ranks, number: int, padding: int | None
    ) -> None:
        self._exchange, self._dealt, self._ranks = exchange, dealt, ranks
        self._number = number
        self._padding = None if padding is None else int(dealt.numbers(torch.tensor(padding)))
        self._told: list[PlannedQuestions] = []
        """Of the step of now or the next one, announced."""
        self._due: PlannedQuestions | None = None
        """Of the batch that a loop gives."""

    def of(self, ids: Tensor) -> Question:
        """The question of a lookup, which is asked now unless it was before.

        Raises IndexError on all ranks if an id on one of them is out of range.
        """
        for planned in (*self._told, *([] if self._due is None else [self._due])):
            for seen, question in zip(planned.seen, planned.questions, strict=True):
                if seen.are(ids):
                    return question
        return self._ask(ids)

    def announce(self, parts: Sequence[Tensor]) -> None:
        """As Exchange.announce."""
        if self._exchange.is_over():
            self._told = []
        planned = self._planned(parts)
        self._told.append(planned)
        self._exchange.announce([each.asked.ids for each in planned.questions])

    def plan_ahead(
        self, parts: Sequence[Tensor], after: PlannedQuestions | None
    ) -> PlannedQuestions:
        """As Exchange.plan_ahead."""
        planned = self._planned(parts)
        own = [each.asked.ids for each in planned.questions]
        before = None if after is None else after.own
        return planned._replace(own=self._exchange.plan_ahead(own, before))

    def expect(self, batch: PlannedQuestions | None) -> None:
        """As Exchange.expect."""
        self._due = batch
        self._exchange.expect(None if batch is None else batch.own)

    def start_loop(self, loop: object) -> None:
        """As Exchange.start_loop."""
        self._exchange.start_loop(loop)

    def end_loop(self, loop: object) -> None:
        """As Exchange.end_loop."""
        self._due = None
        self._exchange.end_loop(loop)

    def _planned(self, parts: Sequence[Tensor]) -> PlannedQuestions:
        device = self._exchange.device
        seen = [SeenIds(part, device, unread=True) for part in parts]
        return PlannedQuestions(seen, [self._ask(part) for part in parts])

    def _ask(self, ids: Tensor) -> Question:
        name, device, dealt = self._exchange.name, self._exchange.device, self._dealt
        room, padding = dealt.room, self._padding
        numbers = dealt.numbers(ids.to(device))
        wrong: IndexError | None = None
        of_ranks: list[Tensor] | None = None
        try:
            batch = PlannedBatch([numbers], room * dealt.ranks, device, padding, name=name)
            batch.count()
        except IndexError:
            wrong = self._error(ids, numbers)
        else:
            ends = torch.arange(1, dealt.ranks, device=device) * room
            parts = batch.ids.tensor_split(torch.searchsorted(batch.ids, ends).tolist())
            of_ranks = [part - rank * room for rank, part in enumerate(parts)]
            if padding is not None:
                owner, place = divmod(padding, room)
                more = torch.tensor([place], device=device)
                of_ranks[owner] = torch.cat([of_ranks[owner], more])
        asked = self._ranks.ask(name, self._number, of_ranks, device)
        if wrong is not None:
            raise wrong
        return Question(batch, self._order(batch.held, asked), asked)

    def _order(self, held: int, asked: Asked) -> Tensor | None:
        if self._padding is None:
            return None
        # Its owner gives it after the other rows that it was asked for.
        last = sum(asked.got[: self._padding // self._dealt.room + 1]) - 1
        order = torch.arange(held + 1, device=self._exchange.device)
        order += order >= last
        order[-1] = last
        return order

    def _error(self, ids: Tensor, numbers: Tensor) -> IndexError:
        bad = (numbers.reshape(-1) < 0).nonzero()[:, 0]
        position = int(bad[0])
        return IndexError(
            f"{self._exchange.name}: id {int(ids.reshape(-1)[position])} at position {position} is"
            f" out of range for a table of {self._dealt.rows} rows ({len(bad)} of {ids.numel()} ids"
            " are out of range); no row was moved"
        )
