"""table_ids turns ids of several features into rows of one table."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import NEEDS_GPU
from torch import Tensor

import speedtorch

RANGES = torch.tensor([[0, 10], [10, 5], [15, 1], [16, 0]])


def table_ids(
    ids: Tensor, offsets: Tensor, ranges: Tensor, samples: int
) -> tuple[list[int], list[int]]:
    """The reference, bag by bag."""
    rows, bags = [], []
    for (feature, (first, count)), sample in itertools.product(
        enumerate(ranges.tolist()), range(samples)
    ):
        bag = feature * samples + sample
        for id in ids[offsets[bag] : offsets[bag + 1]].tolist():
            rows.append(first + id if 0 <= id < count else -1)
            bags.append(sample * len(ranges) + feature)
    return rows, bags


def bags_of(sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Ids, of which some are none of their feature, and offsets of bags of these sizes."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    return torch.randint(-2, 12, (int(offsets[-1]),)), offsets


def called(
    device: str, ids: Tensor, offsets: Tensor, ranges: Tensor, samples: int
) -> tuple[list[int], list[int]]:
    """The op, on a device."""
    rows, bags = speedtorch.table_ids(
        ids.to(device), offsets.to(device), ranges.to(device), samples
    )
    assert rows.dtype == bags.dtype == torch.int64 and rows.device.type == device
    return rows.tolist(), bags.tolist()


def test_a_small_table(device: str) -> None:
    ids, offsets = torch.tensor([9, 0, 10, 4, -1, 0]), torch.tensor([0, 2, 2, 3, 3, 6, 6])
    rows, bags = called(device, ids, offsets, torch.tensor([[0, 10], [10, 5]]), 3)
    assert rows == [9, 0, -1, 14, -1, 10]
    assert bags == [0, 0, 4, 3, 3, 3]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("longest", [1, 2, 9, 400])
@pytest.mark.parametrize("samples", [1, 2, 33])
def test_it_is_the_reference(device: str, samples: int, longest: int, dtype: torch.dtype) -> None:
    for features in range(1, len(RANGES) + 1):
        ids, offsets = bags_of(torch.randint(longest + 1, (features * samples,)))
        arguments = ids.to(dtype), offsets, RANGES[:features], samples
        assert called(device, *arguments) == table_ids(*arguments)


@pytest.mark.parametrize(("features", "samples"), [(0, 0), (0, 3), (2, 0), (2, 3)])
def test_nothing_is_legal(device: str, features: int, samples: int) -> None:
    offsets = torch.zeros(features * samples + 1, dtype=torch.int64)
    ids = torch.empty(0, dtype=torch.int32)
    assert called(device, ids, offsets, RANGES[:features], samples) == ([], [])


@NEEDS_GPU
def test_offsets_that_are_none_give_some_bag() -> None:
    ids, samples = torch.zeros(1000, dtype=torch.int64), 50
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        offsets = torch.randint(-(2**62), 2**62, (4 * samples + 1,), generator=random)
        offsets[torch.rand(len(offsets), generator=random) < 0.5] %= 1000
        rows, bags = called("cuda", ids, offsets, RANGES, samples)
        assert set(rows) <= {0, 10, 15, -1}
        assert set(bags) <= set(range(4 * samples))


@NEEDS_GPU
def test_it_runs_on_the_current_stream() -> None:
    ids, offsets = bags_of(torch.randint(9, (400,)))
    there, on, ranges = torch.zeros_like(ids).cuda(), offsets.cuda(), RANGES.cuda()
    pinned, side = ids.pin_memory(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        there.copy_(pinned, non_blocking=True)
        rows, bags = speedtorch.table_ids(there, on, ranges, 100)
    side.synchronize()
    assert (rows.tolist(), bags.tolist()) == table_ids(ids, offsets, RANGES, 100)
