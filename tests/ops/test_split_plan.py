"""split_plan: the plan of several tables' ids is a plan of each table's."""

from __future__ import annotations

import pytest
import torch
from conftest import NEEDS_GPU
from torch import Tensor

import speedtorch

split_plan = torch.ops.speedtorch.split_plan
# Rows of each table and how many of its ids a batch has.
CASES = {
    "one": ([7], [5]),
    "two": ([7, 3], [20, 4]),
    "no ids in the first and last": ([4, 5, 2], [0, 9, 0]),
    "no rows": ([0, 5, 0, 3], [0, 2, 0, 8]),
    "no ids": ([4, 5], [0, 0]),
    "many": ([k % 13 + 1 for k in range(300)], [k % 29 for k in range(300)]),
    "long": ([100_000, 3, 70_000], [50_000, 1_000, 30_000]),
}


def ranges_of(rows: list[int]) -> Tensor:
    firsts = torch.tensor([0, *rows]).cumsum(0)[:-1]
    return torch.stack([firsts, torch.tensor(rows)], 1)


def ids_of(rows: list[int], counts: list[int]) -> list[Tensor]:
    random = torch.Generator().manual_seed(sum(counts))
    return [
        torch.randint(max(1, r), (n,), generator=random) for r, n in zip(rows, counts, strict=True)
    ]


def begins_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0)


@pytest.mark.parametrize(("rows", "counts"), CASES.values(), ids=CASES)
def test_a_table_has_the_plan_of_its_own_ids(
    device: str, rows: list[int], counts: list[int]
) -> None:
    ids, ranges = ids_of(rows, counts), ranges_of(rows)
    numbers = torch.cat([part + first for part, first in zip(ids, ranges[:, 0], strict=True)])
    plan = speedtorch.plan_rows(numbers.to(device), sum(rows))
    *parts, status, bounds = split_plan(
        plan, begins_of(counts).to(device), ranges.to(device), sum(rows)
    )
    lengths = [counts, counts, counts, [count + 1 for count in counts]]
    split = [part.split(sizes) for part, sizes in zip(parts, lengths, strict=True)]
    distinct = []
    for k, part in enumerate(ids):
        expected = speedtorch.plan_rows(part.to(device), rows[k])
        for mine, theirs in zip(split, expected, strict=False):
            assert mine[k].tolist() == theirs.tolist()
        assert status[k, :6].tolist() == expected[4][:6].tolist()
        distinct.append(int(expected[4][3]))
    assert bounds.tolist() == begins_of(distinct).tolist()


@NEEDS_GPU
def test_bad_ids_are_those_of_every_table() -> None:
    plan = speedtorch.plan_rows(torch.tensor([1, -1, 5, 9], device="cuda"), 9)
    offsets, ranges = torch.tensor([0, 2, 4]).cuda(), torch.tensor([[0, 4], [4, 5]]).cuda()
    *_, status, _ = split_plan(plan, offsets, ranges, 9)
    assert (status[:, 0] > 0).all()
    good = speedtorch.plan_rows(torch.tensor([1, 5], device="cuda"), 10)
    *_, status, _ = split_plan(good, offsets.clamp(max=2), ranges, 9)  # of another table
    assert (status[:, 0] > 0).all()
