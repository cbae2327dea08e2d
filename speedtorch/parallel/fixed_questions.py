"""FixedQuestion: what ranks ask each other for in blocks of one size, which nobody counts.

Each rank asks each for as many rows as a step may have of it. The first are those that it names;
what fills the block is none, and so are its row and its gradient. With the ids goes word of what is
wrong with them, so that all ranks know of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speedtorch.ops.fitted_batch import BAD_IDS, TOO_MANY, FittedBatch, raises_at_once
from speedtorch.parallel.dealt_rows import DealtRows
from speedtorch.parallel.lookup_turn import LookupTurn
from speedtorch.parallel.ranks import Asked, Ranks, out_of_range
from speedtorch.step.fixed_blocks import OTHER_MODULE, of_ranks
from speedtorch.step.trained_rows import Bags, summed

__all__ = ["FixedQuestion"]


class FixedQuestion:
    """The distinct rows of a lookup, and what ranks ask each other for: at once, as `asked`.

    Args:
        name: of who asks, for errors.
        turn: of the lookup.
        numbers: of the rows, `[...]` as the ids.
        dealt: who owns which rows.
        bounds: where the numbers of each rank begin, and where the last ones end, on the device.
        none: what each rank calls a row that is none: an id of its own rows, never trained.
        capacity: rows that each rank is asked for.
        lookup: its number among those of the table.
        differs: whether ranks ask for rows of other tables now, `[1]`, if that is not known.
    """

    def __init__(
        self,
        name: str,
        turn: LookupTurn,
        numbers: Tensor,
        dealt: DealtRows,
        bounds: Tensor,
        none: int,
        ranks: Ranks,
        capacity: int,
        lookup: int,
        differs: Tensor | None,
    ) -> None:
        device = numbers.device
        self.turn, self.lookup = turn, lookup
        self._name, self._capacity = name, capacity
        self._numbers, self._dealt = numbers, dealt
        count, end, size = numbers.numel(), dealt.room * dealt.ranks, dealt.ranks
        self._batch = FittedBatch([numbers.clamp(min=0)], max(end, 1), device, None, count)
        unique, status = self._batch.parts.plan[0], self._batch.parts.plan[4]
        self._batch.held(unique, status[3:4])
        ends = torch.searchsorted(unique.masked_fill(unique < 0, end), bounds)
        self._begins = ends[:-1]
        entries = self._begins[:, None] + torch.arange(capacity, device=device)
        is_some = entries < ends[1:, None]
        self._entries, self._is_some = entries.flatten(), is_some.flatten()
        fault = (ends.diff() > capacity).any() * TOO_MANY
        fault = torch.where((numbers < 0).any(), BAD_IDS, fault).expand(size)
        rows = torch.where(is_some, self._of_entries(unique).view(size, -1) % dealt.room, -1)
        others = ranks.exchanged(name, torch.cat([rows, fault[:, None]], 1))
        self._faults = others[:, -1]
        self.fault = self._faults.max().view(1)
        """What is wrong on some rank, on the device: `[1]`; 0: nothing."""
        if differs is not None:
            self.fault = torch.maximum(self.fault, differs * OTHER_MODULE)
        blocks = others[:, :-1].flatten()
        every = [capacity] * size
        self.asked = Asked(blocks.masked_fill(blocks < 0, none), every, every)

    def _of_entries(self, values: Tensor) -> Tensor:
        """What the distinct rows have, `[distinct, ...]`, where they are among the blocks."""
        if len(values) == 0:
            return values.new_zeros((len(self._entries), *values.shape[1:]))
        return values.index_select(0, self._entries.clamp(max=len(values) - 1))

    def ask(self, ranks: Ranks, dealt: DealtRows) -> None:
        """As Question.ask; what is found later moves no row."""
        if raises_at_once(self.asked.ids.device) and (fault := int(self.fault)):
            bad = (self._faults == BAD_IDS).nonzero()[:, 0].tolist()
            if bad and fault != OTHER_MODULE:
                raise self.bad_ids() or IndexError(
                    f"{self._name}: an id on ranks {bad} is out of range; no row was moved"
                )
            raise of_ranks(self._name, fault, "nothing has changed")

    def bad_ids(self) -> IndexError | None:
        """The error about ids of this rank that are out of range, if some are."""
        return out_of_range(self._name, self.turn.ids, self._numbers, self._dealt.rows)

    @property
    def places(self) -> Tensor:
        """As Question.places."""
        owners = self._numbers.clamp(min=0).div(self._dealt.room, rounding_mode="floor")
        size = self._dealt.ranks
        begins = torch.arange(size, device=owners.device) * self._capacity - self._begins
        places = self._batch.local(0) + begins[owners]
        return places.clamp_(0, size * self._capacity - 1)  # of ids that are wrong

    def summed(self, gradient: Tensor, bags: Bags | None) -> Tensor:
        """As Question.summed."""
        if self._batch.capacity == 0:
            return gradient.new_zeros((len(self._entries), gradient.shape[-1]))
        sums = self._of_entries(summed(gradient, self._batch, 0, bags))
        return sums.masked_fill_(~self._is_some[:, None], 0)

    def with_padding(self, rows: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """As Question.with_padding."""
        places, is_padding = self.places, self._numbers == number
        row = rows[:1]
        if places.numel():
            row = rows.index_select(0, places.where(is_padding, 0).max().view(1))
        return places.where(~is_padding, len(rows)), torch.cat([rows, row])
