"""sum_rows adds up the rows of each id of a batch."""

from __future__ import annotations

import pytest
import torch
from conftest import NEEDS_GPU
from reference import assert_same_bytes
from torch import Tensor

import speedtorch

ROWS = 1000
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def summed(rows: Tensor, index: Tensor) -> Tensor:
    """The reference in float64, id by id in rising order."""
    return torch.stack([rows[index == id].double().sum(0) for id in index.unique()])


def ids_of(kind: str, count: int) -> Tensor:
    random = torch.Generator().manual_seed(count)
    if kind == "one":
        return torch.full((count,), 7)
    if kind == "distinct":
        return torch.randperm(ROWS, generator=random)[:count]
    ids = torch.randint(ROWS, (count,), generator=random)
    return ids.where(torch.rand(count, generator=random) < 0.5, 3)  # half of them are one row


@pytest.mark.parametrize("kind", ["one", "distinct", "half"])
@pytest.mark.parametrize("count", [1, 5, 31, 32, 33, 64, 300, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_numbers_are_added_up_exactly(
    device: str, dtype: torch.dtype, count: int, kind: str
) -> None:
    index = ids_of(kind, count)
    for columns in (1, 3, 8, 47, 128, 300):
        rows = torch.randint(-2, 3, (count, columns)).to(dtype)
        expected = summed(rows, index)
        plan = speedtorch.plan_rows(index.to(device), ROWS)
        given = len(expected) if columns % 2 else None
        actual = speedtorch.sum_rows(rows.to(device), plan, ROWS, distinct=given)
        assert_same_bytes(actual.double(), expected)


def test_ids_outside_of_a_part_count_as_zeros(device: str) -> None:
    index = ids_of("half", 700)
    rows = torch.randint(-5, 6, (700, 6)).float()
    plan = speedtorch.plan_rows(index.to(device), ROWS)
    for begin, end in ((0, 700), (0, 1), (100, 500), (699, 700), (300, 300)):
        expected = rows.clone()
        expected[:begin] = 0
        expected[end:] = 0
        part = rows[begin:end].to(device)
        actual = speedtorch.sum_rows(part, plan, ROWS, begin=begin)
        assert_same_bytes(actual.double(), summed(expected, index))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_any_stride_give_the_bits_of_contiguous_ones(
    device: str, dtype: torch.dtype
) -> None:
    index = ids_of("half", 700)
    plan = speedtorch.plan_rows(index.to(device), ROWS)
    wide = torch.randn(700, 3, 130).to(device, dtype)
    bags = torch.randint(700, (700,), device=device)
    # Parts of columns, some of which begin at no multiple of 16 bytes, and rows that are one.
    parts = [
        wide[:, 1, :64],
        wide[:, 2, 3:50],
        wide[:, 0, :8].view(700, 2, 4),
        wide[:1, 0].expand(700, -1),
    ]
    for rows in [*parts, wide[:, 0, 128:], wide[:, 1, :0]]:
        for source in (None, bags):
            expected = speedtorch.sum_rows(rows.contiguous(), plan, ROWS, source=source)
            assert_same_bytes(speedtorch.sum_rows(rows, plan, ROWS, source=source), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_numbers_are_added_up_closely_and_always_alike(device: str, dtype: torch.dtype) -> None:
    index = ids_of("half", 5000)
    rows = torch.randn(5000, 20).to(dtype)
    plan = speedtorch.plan_rows(index.to(device), ROWS)
    first = speedtorch.sum_rows(rows.to(device), plan, ROWS)
    torch.testing.assert_close(first.cpu(), summed(rows, index).to(dtype), rtol=1e-2, atol=1e-2)
    for _ in range(3):
        assert_same_bytes(speedtorch.sum_rows(rows.to(device), plan, ROWS), first)


def test_on_the_cpu_the_order_is_that_of_the_ids() -> None:
    index = ids_of("half", 500)
    rows = torch.randn(500, 4)
    plan = speedtorch.plan_rows(index, ROWS)
    places = index.unique(return_inverse=True)[1]
    expected = torch.zeros(len(index.unique()), 4).index_add_(0, places, rows)
    assert_same_bytes(speedtorch.sum_rows(rows, plan, ROWS), expected)


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ids_have_the_rows_of_their_sources(device: str, dtype: torch.dtype, count: int) -> None:
    index = ids_of("half", count)
    plan = speedtorch.plan_rows(index.to(device), ROWS)
    for columns, bags in ((1, 1), (3, 40), (128, 7), (47, 2000)):
        rows = torch.randint(-2, 3, (bags, columns)).to(dtype)
        source = torch.randint(bags, (count,))
        actual = speedtorch.sum_rows(rows.to(device), plan, ROWS, source=source.to(device))
        assert_same_bytes(actual, summed(rows[source], index).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_source_has_the_bits_of_the_copied_rows(device: str, dtype: torch.dtype) -> None:
    plan = speedtorch.plan_rows(ids_of("half", 5000).to(device), ROWS)
    rows = torch.randn(300, 20).to(device, dtype)
    source = torch.randint(300, (2000,), device=device)
    expected = speedtorch.sum_rows(rows[source], plan, ROWS, begin=700)
    assert_same_bytes(speedtorch.sum_rows(rows, plan, ROWS, begin=700, source=source), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_ids_sum_does_not_depend_on_the_rest_of_the_batch(
    device: str, dtype: torch.dtype
) -> None:
    hot, columns = 500, 20
    for count in (1, 31, 32, 33, 64, 65, 1000, 3000):
        rows = torch.randn(count, columns).to(device, dtype)
        plan = speedtorch.plan_rows(torch.full((count,), hot, device=device), ROWS)
        alone = speedtorch.sum_rows(rows, plan, ROWS)
        for more in (1, 17, 32, 700):
            index = torch.randint(ROWS, (count + more,))
            index[index == hot] = 0
            at = torch.randperm(count + more)[:count].sort().values
            index[at] = hot
            among = torch.randn(count + more, columns).to(device, dtype)
            among[at.to(device)] = rows
            plan = speedtorch.plan_rows(index.to(device), ROWS)
            actual = speedtorch.sum_rows(among, plan, ROWS)
            assert_same_bytes(actual[index.unique() == hot], alone)


@NEEDS_GPU
def test_a_source_that_is_none_of_the_rows_counts_as_zeros_on_a_gpu() -> None:
    plan = speedtorch.plan_rows(torch.tensor([1, 2, 1, 3], device="cuda"), ROWS)
    source = torch.tensor([0, 2, 1, -1], device="cuda")
    actual = speedtorch.sum_rows(torch.ones(2, 3, device="cuda"), plan, ROWS, source=source)
    assert actual.tolist() == [[2.0] * 3, [0.0] * 3, [0.0] * 3]
    none = speedtorch.sum_rows(torch.ones(0, 3, device="cuda"), plan, ROWS, source=source)
    assert not none.any()


def test_empty_batches_and_rows_are_legal(device: str) -> None:
    plan = speedtorch.plan_rows(torch.empty(0, dtype=torch.int64, device=device), ROWS)
    assert speedtorch.sum_rows(torch.empty(0, 3, device=device), plan, ROWS).shape == (0, 3)
    plan = speedtorch.plan_rows(torch.tensor([1, 1], device=device), ROWS)
    assert speedtorch.sum_rows(torch.empty(2, 0, device=device), plan, ROWS).shape == (1, 0)
    none = torch.empty(0, dtype=torch.int64, device=device)
    rows = torch.ones(5, 3, device=device)
    assert not speedtorch.sum_rows(rows, plan, ROWS, source=none).any()


@pytest.mark.parametrize("capacity", [3, 4, 700])
def test_so_many_sums_as_the_device_says_are_followed_by_zeros(device: str, capacity: int) -> None:
    index = torch.tensor([7, 2, 7, 9, 2])
    rows = torch.randint(-5, 6, (5, 6)).float()
    plan = speedtorch.plan_rows(index.to(device), ROWS)
    named = torch.tensor([3], device=device)

    def counted(
        rows: Tensor, plan: list[Tensor], named: Tensor, source: Tensor | None = None
    ) -> Tensor:
        made: Tensor = torch.ops.speedtorch.sum_rows(rows, plan, ROWS, 0, capacity, source, named)
        return made

    actual = counted(rows.to(device), plan, named)
    assert actual.shape == (capacity, 6)
    assert_same_bytes(actual[:3].double(), summed(rows, index))
    assert not actual[3:].any()
    bags, source = rows[:2], torch.tensor([0, 1, 1, 0, 1])
    actual = counted(bags.to(device), plan, named, source.to(device))
    assert_same_bytes(actual[:3].double(), summed(bags[source], index))
    none = torch.zeros_like(named)
    assert not counted(rows.to(device), plan, none).any()
    empty = speedtorch.plan_rows(index[:0].to(device), ROWS)
    assert not counted(rows[:0].to(device), empty, none).any()


@NEEDS_GPU
def test_counted_sums_of_a_bad_plan_are_zeros_without_a_word() -> None:
    plan = speedtorch.plan_rows(torch.tensor([7, ROWS], device="cuda"), ROWS)
    named = torch.tensor([1], device="cuda")
    rows = torch.ones(2, 3, device="cuda")
    assert not torch.ops.speedtorch.sum_rows(rows, plan, ROWS, 0, 4, None, named).any()
    speedtorch.synchronize()


@NEEDS_GPU
@pytest.mark.parametrize("columns", [65_535 * 32 + 1, 2 * 65_536 * 32 + 7])
def test_rows_may_be_wider_than_a_grid_is_high(columns: int) -> None:
    ids = torch.tensor([1, 0, 1, 1])
    rows = torch.arange(4.0)[:, None] + torch.arange(columns) % 7
    plan = speedtorch.plan_rows(ids.cuda(), 2)
    summed = speedtorch.sum_rows(rows.cuda(), plan, 2)
    expected = torch.stack([rows[1], rows[0] + rows[2] + rows[3]])
    assert torch.equal(summed[:2].cpu(), expected)
