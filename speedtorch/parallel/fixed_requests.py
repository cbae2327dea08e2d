"""FixedRequest: what ranks ask each other for in blocks of one size, without counts.

Each rank asks each for a fair share of the capacity (fair_shares.py). The first rows are those that
it names; what fills the block is none, and so are its row and its gradient. With the ids goes word
of what is wrong with them, so that all ranks know of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speedtorch.ops.functions import _ops
from speedtorch.parallel.block_cyclic import BlockCyclic
from speedtorch.parallel.fair_shares import FairShares
from speedtorch.parallel.lookup_turn import LookupTurn
from speedtorch.parallel.ranks import Asked, Ranks
from speedtorch.parallel.sharded_ids import ShardedIds
from speedtorch.plan.fixed_size_batch import BAD_IDS, raises_at_once
from speedtorch.step.fixed_blocks import OTHER_MODULE, of_ranks
from speedtorch.step.trained_rows import Bags

__all__ = ["FixedRequest"]


class FixedRequest:
    """The distinct rows of a lookup, and what ranks ask each other for: at once, as `asked`.

    Args:
        name: what errors call the module.
        turn: of the lookup.
        ids: of the lookup, in blocks of a share.
        shares: the blocks of rows that each rank is asked for.
        none: the id that stands for no row in a block: one of each rank's own, never trained.
        lookup: its number among those of the table.
        differs: whether ranks look up different tables now, `[1]`; None: they do not.
    """

    fault: Tensor
    """What is wrong on some rank, on the device: `[1]`; 0: nothing."""

    def __init__(
        self,
        name: str,
        turn: LookupTurn,
        ids: ShardedIds,
        shares: FairShares,
        none: int,
        ranks: Ranks,
        lookup: int,
        differs: Tensor | None,
    ) -> None:
        self.turn, self.lookup = turn, lookup
        self._name, self._ids, self._shares = name, ids, shares
        self._told = ranks.exchanged(name, ids.sent)
        asked, self.fault = _ops.requested_ids(self._told, none, differs)
        every = [shares.rows] * shares.dealt.ranks
        self.asked = Asked(asked, every, every)

    def ask(self, ranks: Ranks, dealt: BlockCyclic) -> None:
        """As Request.ask; what is found later moves no row."""
        if raises_at_once(self.asked.ids.device) and (fault := int(self.fault)):
            if fault != OTHER_MODULE:
                if (own := self.own_error()) is not None:
                    raise own
                if bad := (self._told[:, -1] == BAD_IDS).nonzero()[:, 0].tolist():
                    raise IndexError(
                        f"{self._name}: an id on ranks {bad} is out of range, or no integer; no"
                        " row was moved"
                    )
            raise of_ranks(self._name, fault, "nothing has changed")

    def own_error(self) -> IndexError | RuntimeError | None:
        """The error about ids of this rank, if they are out of range or name too many rows."""
        if (bad := self._ids.out_of_range(self._name, self.turn.ids)) is not None:
            return bad
        shares = self._shares
        named, owner = (int(each) for each in self._ids.counts.max(0))
        return shares.exceeded(self._name, named, owner) if named > shares.rows else None

    @property
    def places(self) -> Tensor:
        """As Request.places."""
        return self._ids.places

    def summed(self, gradient: Tensor, bags: Bags | None) -> Tensor:
        """As Request.summed."""
        # The row behind those of all ids is zeros: the gradient of a row that is none.
        most = self._ids.numbers.numel() + 1
        return self._ids.summed(gradient, bags, most).index_select(0, self._ids.entries)

    def with_padding(self, rows: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """As Request.with_padding."""
        places, is_padding = self.places, self._ids.numbers == number
        row = rows[:1]
        if places.numel():
            row = rows.index_select(0, places.where(is_padding, 0).max().view(1))
        return places.where(~is_padding, len(rows)), torch.cat([rows, row])
