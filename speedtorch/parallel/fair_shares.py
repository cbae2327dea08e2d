"""FairShares: how many rows of each rank a lookup may name, where rows have a capacity.

Ranks ask each other in blocks of a fixed size. Blocks of the whole capacity for each pair of ranks
would carry it once for each rank. Ids that are spread over the table name about as many rows of
each rank, so each block has room for that many, and for what chance adds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple

from speedtorch.parallel.block_cyclic import BlockCyclic

__all__ = ["FairShares", "fair_share"]

_NATS = 32  # a block is too small for spread ids once in e ** 32 = 8e13 times, or less often


def fair_share(capacity: int, dealt: BlockCyclic, *, padded: bool = False) -> int:
    """The most distinct rows of each rank that a lookup of one rank may name.

    Where `padded`, one more: that of padding_idx, which takes no room in a step.

    Of `capacity` distinct rows, drawn at random, a rank owns as many as independent draws would
    give it, or closer to the mean (Hoeffding, 1963). Bernstein's inequality bounds these: they
    exceed `mean + sqrt(2 * mean * t) + t / 3` with a probability of at most `exp(-t)`.
    """
    mean = capacity / dealt.ranks
    most = math.ceil(mean + math.sqrt(2 * mean * _NATS) + _NATS / 3)
    return min(min(most, capacity) + padded, dealt.room)


class FairShares(NamedTuple):
    """Blocks of a fair share for each rank."""

    capacity: int
    dealt: BlockCyclic
    padded: bool
    """Whether there is a padding_idx, whose row is one of a block, too."""
    rows: int
    """Of a block."""

    @classmethod
    def of(cls, capacity: int, dealt: BlockCyclic, *, padded: bool = False) -> FairShares:
        """Those of rows that are dealt out."""
        return cls(capacity, dealt, padded, fair_share(capacity, dealt, padded=padded))

    def exceeded(self, name: str, named: int, owner: int) -> RuntimeError:
        """The error about a lookup that names more rows of a rank than fit."""

        def fit(capacity: int) -> int:
            return fair_share(capacity, self.dealt, padded=self.padded)

        enough = bisect_left(range(self.dealt.rows + 1), named, key=fit)
        padding = ", that of padding_idx included" * self.padded
        return RuntimeError(
            f"{name}: a lookup names {named} distinct rows of rank {owner}, {self.rows} fit, the"
            f" fair share of capacity={self.capacity} on {self.dealt.ranks} ranks{padding}; use"
            f" smaller batches or a larger capacity ({enough} is enough); no row was moved"
        )
