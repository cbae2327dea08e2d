"""FixedQuestion: what ranks ask each other for in blocks of one size, which nobody counts.

Each rank asks each for a fair share of the capacity (fair_shares.py). The first rows are those that
it names; what fills the block is none, and so are its row and its gradient. With the ids goes word
of what is wrong with them, so that all ranks know of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speedtorch.parallel.dealt_rows import DealtRows
from speedtorch.parallel.fair_shares import FairShares
from speedtorch.parallel.lookup_turn import LookupTurn
from speedtorch.parallel.ranks import Asked, Ranks, out_of_range
from speedtorch.plan.fitted_batch import BAD_IDS, FittedBatch, raises_at_once
from speedtorch.step.fixed_blocks import OTHER_MODULE, of_ranks
from speedtorch.step.trained_rows import Bags, summed

__all__ = ["FixedQuestion"]


class FixedQuestion:
    """The distinct rows of a lookup, and what ranks ask each other for: at once, as `asked`.

    Args:
        name: of who asks, for errors.
        turn: of the lookup.
        numbers: of the rows, `[...]` as the ids; of what is no row that after all rows' numbers.
        shares: the blocks of rows that each rank is asked for, on the device.
        none: what each rank calls a row that is none: an id of its own rows, never trained.
        lookup: its number among those of the table.
        differs: whether ranks ask for rows of other tables now, `[1]`, if that is not known.
    """

    def __init__(
        self,
        name: str,
        turn: LookupTurn,
        numbers: Tensor,
        shares: FairShares,
        none: int,
        ranks: Ranks,
        lookup: int,
        differs: Tensor | None,
    ) -> None:
        device, end, size = numbers.device, shares.end, shares.dealt.ranks
        self.turn, self.lookup = turn, lookup
        self._name, self._shares = name, shares
        self._room = max(shares.dealt.room, 1)
        self._numbers = numbers
        self._batch = FittedBatch([self._numbers], end + 1, device, None, numbers.numel())
        unique, status = self._batch.parts.plan[0], self._batch.parts.plan[4]
        self._batch.held(unique, status[3:4])
        # -1, which stands behind the distinct numbers, becomes the largest.
        ends = torch.searchsorted(unique.remainder(end + 2), shares.bounds)
        self._begins, self._counts = ends[:-1], ends.diff()
        entries = ends[:size, None] + shares.columns
        is_none = entries >= ends[1 : size + 1, None]
        self._entries, self._is_none = entries.flatten(), is_none.flatten()
        fault = ((self._counts > shares.limits) * shares.faults).amax().expand(size)
        rows = (self._of_entries(unique).view(size, -1) % self._room).masked_fill_(is_none, -1)
        others = ranks.exchanged(name, torch.cat([rows, fault[:, None]], 1))
        self._faults = others[:, -1]
        self.fault = self._faults.max().view(1)
        """What is wrong on some rank, on the device: `[1]`; 0: nothing."""
        if differs is not None:
            self.fault = torch.maximum(self.fault, differs * OTHER_MODULE)
        blocks = others[:, :-1]
        every = [shares.rows] * size
        self.asked = Asked(blocks.masked_fill(blocks < 0, none).flatten(), every, every)

    def _of_entries(self, values: Tensor) -> Tensor:
        """What the distinct rows have, `[distinct, ...]`, where they are among the blocks."""
        if len(values) == 0:
            return values.new_zeros((len(self._entries), *values.shape[1:]))
        return values.index_select(0, self._entries.clamp(max=len(values) - 1))

    def ask(self, ranks: Ranks, dealt: DealtRows) -> None:
        """As Question.ask; what is found later moves no row."""
        if raises_at_once(self.asked.ids.device) and (fault := int(self.fault)):
            if fault != OTHER_MODULE:
                if (own := self.own_error()) is not None:
                    raise own
                if bad := (self._faults == BAD_IDS).nonzero()[:, 0].tolist():
                    raise IndexError(
                        f"{self._name}: an id on ranks {bad} is out of range; no row was moved"
                    )
            raise of_ranks(self._name, fault, "nothing has changed")

    def own_error(self) -> IndexError | RuntimeError | None:
        """The error about ids of this rank, if they are out of range or name too many rows."""
        shares = self._shares
        numbers = self._numbers.masked_fill(self._numbers == shares.end, -1)
        if (bad := out_of_range(self._name, self.turn.ids, numbers, shares.dealt.rows)) is not None:
            return bad
        named, owner = (int(each) for each in self._counts[:-1].max(0))
        return shares.exceeded(self._name, named, owner) if named > shares.rows else None

    @property
    def places(self) -> Tensor:
        """As Question.places."""
        owners = self._numbers.div(self._room, rounding_mode="floor")
        places = self._batch.parts.local(0) + (self._shares.begins - self._begins)[owners]
        return places.clamp_(0, self._shares.dealt.ranks * self._shares.rows - 1)  # of wrong ids

    def summed(self, gradient: Tensor, bags: Bags | None) -> Tensor:
        """As Question.summed."""
        if self._batch.capacity == 0:
            return gradient.new_zeros((len(self._entries), gradient.shape[-1]))
        sums = self._of_entries(summed(gradient, self._batch, 0, bags))
        return sums.masked_fill_(self._is_none[:, None], 0)

    def with_padding(self, rows: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """As Question.with_padding."""
        places, is_padding = self.places, self._numbers == number
        row = rows[:1]
        if places.numel():
            row = rows.index_select(0, places.where(is_padding, 0).max().view(1))
        return places.where(~is_padding, len(rows)), torch.cat([rows, row])
