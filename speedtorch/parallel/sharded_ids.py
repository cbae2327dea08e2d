"""ShardedIds: the unique rows that a lookup names, in the order of the ranks that own them."""

from __future__ import annotations

from torch import Tensor

from speedtorch.ops.functions import _ops
from speedtorch.parallel.block_cyclic import BlockCyclic
from speedtorch.step.trained_rows import Bags, rows_of_ids

__all__ = ["ShardedIds"]


class ShardedIds:
    """The plan of a lookup's ids, and the rows requested from each rank; csrc/ops/shard_ids.cpp.

    Args:
        ids: `[...]`, on the device.
        sharding: Maps each row to its owner.
        distances: sharding.distances(), on the device.
        share: The number of rows in each rank's block, the most to request; -1: no blocks.

    Attributes:
        numbers: The ids' row numbers, `[...]`; an id out of range has the number after all rows.
        unique: The unique numbers, ascending and padded with -1, `[n]`.
        counts: The number of rows requested from each rank, `[ranks]`; all -1 if an id is bad.
        sent: The requested rows, `[n]`; with a share `[ranks, share + 1]`, whose last column is a
            fault code, or 0.
        places: The position of each id's row among the requested rows, `[...]`.
        entries: With a share, the index of each block row among the unique rows; n: no row.
    """

    def __init__(
        self, ids: Tensor, sharding: BlockCyclic, distances: Tensor, share: int = -1
    ) -> None:
        self._sharding = sharding
        of_rows = sharding.rows, sharding.block, sharding.stride, sharding.ranks
        made: list[Tensor] = _ops.shard_ids(ids, distances, *of_rows, share)
        self.numbers, self._plan, self.unique = made[0], made[1:6], made[1]
        self.counts, self.sent = made[6:8]
        blocks = made[8:] or [made[2].view(ids.shape)]
        self.places, self.entries = blocks[0], blocks[-1]

    def summed(self, gradient: Tensor, bags: Bags | None, most: int) -> Tensor:
        """Sums the gradient of a lookup's result for each unique row: `[most, ...]`, then zeros."""
        rows, source = rows_of_ids(gradient, bags)
        plan, end = self._plan, self._sharding.stride * self._sharding.ranks
        sums: Tensor = _ops.sum_rows(rows, list(plan), end + 1, 0, most, source, plan[4][3:4])
        return sums

    def out_of_range(self, name: str, ids: Tensor) -> IndexError | None:
        """The error about ids out of range, if there are any."""
        end, rows = self._sharding.stride * self._sharding.ranks, self._sharding.rows
        bad = (self.numbers.reshape(-1) == end).nonzero()[:, 0]
        if len(bad) == 0:
            return None
        position = int(bad[0])
        return IndexError(
            f"{name}: id {int(ids.reshape(-1)[position])} at position {position} is out of range"
            f" for a table of {rows} rows ({len(bad)} of {ids.numel()} ids are out of range). No"
            " row was moved."
        )
