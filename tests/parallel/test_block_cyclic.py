"""Rows are dealt out so that each has one owner, and every rank as many of those that are used."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speedtorch.parallel.block_cyclic import BlockCyclic

SHAPES = [(0, 2, 1), (1, 3, 1), (10, 1, 4), (97, 2, 8), (1000, 3, 1), (5000, 8, 64), (9001, 4, 16)]


@pytest.mark.parametrize(("rows", "ranks", "unit"), SHAPES, ids=str)
def test_every_row_has_one_owner_and_a_place_there(rows: int, ranks: int, unit: int) -> None:
    dealt = BlockCyclic.of(rows, ranks, unit)
    numbers = dealt.numbers(torch.arange(rows))
    expected = torch.full((rows,), -1)
    for rank in range(ranks):
        own = 0
        for there, here in dealt.blocks(rank):
            expected[there.start : there.stop] = rank * dealt.stride + torch.tensor(here)
            assert here.start == own  # a share has no gaps
            own = here.stop
        assert own <= dealt.stride
    assert torch.equal(numbers, expected)
    for rank in range(ranks):
        for there, here in dealt.blocks(rank):
            assert torch.equal(dealt.ids(rank, here), torch.tensor(there))
    assert len(numbers.unique()) == rows
    assert bool((expected >= 0).all())  # none was left out


def test_an_id_that_is_no_row_has_no_number() -> None:
    dealt = BlockCyclic.of(10, 3)
    ids = torch.tensor([[-1, 0], [10, 9]], dtype=torch.int32)
    numbers = dealt.numbers(ids)
    assert numbers.dtype == torch.int64
    assert (numbers < 0).tolist() == [[True, False], [True, False]]
    assert dealt.numbers(torch.tensor([-(2**63), 2**63 - 1])).tolist() == [-1, -1]


def test_one_id_has_the_number_that_it_has_among_others() -> None:
    dealt = BlockCyclic.of(1000, 3)
    expected = dealt.numbers(torch.arange(1000)).tolist()
    assert [int(dealt.numbers(torch.tensor(row))) for row in range(1000)] == expected


@pytest.mark.parametrize("unit", [1, 8192, 10_485])
@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_a_rank_of_a_large_table_has_512_to_1024_blocks(ranks: int, unit: int) -> None:
    for rows in (100_000_000, 123_456_789):
        dealt = BlockCyclic.of(rows, ranks, unit)
        blocks = [len(list(dealt.blocks(rank))) for rank in range(ranks)]
        assert 511 <= min(blocks) <= max(blocks) <= 1024
        assert max(blocks) - min(blocks) <= 1


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_of_a_small_table_has_few_blocks_and_its_share_of_rows(ranks: int) -> None:
    dealt = BlockCyclic.of(2000, ranks)
    blocks = [[len(there) for there, _ in dealt.blocks(rank)] for rank in range(ranks)]
    assert max(map(len, blocks)) <= 32
    assert 0.8 * 2000 / ranks <= min(map(sum, blocks))


def zipf(rows: int, count: int, exponent: float) -> Tensor:
    random = torch.Generator().manual_seed(0)
    uniform = torch.rand(count, generator=random, dtype=torch.float64)
    power = 1 - exponent
    ranks = ((uniform * (rows**power - 1)) + 1) ** (1 / power)
    return (ranks.long() - 1).clamp_(0, rows - 1)


@pytest.mark.parametrize(("ranks", "most"), [(2, 1.05), (8, 1.1)])
@pytest.mark.parametrize("order", ["popular ids are small", "permuted"])
@pytest.mark.parametrize("exponent", [1.05, 1.2])
def test_no_rank_has_many_more_distinct_rows_than_others(
    ranks: int, most: float, order: str, exponent: float
) -> None:
    rows = 10_000_000
    ids = zipf(rows, 1 << 20, exponent).unique()
    if order == "permuted":
        ids = (ids * 7_368_787 + 12_345) % rows  # a permutation, as it is prime
    dealt = BlockCyclic.of(rows, ranks, 8192)
    counts = torch.bincount(dealt.numbers(ids) // dealt.stride, minlength=ranks)
    assert counts.sum() == len(ids)
    assert float(counts.max() / counts.double().mean()) <= most
