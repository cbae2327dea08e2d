"""BlockCyclic: maps each row of a table to a rank; blocks of rows are assigned in a cycle.

An id alone determines the row's owner and its place in the shard. Popular ids are often small and
adjacent. Blocks go to three ranks in the order 0 1 2 2 1 0, so that every rank owns about as many
popular rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = ["BlockCyclic"]

_Rank = TypeVar("_Rank", int, Tensor)

_MOST_BLOCKS = 1024  # blocks of a rank; large tables have at least half as many
# Each block is a chunk of a checkpoint, which costs 1.7 kB and 0.3 ms besides its rows. Blocks of
# small tables therefore have at least _LEAST_ROWS rows, unless a rank would then have fewer than
# about _FEW_BLOCKS blocks.
_LEAST_ROWS, _FEW_BLOCKS = 32, 8


class BlockCyclic(NamedTuple):
    """The rows of a table, sharded among ranks.

    The rows of all shards are numbered in the order of the ranks. The numbers of a rank's rows
    begin at `rank * stride`.
    """

    rows: int
    ranks: int
    block: int
    """Rows in a block; the last block may have fewer."""

    @classmethod
    def of(cls, rows: int, ranks: int, init_rows: int = 1) -> BlockCyclic:
        """Shards rows in blocks of `init_rows` rows, multiplied or divided by a power of two.

        This size seldom splits the blocks of `init_rows` rows that are initialized together.
        """
        block = max(1, init_rows)
        while block * _MOST_BLOCKS * ranks < rows:
            block *= 2
        while block > 1 and (block // 2) * _MOST_BLOCKS * ranks >= rows:
            block //= 2
        while block < min(_LEAST_ROWS, rows // (ranks * _FEW_BLOCKS)):
            block *= 2
        return cls(rows, ranks, block)

    @property
    def cycles(self) -> int:
        """The maximum number of blocks of a rank."""
        return -(-self.rows // (self.block * self.ranks))

    @property
    def stride(self) -> int:
        """The size of each rank's range of numbers."""
        return self.cycles * self.block

    def blocks(self, rank: int) -> Iterator[tuple[range, range]]:
        """A rank's blocks, in order: their rows in the whole table, and in the rank's shard."""
        for cycle in range(self.cycles):
            first = (cycle * self.ranks + self._place_in_cycle(cycle, rank)) * self.block
            if first < self.rows:
                rows = range(first, min(first + self.block, self.rows))
                begin = cycle * self.block
                yield rows, range(begin, begin + len(rows))

    def _place_in_cycle(self, cycle: int, rank: _Rank) -> _Rank:
        return self.ranks - 1 - rank if cycle % 2 else rank

    def distances(self) -> Tensor:
        """The difference of number and id for each block: `[blocks]`, at most 8 kB per rank."""
        block = torch.arange(max(1, -(-self.rows // self.block)))
        cycle, position = block // self.ranks, block % self.ranks
        rank = torch.where(
            cycle % 2 == 0, self._place_in_cycle(0, position), self._place_in_cycle(1, position)
        )
        return rank * self.stride + (cycle - block) * self.block

    def numbers(self, ids: Tensor) -> Tensor:
        """The row numbers of ids, int64 of the same shape; -1 if an id is out of range."""
        ids = ids.to(torch.int64)
        rows = ids.clamp(0, self.rows - 1)
        block = rows.div(self.block, rounding_mode="floor")
        numbers = rows + self.distances().to(ids.device)[block]
        return numbers.masked_fill_(rows != ids, -1)

    def ids(self, rank: int, places: range) -> Tensor:
        """The ids of the rows at these places of a rank's shard: int64 `[n]`."""
        place = torch.arange(places.start, places.stop)
        cycle = place.div(self.block, rounding_mode="floor")
        position = torch.where(
            cycle % 2 == 0, self._place_in_cycle(0, rank), self._place_in_cycle(1, rank)
        )
        return (cycle * self.ranks + position) * self.block + place % self.block
