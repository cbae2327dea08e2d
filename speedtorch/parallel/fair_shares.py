"""FairShares: the maximum of each rank's rows in a training lookup, for rows with a capacity.

Ranks request rows in blocks of a fixed size. Blocks of the whole capacity for each pair of ranks
would multiply the traffic by the number of ranks. Ids that are spread over the table name about
the same number of rows of each rank: a block has this size plus a margin for chance.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple

from speedtorch.parallel.block_cyclic import BlockCyclic

__all__ = ["FairShares"]

_NATS = 32  # spread ids overflow a block with a probability of at most e ** -32 = 1.3e-14


class FairShares(NamedTuple):
    """The sizes of the blocks of rows that each rank requests from each rank."""

    capacity: int
    sharding: BlockCyclic
    padded: bool = False
    """Whether there is a padding_idx, whose row is also in a block."""

    @property
    def rows(self) -> int:
        """The maximum number of unique rows of each rank that one rank's lookup may name.

        A padding_idx adds one row, because its row does not count against a capacity.

        If `capacity` unique rows are drawn at random, the number of a rank's rows among them obeys
        the same tail bounds as for independent draws (Hoeffding, 1963). By Bernstein's inequality,
        this number exceeds `mean + sqrt(2 * mean * t) + t / 3` with a probability of at most
        `exp(-t)`.
        """
        mean = self.capacity / self.sharding.ranks
        bound = math.ceil(mean + math.sqrt(2 * mean * _NATS) + _NATS / 3)
        return min(min(bound, self.capacity) + self.padded, self.sharding.stride)

    def error(self, name: str, named: int, owner: int) -> RuntimeError:
        """The error about a lookup that names more rows of a rank than fit."""
        capacities = range(self.sharding.rows + 1)
        enough = bisect_left(capacities, named, key=lambda rows: self._replace(capacity=rows).rows)
        padding = " (with the row of padding_idx)" * self.padded
        return RuntimeError(
            f"{name}: a lookup has {named} unique rows of rank {owner}, but at most"
            f" {self.rows}{padding} are allowed. This is the fair share of capacity={self.capacity}"
            f" on {self.sharding.ranks} ranks. No row was moved. Use smaller batches or a capacity"
            f" of at least {enough}."
        )
