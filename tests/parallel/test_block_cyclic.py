"""Each row has one owner, and ranks own similar numbers of used rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speedtorch.parallel.block_cyclic import BlockCyclic

SHAPES = [(0, 2, 1), (1, 3, 1), (10, 1, 4), (97, 2, 8), (1000, 3, 1), (5000, 8, 64), (9001, 4, 16)]


@pytest.mark.parametrize(("rows", "ranks", "init_rows"), SHAPES, ids=str)
def test_every_row_has_one_owner_and_a_place_in_its_shard(
    rows: int, ranks: int, init_rows: int
) -> None:
    sharding = BlockCyclic.of(rows, ranks, init_rows)
    numbers = sharding.numbers(torch.arange(rows))
    expected = torch.full((rows,), -1)
    for rank in range(ranks):
        own = 0
        for in_table, in_shard in sharding.blocks(rank):
            expected[in_table.start : in_table.stop] = rank * sharding.stride + torch.tensor(
                in_shard
            )
            assert in_shard.start == own  # a shard has no gaps
            own = in_shard.stop
        assert own <= sharding.stride
    assert torch.equal(numbers, expected)
    for rank in range(ranks):
        for in_table, in_shard in sharding.blocks(rank):
            assert torch.equal(sharding.ids(rank, in_shard), torch.tensor(in_table))
    assert len(numbers.unique()) == rows
    assert bool((expected >= 0).all())  # no row is missing


def test_an_id_out_of_range_has_no_number() -> None:
    sharding = BlockCyclic.of(10, 3)
    ids = torch.tensor([[-1, 0], [10, 9]], dtype=torch.int32)
    numbers = sharding.numbers(ids)
    assert numbers.dtype == torch.int64
    assert (numbers < 0).tolist() == [[True, False], [True, False]]
    assert sharding.numbers(torch.tensor([-(2**63), 2**63 - 1])).tolist() == [-1, -1]


def test_one_id_has_the_same_number_as_in_a_batch() -> None:
    sharding = BlockCyclic.of(1000, 3)
    expected = sharding.numbers(torch.arange(1000)).tolist()
    assert [int(sharding.numbers(torch.tensor(row))) for row in range(1000)] == expected


@pytest.mark.parametrize("init_rows", [1, 8192, 10_485])
@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_a_rank_of_a_large_table_has_512_to_1024_blocks(ranks: int, init_rows: int) -> None:
    for rows in (100_000_000, 123_456_789):
        sharding = BlockCyclic.of(rows, ranks, init_rows)
        blocks = [len(list(sharding.blocks(rank))) for rank in range(ranks)]
        assert 511 <= min(blocks) <= max(blocks) <= 1024
        assert max(blocks) - min(blocks) <= 1


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_of_a_small_table_has_few_blocks_and_its_share_of_rows(ranks: int) -> None:
    sharding = BlockCyclic.of(2000, ranks)
    blocks = [[len(rows) for rows, _ in sharding.blocks(rank)] for rank in range(ranks)]
    assert max(map(len, blocks)) <= 32
    assert 0.8 * 2000 / ranks <= min(map(sum, blocks))


def zipf(rows: int, count: int, exponent: float) -> Tensor:
    """Ids `[count]` that follow a Zipf distribution."""
    random = torch.Generator().manual_seed(0)
    uniform = torch.rand(count, generator=random, dtype=torch.float64)
    power = 1 - exponent
    ranks = ((uniform * (rows**power - 1)) + 1) ** (1 / power)
    return (ranks.long() - 1).clamp_(0, rows - 1)


@pytest.mark.parametrize(("ranks", "most"), [(2, 1.05), (8, 1.1)])
@pytest.mark.parametrize("order", ["popular ids are small", "permuted"])
@pytest.mark.parametrize("exponent", [1.05, 1.2])
def test_ranks_own_similar_numbers_of_unique_rows(
    ranks: int, most: float, order: str, exponent: float
) -> None:
    rows = 10_000_000
    ids = zipf(rows, 1 << 20, exponent).unique()
    if order == "permuted":
        ids = (ids * 7_368_787 + 12_345) % rows  # a permutation, as it is prime
    sharding = BlockCyclic.of(rows, ranks, 8192)
    counts = torch.bincount(sharding.numbers(ids) // sharding.stride, minlength=ranks)
    assert counts.sum() == len(ids)
    assert float(counts.max() / counts.double().mean()) <= most
