"""FairShares: the maximum number of each rank's rows in a lookup, for rows with a capacity.

Ranks request rows in blocks of a fixed size. Blocks of the whole capacity for each pair of ranks
would multiply the traffic by the number of ranks. Ids that are spread over the table name about
the same number of rows of each rank: a block has this size plus a margin for chance.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import partial
from typing import NamedTuple

from speedtorch.parallel.block_cyclic import BlockCyclic

__all__ = ["FairShares", "fair_share"]

_NATS = 32  # spread ids overflow a block with a probability of at most e ** -32 = 1.3e-14


def fair_share(capacity: int, sharding: BlockCyclic, *, padded: bool = False) -> int:
    """The maximum number of unique rows of each rank that a lookup of one rank may name.

    If `padded`, one more: the row of padding_idx, which does not count against a capacity.

    If `capacity` unique rows are drawn at random, a rank's number of them is at least as close to
    the mean as for independent draws (Hoeffding, 1963). Bernstein's inequality bounds the latter:
    the number exceeds `mean + sqrt(2 * mean * t) + t / 3` with a probability of at most `exp(-t)`.
    """
    mean = capacity / sharding.ranks
    bound = math.ceil(mean + math.sqrt(2 * mean * _NATS) + _NATS / 3)
    return min(min(bound, capacity) + padded, sharding.stride)


class FairShares(NamedTuple):
    """The sizes of the blocks of rows that each rank requests from each rank."""

    capacity: int
    sharding: BlockCyclic
    padded: bool
    """Whether there is a padding_idx, whose row is also in a block."""
    rows: int
    """Rows in a block."""

    @classmethod
    def of(cls, capacity: int, sharding: BlockCyclic, *, padded: bool = False) -> FairShares:
        """The block sizes for this capacity and sharding."""
        return cls(capacity, sharding, padded, fair_share(capacity, sharding, padded=padded))

    def error(self, name: str, named: int, owner: int) -> RuntimeError:
        """The error about a lookup that names more rows of a rank than fit."""
        share_of = partial(fair_share, sharding=self.sharding, padded=self.padded)
        enough = bisect_left(range(self.sharding.rows + 1), named, key=share_of)
        padding = " (with the row of padding_idx)" * self.padded
        return RuntimeError(
            f"{name}: a lookup has {named} unique rows of rank {owner}, but at most"
            f" {self.rows}{padding} are allowed. This is the fair share of capacity={self.capacity}"
            f" on {self.sharding.ranks} ranks. No row was moved. Use smaller batches or a capacity"
            f" of at least {enough}."
        )
