"""BlockCyclic: which rank owns which row of a table: blocks of rows, dealt out in turn.

Owner and place follow from the id alone. Popular ids are often small, and neighbours: blocks that
are dealt to and fro, 0 1 2 2 1 0, give every rank as many of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = ["BlockCyclic"]

_Rank = TypeVar("_Rank", int, Tensor)

_MOST_BLOCKS = 1024  # of a rank; from half of them on, if there are so many rows
# A checkpoint has a chunk for each block, which takes 1.7 kB and 0.3 ms besides its rows: blocks of
# small tables have as many rows as this, if a rank has a few of them then.
_LEAST_ROWS, _FEW_BLOCKS = 32, 8


class BlockCyclic(NamedTuple):
    """The rows of a table, dealt out to ranks.

    All rows of all shares are numbered, rank after rank: numbers that ascend are of ranks that
    ascend, and those of a rank begin at `rank * room`.
    """

    rows: int
    ranks: int
    block: int
    """Rows of a block; the last one may have fewer."""

    @classmethod
    def of(cls, rows: int, ranks: int, unit: int = 1) -> BlockCyclic:
        """Deals blocks whose sizes are `unit` times or divided by a power of two.

        So blocks of rows that are made together, of `unit` rows, are seldom cut.
        """
        block = max(1, unit)
        while block * _MOST_BLOCKS * ranks < rows:
            block *= 2
        while block > 1 and (block // 2) * _MOST_BLOCKS * ranks >= rows:
            block //= 2
        while block < min(_LEAST_ROWS, rows // (ranks * _FEW_BLOCKS)):
            block *= 2
        return cls(rows, ranks, block)

    @property
    def rounds(self) -> int:
        """Blocks of a rank, at most."""
        return -(-self.rows // (self.block * self.ranks))

    @property
    def room(self) -> int:
        """Numbers of a rank."""
        return self.rounds * self.block

    def blocks(self, rank: int) -> Iterator[tuple[range, range]]:
        """Those of a rank, in order: their rows in the whole table, and in the rank's share."""
        for turn in range(self.rounds):
            first = (turn * self.ranks + self._seat(turn, rank)) * self.block
            if first < self.rows:
                rows = range(first, min(first + self.block, self.rows))
                begin = turn * self.block
                yield rows, range(begin, begin + len(rows))

    def _seat(self, turn: int, rank: _Rank) -> _Rank:
        return self.ranks - 1 - rank if turn % 2 else rank

    def distances(self) -> Tensor:
        """From the ids of each block to their numbers: `[blocks]`, 8 kB for each rank at most."""
        block = torch.arange(max(1, -(-self.rows // self.block)))
        turn, seat = block // self.ranks, block % self.ranks
        rank = torch.where(turn % 2 == 0, self._seat(0, seat), self._seat(1, seat))
        return rank * self.room + (turn - block) * self.block

    def numbers(self, ids: Tensor) -> Tensor:
        """The numbers of rows by their ids, int64 of the same shape; -1 of what is no row."""
        ids = ids.to(torch.int64)
        rows = ids.clamp(0, self.rows - 1)
        block = rows.div(self.block, rounding_mode="floor")
        numbers = rows + self.distances().to(ids.device)[block]
        return numbers.masked_fill_(rows != ids, -1)

    def ids(self, rank: int, places: range) -> Tensor:
        """The ids of rows by their places in a rank's share: int64 `[n]`."""
        place = torch.arange(places.start, places.stop)
        turn = place.div(self.block, rounding_mode="floor")
        seat = torch.where(turn % 2 == 0, self._seat(0, rank), self._seat(1, rank))
        return (turn * self.ranks + seat) * self.block + place % self.block
