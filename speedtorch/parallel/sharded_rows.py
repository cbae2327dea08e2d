"""ShardedRows: lookups of rows of which this rank owns a share, in front of the step of that.

Ids go to the owners of their rows, each distinct one once; rows come back, and the gradients of
them go the same way. The owner's step does not know of it: to it the ids of all ranks, one after
another, are the ids of a lookup.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speedtorch.ops.planned_batch import PlannedBatch
from speedtorch.parallel.dealt_rows import DealtRows
from speedtorch.parallel.ranks import Asked, Ranks
from speedtorch.step.trained_rows import Bags, TrainedRows, summed

__all__ = ["ShardedRows"]


class ShardedRows:
    """Looks up rows by ids of the whole table; every call is one of all ranks.

    Args:
        rows: those that this rank owns.
        own_padding: where the padding's is among them, if it is.
        dealt: who owns which.
        ranks: that own them.
        number: of the table, the same on all ranks.
        padding: id of the row that is never trained, or None.
        average: divide gradients by the number of ranks.
        sparse: whether autograd is asked for sparse gradients.
    """

    def __init__(
        self,
        rows: TrainedRows,
        own_padding: int | None,
        *,
        dealt: DealtRows,
        ranks: Ranks,
        number: int,
        padding: int | None,
        average: bool,
        sparse: bool,
    ) -> None:
        self._rows, self._dealt, self._ranks = rows, dealt, ranks
        self._number = number
        self._divisor = ranks.size if average else 1
        self._sparse = sparse
        self._padding: int | None = None
        """The padding's number; its owner alone knows that it is never trained."""
        if padding is not None:
            self._padding = int(dealt.numbers(torch.tensor(padding)))
        self._owns_padding = own_padding is not None

    def rows_of(
        self, ids: Tensor, max_norm: float | None = None, norm_type: float = 2.0
    ) -> tuple[Tensor, Tensor]:
        """As TrainedRows.rows_of; the rows are copies of their owners'."""
        places, order, asked = self._asked(ids)
        own, held = self._rows.rows_of(asked.ids, max_norm, norm_type)
        padding = len(held) - 1 if self._owns_padding else -1
        sparse = self._rows.gives_sparse(asked=self._sparse)
        rows = torch.embedding(held, own, padding, False, sparse)
        brought = self._brought(rows, asked)
        return places, brought if order is None else brought.index_select(0, order)

    def summed(self, ids: Tensor, bags: Bags | None = None) -> Tensor:
        """As TrainedRows.summed."""
        batch, asked = self._planned(ids)
        brought = self._brought(self._rows.summed(asked.ids), asked)
        result: Tensor = _Spread.apply(brought, batch, bags)  # type: ignore[no-untyped-call]
        return result

    def read(self, ids: Tensor) -> Tensor:
        """As TrainedRows.read."""
        places, order, asked = self._asked(ids)
        rows = self._ranks.bring(self._rows.name, self._rows.read(asked.ids), asked)
        return torch.embedding(rows if order is None else rows[order], places)

    def borrow(
        self, ids: Tensor, max_norm: float | None, norm_type: float
    ) -> tuple[Tensor, Tensor]:
        """As TrainedRows.borrow."""
        places, order, asked = self._asked(ids)
        own, held = self._rows.borrow(asked.ids, max_norm, norm_type)
        rows = self._ranks.bring(self._rows.name, held[own], asked)
        return places, rows if order is None else rows[order]

    def _asked(self, ids: Tensor) -> tuple[Tensor, Tensor | None, Asked]:
        """Where the rows of ids are among those asked for, once these are put in an order.

        The padding's row is the last then, as in a step; without one they are in order.
        """
        batch, asked = self._planned(ids)
        if self._padding is None:
            return batch.local(0), None, asked
        # Its owner gives it after the rows that it was asked for.
        last = sum(asked.got[: self._padding // self._dealt.room + 1]) - 1
        order = torch.arange(batch.held + 1, device=batch.device)
        order = order + (order >= last).long()
        order[-1] = last
        return batch.local(0), order, asked

    def _planned(self, ids: Tensor) -> tuple[PlannedBatch, Asked]:
        """The distinct rows of ids, and what ranks ask each other for, the padding among it."""
        name, device, dealt = self._rows.name, self._rows.exchange.device, self._dealt
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
                owner, local = divmod(padding, room)
                more = torch.tensor([local], device=device)
                of_ranks[owner] = torch.cat([of_ranks[owner], more])
        asked = self._ranks.ask(name, self._number, of_ranks, device)
        if wrong is not None:
            raise wrong
        return batch, asked

    def _error(self, ids: Tensor, numbers: Tensor) -> IndexError:
        bad = (numbers.reshape(-1) < 0).nonzero()[:, 0]
        position = int(bad[0])
        return IndexError(
            f"{self._rows.name}: id {int(ids.reshape(-1)[position])} at position {position} is out"
            f" of range for a table of {self._dealt.rows} rows ({len(bad)} of {ids.numel()} ids are"
            " out of range); no row was moved"
        )

    def _brought(self, rows: Tensor, asked: Asked) -> Tensor:
        brought: Tensor = _Brought.apply(rows, asked, self._ranks, self._rows.name, self._divisor)  # type: ignore[no-untyped-call]
        return brought


class _Brought(torch.autograd.Function):
    """Rows from their owners, to whom the gradients go."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, asked: Asked, ranks: Ranks, name: str, divisor: int
    ) -> Tensor:
        ctx.asked, ctx.ranks, ctx.name, ctx.divisor = asked, ranks, name, divisor
        return ranks.bring(name, rows, asked)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if ctx.divisor != 1:
            gradient = gradient / ctx.divisor
        return ctx.ranks.give_back(ctx.name, gradient, ctx.asked), None, None, None, None


class _Spread(torch.autograd.Function):
    """Rows by the places that ids name, whose gradients are added up by the plan of the ids."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, batch: PlannedBatch, bags: Bags | None) -> Tensor:
        ctx.batch, ctx.bags = batch, bags
        places = batch.local(0)
        return torch.embedding(rows, places) if bags is None else bags.pool(rows, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return summed(gradient, ctx.batch, 0, ctx.bags), None, None
