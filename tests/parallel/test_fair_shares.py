"""A fair share of a capacity fits the unique rows of one rank among spread ids."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from speedtorch.parallel.block_cyclic import BlockCyclic
from speedtorch.parallel.fair_shares import FairShares

ROWS = 10_000_000
CAPACITIES = [1, 100, 500, 4096, 100_000, 1 << 20]
RANKS = [1, 2, 3, 8, 64, 1000]


@pytest.mark.parametrize(
    ("capacity", "ranks", "rows", "padded", "share"),
    [
        *((4096, 1, ROWS, False, 4096), (4096, 2, ROWS, False, 2421), (4096, 8, ROWS, False, 704)),
        *((4096, 64, ROWS, False, 139), (1 << 20, 8, ROWS, False, 133_979)),
        *((100, 2, ROWS, False, 100), (100, 8, ROWS, False, 52), (1, 64, ROWS, False, 1)),
        *((4, 8, ROWS, True, 5), (4096, 8, ROWS, True, 705)),  # with the padding row
        *((40, 3, 41, False, 14), (40, 3, 41, True, 14)),  # what a rank owns
    ],
)
def test_a_share_is_the_mean_plus_a_margin_for_chance(
    capacity: int, ranks: int, rows: int, padded: bool, share: int
) -> None:
    assert FairShares(capacity, BlockCyclic.of(rows, ranks), padded=padded).rows == share


@pytest.mark.parametrize("ranks", RANKS)
def test_shares_are_at_most_the_capacity_and_together_at_least(ranks: int) -> None:
    sharding = BlockCyclic.of(ROWS, ranks)
    shares = [FairShares(capacity, sharding).rows for capacity in CAPACITIES]
    assert shares == sorted(shares)
    for capacity, share in zip(CAPACITIES, shares, strict=True):
        assert capacity / ranks <= share <= capacity


@pytest.mark.parametrize("ranks", [ranks for ranks in RANKS if ranks > 1])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_random_ids_exceed_a_share_less_than_once_in_10_to_the_13(
    capacity: int, ranks: int
) -> None:
    """By Chernoff's bound of draws with replacement, which is also valid without replacement."""
    share = FairShares(capacity, BlockCyclic.of(ROWS, ranks)).rows
    if share == capacity:
        return  # no batch of the capacity has more
    seen, chance = (share + 1) / capacity, 1 / ranks
    divergence = seen * math.log(seen / chance)
    if seen < 1:
        divergence += (1 - seen) * math.log((1 - seen) / (1 - chance))
    assert capacity * divergence > 13 * math.log(10)


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("count", [300, 4096, 100_000])
def test_a_lookup_of_spread_ids_fits_the_shares_of_its_unique_rows(count: int, ranks: int) -> None:
    sharding = BlockCyclic.of(ROWS, ranks, 8192)
    random = torch.Generator().manual_seed(count + ranks)
    for _, steep in itertools.product(range(5), (1.0, 4.0)):  # and where some ids are frequent
        ids = (torch.rand(count, generator=random).double() ** steep * ROWS).long()
        numbers = sharding.numbers((ids * 7_368_787 % ROWS).unique())  # a prime
        share = FairShares(len(numbers), sharding).rows
        assert int(torch.bincount(numbers // sharding.stride).max()) <= share


@pytest.mark.parametrize(("capacity", "ranks"), [(400, 2), (400, 3), (4096, 8), (4096, 64)])
def test_the_error_names_the_least_capacity_whose_share_is_enough(
    capacity: int, ranks: int
) -> None:
    sharding = BlockCyclic.of(ROWS, ranks)
    shares = FairShares(capacity, sharding)
    text = str(shares.error("rows", shares.rows + 7, 1))
    enough = int(text.partition("capacity of at least ")[2].rstrip("."))
    assert (
        FairShares(enough, sharding).rows >= shares.rows + 7 > FairShares(enough - 1, sharding).rows
    )
