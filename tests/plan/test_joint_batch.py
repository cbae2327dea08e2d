"""The batches of several tables, planned as one, are those of each table."""

from __future__ import annotations

import pytest
import torch
from conftest import NEEDS_GPU
from torch import Tensor

import speedtorch
from speedtorch.plan.joint_batch import JointBatch
from speedtorch.plan.planned_batch import BatchIds, PlannedBatch

ROWS = [40, 3, 1000]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]


def some_ids(seed: int, dtype: torch.dtype = torch.int64) -> list[list[Tensor]]:
    random = torch.Generator().manual_seed(seed)
    shapes = [[(6,), (2, 4)], [(5,)], [(0,), (300,)]]
    return [
        [torch.randint(rows, shape, generator=random, dtype=dtype) for shape in of_table]
        for rows, of_table in zip(ROWS, shapes, strict=True)
    ]


def joint(ids: list[list[Tensor]], device: str, after: JointBatch | None = None) -> JointBatch:
    place = torch.device(device)
    parts = [
        BatchIds(each, rows, place, f"table {rows}") for each, rows in zip(ids, ROWS, strict=True)
    ]
    return JointBatch(parts, place, after)


@pytest.mark.parametrize("given", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("device", DEVICES)
def test_the_batch_of_each_table_is_that_of_its_own_ids(device: str, given: str) -> None:
    ids = [[each.to(given) for each in of_table] for of_table in some_ids(1)]
    made = joint(ids, device)
    place = torch.device(device)
    counts = [0]
    assert made.count()
    for batch, of_table, rows in zip(made.split_by_table(), ids, ROWS, strict=True):
        alone = PlannedBatch(of_table, rows, place)
        alone.count()
        batch.count()
        assert batch.held == alone.held
        assert batch.ids.tolist() == alone.ids.tolist() and batch.ids is batch.ids
        for part, each in enumerate(of_table):
            assert batch.parts.part_of(each) == part
            assert batch.parts.local(part).tolist() == alone.parts.local(part).tolist()
            assert batch.parts.local(part).shape == each.shape
            rows_of = torch.rand(each.numel(), 3, device=device)
            summed = [which.summed(rows_of, part, None) for which in (batch, alone)]
            assert torch.equal(*summed)
        counts.append(counts[-1] + alone.held)
    assert made.bounds == counts
    assert len(made.incoming[0]) == counts[-1] and not len(made.outgoing[0])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_arrive_stay_and_leave_after_those_of_the_batch_before(device: str) -> None:
    first = joint(some_ids(1), device)
    second = joint(some_ids(2), device, after=first)
    assert first.following() is second
    assert first.count() and second.count()
    before, now = (each.row_numbers[: each.bounds[-1]].tolist() for each in (first, second))
    stay = sorted(set(before) & set(now))
    assert second.incoming[0].tolist() == sorted(set(now) - set(before))
    assert [now[place] for place in second.incoming[1]] == second.incoming[0].tolist()
    assert second.outgoing[0].tolist() == sorted(set(before) - set(now))
    assert [before[place] for place in second.outgoing[1]] == second.outgoing[0].tolist()
    assert [now[place] for place in second.kept[0]] == stay
    assert [before[place] for place in second.kept[1]] == stay


@NEEDS_GPU
def test_bad_ids_of_one_table_are_found() -> None:
    ids = some_ids(1)
    ids[2][1][7] = 1000
    made = joint([[each.cuda() for each in of_table] for of_table in ids], "cuda")
    assert not made.count()
    speedtorch.synchronize()


def test_bad_ids_are_errors_at_once_where_the_cpu_holds_rows() -> None:
    ids = some_ids(1)
    ids[0][1][1, 2] = -1
    with pytest.raises(IndexError):
        joint(ids, "cpu")


def test_int32_ids_are_planned_too() -> None:
    made = joint(some_ids(3, torch.int32), "cpu")
    expected = joint(some_ids(3), "cpu")
    assert made.count() and expected.count() and made.bounds == expected.bounds
