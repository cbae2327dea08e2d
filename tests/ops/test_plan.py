"""plan_rows: the address order of a batch's ids, made once and used by every op."""

from __future__ import annotations

import pytest
import reference
import torch
from conftest import Place
from reference import dtype_name, random_rows
from test_pinned_gather import IDS, INDEX_LAYOUTS
from torch import Tensor

import speedtorch


def check(index: Tensor, rows: int) -> None:
    """The plan is the reference's, in the entries that mean something."""
    plan = speedtorch.plan_rows(index, rows)
    speedtorch.synchronize()
    unique, inverse, order, offsets, status = reference.plan_rows(index.cpu(), rows)
    count, distinct = index.numel(), unique.numel()
    assert all(part.dtype == torch.int64 and part.device == index.device for part in plan)
    assert [list(part.shape) for part in plan] == [[count]] * 3 + [[count + 1], [8]]
    assert plan[0][:distinct].tolist() == unique.tolist()
    assert plan[1].tolist() == inverse.tolist()
    assert plan[2].tolist() == order.tolist()
    assert plan[3].tolist() == offsets.tolist()
    known = [0, 1, 3, 4, 5, 6] if distinct == count else [0, 1, 3, 4, 5, 6, 7]
    assert plan[4][known].tolist() == status[known].tolist()


def test_equal_ids_become_neighbours_in_index_order(device: str) -> None:
    plan = speedtorch.plan_rows(torch.tensor([7, 2, 7, 9], device=device), 10)
    unique, inverse, order, offsets, status = (part.tolist() for part in plan)
    assert unique[:3] == [2, 7, 9]
    assert inverse == [1, 0, 1, 2]
    assert order == [1, 0, 2, 3]
    assert offsets == [0, 1, 3, 4, 4]
    assert (status[:2], status[3:]) == ([0, 4], [3, 10, 4, 2, 7])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=dtype_name)
@pytest.mark.parametrize("layout", INDEX_LAYOUTS)
def test_ids_may_have_any_shape_and_strides(device: str, layout: str, dtype: torch.dtype) -> None:
    check(INDEX_LAYOUTS[layout](torch.tensor(IDS, dtype=dtype, device=device)), 37)


@pytest.mark.parametrize(
    "ids",
    [[], [0], [5, 5, 5], list(range(20)), list(range(19, -1, -1)), [19, 0] * 9],
    ids=["none", "one", "equal", "rising", "falling", "two"],
)
def test_any_order_of_ids(device: str, ids: list[int]) -> None:
    check(torch.tensor(ids, dtype=torch.int64, device=device), 20)


def test_no_ids_of_no_rows(device: str) -> None:
    check(torch.tensor([], dtype=torch.int64, device=device), 0)


@pytest.mark.parametrize("count", [31, 32, 33, 255, 256, 257, 1023, 1025, 4097])
def test_any_number_of_ids(device: str, count: int) -> None:
    ids = torch.randint(0, 300, (count,), generator=torch.Generator().manual_seed(count))
    check(ids.to(device), 300)


@pytest.mark.parametrize("rows", [2**31 - 1, 2**31, 2**31 + 1, 2**32 + 1, 2**40, 2**63 - 1])
def test_ids_beyond_32_bits(device: str, rows: int) -> None:
    ids = [rows - 1, 0, rows // 2, rows - 2, rows // 2, 1, rows - 1, 2**31 - 2]
    check(torch.tensor(ids, device=device), rows)


def test_many_ids_keep_their_order(device: str) -> None:
    count = 300_007
    ids = torch.randint(0, 9000, (count,), generator=torch.Generator().manual_seed(6)) * 10**9
    plan = speedtorch.plan_rows(ids.to(device), 9000 * 10**9)
    unique, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    distinct = unique.numel()
    assert torch.equal(plan[0][:distinct].cpu(), unique)
    assert torch.equal(plan[1].cpu(), inverse)
    assert torch.equal(plan[2].cpu(), torch.sort(ids, stable=True).indices)
    assert torch.equal(
        plan[3][: distinct + 1].cpu(), torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    )
    assert plan[3][distinct:].eq(count).all()
    assert plan[4][:6].cpu()[[0, 1, 3, 4, 5]].tolist() == [0, count, distinct, 9000 * 10**9, count]


def test_a_plan_does_not_change_its_ids(device: str) -> None:
    ids = torch.tensor(IDS, device=device)
    speedtorch.plan_rows(ids, 37)
    assert ids.tolist() == IDS


# Plans that do not fit


@pytest.mark.parametrize("rows", [36, 38, 10**12])
def test_a_plan_of_another_table_is_refused(place: Place, rows: int) -> None:
    values = random_rows(37, (5,))
    table, index = place.table(values), place.ids([1, 0, 5])
    plan = speedtorch.plan_rows(index, rows)
    rows_to_write = place.work(random_rows(3, (5,), seed=1))
    with pytest.raises((ValueError, IndexError), match=rf"pinned_gather: .*plan.*{rows}.*37"):
        speedtorch.pinned_gather(table, index, plan=plan)
        speedtorch.synchronize()
    with pytest.raises((ValueError, IndexError), match=rf"pinned_scatter: .*plan.*{rows}.*37"):
        speedtorch.pinned_scatter(table, index, rows_to_write, plan=plan)
        speedtorch.synchronize()
    good = speedtorch.plan_rows(index, 37)
    for plans in ((plan, good), (good, plan)):
        swap = [table], [rows_to_write], index, [rows_to_write.clone()], index
        with pytest.raises((ValueError, IndexError), match=rf"_swap: .*plan.*{rows}.*37"):
            speedtorch.optimizer_state_swap(*swap, evict_plan=plans[0], load_plan=plans[1])
            speedtorch.synchronize()
    reference.assert_same_storage(table, values)


def test_a_plan_of_another_number_of_ids_is_refused(place: Place) -> None:
    values = random_rows(37, (5,))
    table, index = place.table(values), place.ids([1, 0, 5])
    plan = speedtorch.plan_rows(place.ids([1, 0]), 37)
    src = place.work(random_rows(3, (5,), seed=1))
    with pytest.raises(ValueError, match=r"pinned_gather: .*plan.*\b2\b.*\b3\b"):
        speedtorch.pinned_gather(table, index, plan=plan)
    with pytest.raises(ValueError, match=r"pinned_scatter: .*plan.*\b2\b.*\b3\b"):
        speedtorch.pinned_scatter(table, index, src, plan=plan)
    with pytest.raises(ValueError, match=r"optimizer_state_swap: .*plan.*\b2\b.*\b3\b"):
        speedtorch.optimizer_state_swap(
            [table], [src], index, [src.clone()], index, evict_plan=plan, load_plan=plan
        )
    reference.assert_same_storage(table, values)


@pytest.mark.parametrize("name", ["evict_plan", "load_plan"])
def test_one_plan_of_two_is_enough(place: Place, name: str) -> None:
    values, rows = random_rows(37, (5,)), random_rows(3, (5,), seed=1)
    table, index, load = place.table(values), place.ids([1, 0, 5]), place.ids([5, 7, 8])
    arriving = place.work(torch.zeros(3, 5))
    plan = {name: speedtorch.plan_rows(index if name == "evict_plan" else load, 37)}
    speedtorch.optimizer_state_swap([table], [place.work(rows)], index, [arriving], load, **plan)
    speedtorch.synchronize()
    reference.assert_same_bytes(arriving, torch.stack([rows[2], values[7], values[8]]))
