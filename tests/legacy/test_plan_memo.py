"""One plan per batch: made once for a batch's ids, and never used for others.

Plans pay on a GPU only. Most tests have them made on the CPU, where every op takes them as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from model_families import ROWS, WIDTH, filled, layer, table_rows
from plan_memos import CPU, Made, always, check, made, memo, planning
from reference import assert_same_bytes, random_rows

import speedtorch
from speedtorch import HostTable, ModelFactory
from speedtorch.legacy import plan_memo
from speedtorch.legacy.plan_memo import PlanMemo, plans_of, plans_pay

__all__ = ["made", "memo", "planning"]


# Ids from the CPU


FORMS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "array": lambda: (np.array([7, 2, 7]), None),
    "list": lambda: ([7, 2, 7], None),
    "tensor": lambda: (torch.tensor([[7], [2], [7]]), None),
    "strided": lambda: (torch.tensor([7, 0, 2, 0, 7, 0])[::2], None),
    "uint8": lambda: (np.array([7, 2, 7], np.uint8), None),
    "negatives": lambda: ([7], np.array([[2, 7]])),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_the_same_ids_in_any_form_share_a_plan(memo: PlanMemo, made: Made, form: Any) -> None:
    first = memo.find(*form(), CPU)
    check(first, [7, 2, 7])
    for other in FORMS.values():
        index, plan = memo.find(*other(), CPU)
        assert plan is first[1]
        assert index is first[0]
    assert made == [[7, 2, 7]]


def test_the_same_ids_serve_the_same_step_again(memo: PlanMemo, made: Made) -> None:
    for _ in range(3):
        check(memo.find([1, 0], None, CPU, "a", 0), [1, 0])
    assert len(made) == 1


@pytest.mark.parametrize(
    "other", [[7, 2, 6], [2, 7, 7], [7, 2], [7, 2, 7, 7], [7, 2, 2**32 + 7]], ids=str
)
@pytest.mark.usefixtures("planning")
def test_other_ids_get_their_own_plan(made: Made, other: list[int]) -> None:
    memo = PlanMemo(2**40, "plain")
    memo.find([7, 2, 7], None, CPU)
    memo.find(other, None, CPU)
    assert made == [[7, 2, 7], other]


def test_ids_of_another_dtype_get_their_own_plan(memo: PlanMemo, made: Made) -> None:
    for dtype in (torch.int32, torch.int64):
        check(memo.find(torch.tensor([3, 1], dtype=dtype), None, CPU), [3, 1])
    assert len(made) == 2


@pytest.mark.parametrize("make", [np.array, torch.tensor, list], ids=["array", "tensor", "list"])
def test_ids_that_were_written_to_get_a_new_plan(memo: PlanMemo, make: Any) -> None:
    ids = make([5, 1, 5])
    old = memo.find(ids, None, CPU)
    ids[1] = 11
    check(old, [5, 1, 5])
    check(memo.find(ids, None, CPU), [5, 11, 5])
    ids[1] = 1
    assert memo.find(ids, None, CPU)[1] is old[1]


def test_a_write_that_torch_does_not_count_is_seen_on_the_cpu(memo: PlanMemo) -> None:
    ids = torch.tensor([5, 1, 5])
    memo.find(ids, None, CPU)
    ids.data[0] = 4
    check(memo.find(ids, None, CPU), [4, 1, 5])


def test_ids_of_inference_mode_are_compared_too(memo: PlanMemo, made: Made) -> None:
    with torch.inference_mode():
        ids = torch.tensor([5, 1])
        index, plan = memo.find(ids, None, CPU)
    table, out = random_rows(ROWS, (WIDTH,)), torch.zeros(2, WIDTH)
    assert memo.find([5, 1], None, CPU)[1] is plan
    speedtorch.pinned_gather(table, index, out=out, plan=plan)
    assert_same_bytes(out, table[[5, 1]])
    with torch.inference_mode():
        ids[0] = 2
    check(memo.find(ids, None, CPU), [2, 1])
    assert len(made) == 2


def test_ids_that_have_no_plan(memo: PlanMemo, made: Made) -> None:
    for ids in ([], [-1], [0, ROWS], [2**40], [-(2**63)]):
        index, plan = memo.find(ids, None, CPU)
        assert index.tolist() == ids
        assert plan is None
    with pytest.raises(TypeError, match="indexes: expected integers, got float64"):
        memo.find([0.5], None, CPU)
    assert not made
    assert len(memo) == 0


# Memory


def test_two_batches_are_remembered_and_no_more(memo: PlanMemo, made: Made) -> None:
    gone = []
    for row in range(5):
        found, plan = memo.find([row, 7], None, CPU)
        assert plan is not None
        gone += [weakref.ref(found), *map(weakref.ref, plan)]
        del found, plan
    assert len(memo) == 2
    assert [ref() is None for ref in gone] == [True] * 18 + [False] * 12
    memo.find([4, 7], None, CPU)
    memo.find([3, 7], None, CPU)
    assert len(made) == 5


@pytest.mark.usefixtures("planning")
def test_a_table_goes_without_the_garbage_collector() -> None:
    table = HostTable(ROWS, WIDTH, memory="plain")
    plans_of(table).find([1], None, CPU)
    gone = weakref.ref(table)
    del table
    assert gone() is None


# When plans pay


@pytest.mark.parametrize("captures", [False, True])
def test_plans_pay_for_a_gpu_and_mapped_host_memory(
    captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_memo, "_captures", lambda device: captures)
    kinds = ("managed", "registered", "plain", "file", "cuda")
    assert [plans_pay(kind, torch.device("cuda", 0)) for kind in kinds] == [
        not captures,
        not captures,
        False,
        False,
        False,
    ]
    assert not any(plans_pay(kind, CPU) for kind in kinds)


def test_no_plan_is_made_for_a_model_on_the_cpu(made: Made) -> None:
    switcher = ModelFactory(layer(), ROWS, WIDTH, CPUPinn=True)
    filled(switcher)
    switcher.beforeForwardPass([1, 2])
    switcher.afterOptimizerStep([1, 2])
    assert not made
    assert len(plans_of(switcher.table)) == 0


def test_the_next_call_asks_again_whether_plans_pay(
    memo: PlanMemo, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    memo.find([1], None, CPU)
    monkeypatch.setattr(plan_memo, "plans_pay", lambda memory, device: False)
    assert memo.find([1], None, CPU)[1] is None
    monkeypatch.setattr(plan_memo, "plans_pay", always)
    assert memo.find([1], None, CPU)[1] is not None
    assert len(made) == 1


@pytest.mark.usefixtures("planning")
def test_rows_go_where_ids_say_that_were_written_to_between() -> None:
    embedding = layer()
    switcher = ModelFactory(embedding, ROWS, WIDTH)
    expected = filled(switcher)
    ids = np.array([4, 2, 9])
    switcher.beforeForwardPass(ids)
    ids[:] = [0, 4, 0]
    switcher.afterOptimizerStep(ids)
    rows = embedding.weight.detach()
    expected[4], expected[0] = rows[1], rows[2]
    assert_same_bytes(table_rows(switcher), expected)
