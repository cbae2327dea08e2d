"""plan_rows: the address order of a batch's ids, made once and used by every op."""

from __future__ import annotations

from typing import Any

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


def drawn(count: int) -> list[int]:
    random = torch.Generator().manual_seed(count)
    ids: list[int] = torch.randint(300, (count,), generator=random).tolist()
    return ids


BATCHES: dict[str, tuple[list[int], int]] = {
    "none": ([], 20),
    "none of no rows": ([], 0),
    "one": ([0], 20),
    "equal": ([5, 5, 5], 20),
    "rising": (list(range(20)), 20),
    "falling": (list(range(19, -1, -1)), 20),
    "two": ([19, 0] * 9, 20),
    **{
        f"{count} ids": (drawn(count), 300)
        for count in (31, 32, 33, 255, 256, 257, 1023, 1025, 4097)
    },
    **{
        f"{n} rows": ([n - 1, 0, n // 2, n - 2, n // 2, 1, n - 1, 2**31 - 2], n)
        for n in (2**31 - 1, 2**31, 2**31 + 1, 2**32 + 1, 2**40, 2**63 - 1)
    },
}


@pytest.mark.parametrize(("ids", "rows"), BATCHES.values(), ids=BATCHES)
def test_any_batch(device: str, ids: list[int], rows: int) -> None:
    check(torch.tensor(ids, dtype=torch.int64, device=device), rows)


def test_a_plan_does_not_change_its_ids(device: str) -> None:
    ids = torch.tensor(IDS, device=device)
    speedtorch.plan_rows(ids, 37)
    assert ids.tolist() == IDS


# Plans that do not fit


@pytest.mark.parametrize(
    ("ids", "rows", "error", "message"),
    [
        *(([1, 0, 5], n, (ValueError, IndexError), rf"{n}.*37") for n in (36, 38, 10**12)),
        ([1, 0], 37, ValueError, r"\b2\b.*\b3\b"),
    ],
    ids=["fewer rows", "a row more", "many rows", "fewer ids"],
)
def test_a_plan_of_another_table_or_number_of_ids_is_refused(
    place: Place, ids: list[int], rows: int, error: Any, message: str
) -> None:
    values = random_rows(37, (5,))
    table, index = place.table(values), place.ids([1, 0, 5])
    plan, good = speedtorch.plan_rows(place.ids(ids), rows), speedtorch.plan_rows(index, 37)
    src = place.work(random_rows(3, (5,), seed=1))
    swap = [table], [src], index, [src.clone()], index
    for call in (
        lambda: speedtorch.pinned_gather(table, index, plan=plan),
        lambda: speedtorch.pinned_scatter(table, index, src, plan=plan),
        lambda: speedtorch.optimizer_state_swap(*swap, evict_plan=plan, load_plan=good),
        lambda: speedtorch.optimizer_state_swap(*swap, evict_plan=good, load_plan=plan),
    ):
        with pytest.raises(error, match=rf"(gather|scatter|swap): .*plan.*{message}"):
            call()
            speedtorch.synchronize()
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
