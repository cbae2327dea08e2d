"""ShardedIds: the distinct rows that a lookup names, in the order of the ranks that own them."""

from __future__ import annotations

from torch import Tensor

from speedtorch.ops.functions import _ops
from speedtorch.parallel.block_cyclic import BlockCyclic
from speedtorch.step.trained_rows import Bags, rows_of_ids

__all__ = ["ShardedIds"]


class ShardedIds:
    """The plan of a lookup's ids, and which rows it asks each rank for; csrc/ops/shard_ids.cpp.

    Args:
        ids: `[...]`, on the device.
        dealt: which rank owns which row.
        distances: those of dealt, on the device.
        share: the most rows to ask a rank for, in blocks of so many rows; -1: of any number.

    Attributes:
        numbers: of the rows, `[...]`; of what is no row that after all rows' numbers.
        unique: the distinct numbers, ascending, `[n]`; -1 behind them.
        counts: how many rows this asks each rank for, `[ranks]`; -1 each if an id is out of range.
        sent: the rows, `[n]`; with a share `[ranks, share + 1]`, whose last column says what is
            wrong with the ids, or 0.
        places: which of the rows that are asked for each id names, `[...]`.
        entries: with a share, which of the distinct rows each row of the blocks is; n: none.
    """

    def __init__(self, ids: Tensor, dealt: BlockCyclic, distances: Tensor, share: int = -1) -> None:
        self._dealt, of_rows = dealt, (dealt.rows, dealt.block, dealt.room, dealt.ranks)
        made: list[Tensor] = _ops.shard_ids(ids, distances, *of_rows, share)
        self.numbers, self._plan, self.unique = made[0], made[1:6], made[1]
        self.counts, self.sent = made[6:8]
        blocks = made[8:] or [made[2].view(ids.shape)]
        self.places, self.entries = blocks[0], blocks[-1]

    def summed(self, gradient: Tensor, bags: Bags | None, most: int) -> Tensor:
        """The gradient of a lookup's result, added up for each distinct row: `[most, ...]`.

        Zeros follow them.
        """
        rows, source = rows_of_ids(gradient, bags)
        plan, end = self._plan, self._dealt.room * self._dealt.ranks
        added: Tensor = _ops.sum_rows(rows, list(plan), end + 1, 0, most, source, plan[4][3:4])
        return added

    def out_of_range(self, name: str, ids: Tensor) -> IndexError | None:
        """The error about ids that are no rows, if some are."""
        end, rows = self._dealt.room * self._dealt.ranks, self._dealt.rows
        bad = (self.numbers.reshape(-1) == end).nonzero()[:, 0]
        if len(bad) == 0:
            return None
        position = int(bad[0])
        return IndexError(
            f"{name}: id {int(ids.reshape(-1)[position])} at position {position} is out of range"
            f" for a table of {rows} rows ({len(bad)} of {ids.numel()} ids are out of range); no"
            " row was moved"
        )
