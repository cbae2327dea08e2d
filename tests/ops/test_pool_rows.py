"""pool_rows adds up the rows of bags."""

from __future__ import annotations

import pytest
import torch
from conftest import NEEDS_GPU
from reference import assert_same_bytes
from torch import Tensor
from torch.nn.functional import embedding_bag

import speedtorch

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
MODES = pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])


def pool_rows(
    rows: Tensor, places: Tensor, offsets: Tensor, features: int, *, mean: bool = False
) -> Tensor:
    """The reference, row by row in order."""
    exact = rows.to(torch.promote_types(rows.dtype, torch.float32))
    bags = exact.new_zeros(len(offsets) - 1, rows.shape[1])
    for bag, (begin, end) in enumerate(zip(offsets.tolist(), offsets[1:].tolist(), strict=False)):
        for place in places[begin:end].tolist():
            bags[bag] += exact[place]
        if mean and end > begin:
            bags[bag] /= end - begin
    by_sample = bags.view(features, -1, rows.shape[1]).transpose(0, 1)
    return by_sample.reshape(bags.shape).to(rows.dtype)


def bags_of(sizes: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Places among the rows, and offsets of bags of these sizes."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    return torch.randint(rows, (int(offsets[-1]),)), offsets


def called(device: str, *arguments: Tensor | int, mean: bool) -> Tensor:
    """The op, on a device."""
    there = (tensor.to(device) if isinstance(tensor, Tensor) else tensor for tensor in arguments)
    return speedtorch.pool_rows(*there, mean=mean)  # type: ignore[arg-type]


def test_a_small_table(device: str) -> None:
    rows = torch.tensor([[1.0, -1.0], [2.0, 0.0], [4.0, 3.0]])
    arguments = rows, torch.tensor([0, 2, 1, 1]), torch.tensor([0, 2, 2, 3, 4]), 2
    expected = [[5.0, 2.0], [2.0, 0.0], [0.0, 0.0], [2.0, 0.0]]
    assert called(device, *arguments, mean=False).tolist() == expected
    expected[0] = [2.5, 1.0]
    assert called(device, *arguments, mean=True).tolist() == expected


@MODES
@pytest.mark.parametrize("longest", [1, 5, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_reference(device: str, dtype: torch.dtype, longest: int, mean: bool) -> None:
    for features, columns in ((1, 1), (2, 3), (3, 8), (5, 47), (2, 128), (1, 300)):
        rows = torch.randn(30, columns).to(dtype)
        places, offsets = bags_of(torch.randint(longest + 1, (features * 9,)), len(rows))
        expected = pool_rows(rows, places, offsets, features, mean=mean)
        assert_same_bytes(called(device, rows, places, offsets, features, mean=mean), expected)


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_on_the_cpu_it_has_the_bits_of_embedding_bag(dtype: torch.dtype, mean: bool) -> None:
    sizes = torch.tensor([0, 1, 2, 3, 7, 64, 100, 257, 1000, 0])
    for columns in range(1, 301):
        rows = torch.randn(50, columns, dtype=dtype)
        places, offsets = bags_of(sizes, len(rows))
        expected = embedding_bag(places, rows, offsets[:-1], mode="mean" if mean else "sum")
        assert_same_bytes(speedtorch.pool_rows(rows, places, offsets, 1, mean=mean), expected)


@pytest.mark.parametrize(("features", "bags"), [(0, 0), (3, 0), (2, 4)])
def test_nothing_is_legal(device: str, features: int, bags: int) -> None:
    places, offsets = bags_of(torch.zeros(bags, dtype=torch.int64), 5)
    for rows in (torch.ones(5, 3), torch.ones(0, 3), torch.ones(5, 0)):
        actual = called(device, rows, places, offsets, features, mean=True)
        assert actual.shape == (bags, rows.shape[1]) and not actual.any()


@NEEDS_GPU
def test_invalid_places_and_offsets_read_only_within_the_rows() -> None:
    rows, count = torch.ones(7, 40, device="cuda"), 500
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        places, offsets = (
            torch.randint(-(2**62), 2**62, (size,), generator=random) for size in (count, 101)
        )
        places[::2] %= 7
        offsets[::2] %= count
        actual = called("cuda", rows.cpu(), places, offsets, 4, mean=False)
        assert actual.min() >= 0 and actual.max() <= count // 2
    actual = called(
        "cuda", rows.cpu(), torch.tensor([0, 7, -1, 6]), torch.tensor([0, 4]), 1, mean=True
    )
    assert actual.unique().tolist() == [0.5]


@NEEDS_GPU
def test_it_runs_on_the_current_stream() -> None:
    rows = torch.randn(50, 20)
    places, offsets = bags_of(torch.randint(9, (400,)), 50)
    there, on, weight = torch.zeros_like(places).cuda(), offsets.cuda(), rows.cuda()
    pinned, side = places.pin_memory(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        there.copy_(pinned, non_blocking=True)
        pooled = speedtorch.pool_rows(weight, there, on, 4)
    side.synchronize()
    assert_same_bytes(pooled, pool_rows(rows, places, offsets, 4))


@NEEDS_GPU
def test_rows_may_be_wider_than_a_grid_is_high() -> None:
    columns = 65_536 * 32 + 5
    rows = torch.arange(3.0)[:, None] + torch.arange(columns) % 7
    places, offsets = torch.tensor([2, 0, 1]), torch.tensor([0, 2, 3])
    pooled = called("cuda", rows, places, offsets, 1, mean=False)
    assert torch.equal(pooled.cpu(), torch.stack([rows[2] + rows[0], rows[1]]))
