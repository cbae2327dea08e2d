"""One plan per batch in ModelFactory and OptimizerFactory: the same rows and errors as without.

The CPU makes plans for these tests only.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_families import ROWS, WIDTH, filled, layer, table_rows
from plan_memos import Made, always, exchange, made, planning, plans, shared
from reference import assert_same_bytes, assert_same_content, random_rows
from test_training_exact import CASES, STEPS, in_place, train_through_factories

from speedtorch import DataGadget, ModelFactory
from speedtorch.legacy import plan_memo

__all__ = ["made", "planning", "plans"]


# Training


@pytest.mark.usefixtures("planning")
@pytest.mark.parametrize("share", [False, True], ids=["two-tables", "shared-table"])
@pytest.mark.parametrize("name", ["SGD", "SGD-momentum", "SparseAdam", "Adam", "Rprop"])
def test_training_with_plans_is_the_same_bit_for_bit(made: Made, name: str, share: bool) -> None:
    case = CASES[name]
    expected = in_place(case, "single", 47, "cpu")
    actual = train_through_factories(case, "single", 47, "cpu", shared=share)
    assert_same_content(actual, expected)
    assert len(made) == (STEPS if share or not case.rows else 2 * STEPS)


@pytest.mark.usefixtures("planning")
def test_all_ops_of_a_batch_get_one_plan(made: Made, plans: list[Any]) -> None:
    _, _, weights, states = shared()
    for batch, ids in enumerate([[4, 2, 4], [1], [4, 2, 4]]):
        plans.clear()
        exchange(weights, states, ids)
        assert len(plans) == 6  # of three fields, there and back
        assert all(plan is plans[0] for plan in plans)
        assert plans[0] is not None
        assert len(made) == min(batch + 1, 2)  # the third batch is the first one again


@pytest.mark.usefixtures("planning")
def test_the_next_batch_may_be_fetched_ahead(made: Made) -> None:
    table, _, weights, states = shared()
    ahead = ModelFactory(layer(), ROWS, WIDTH, table=table)
    for row in range(4):
        weights.beforeForwardPass([row, 7])
        ahead.beforeForwardPass([row + 1, 7])
        states.beforeForwardPass([row, 7])
        weights.afterOptimizerStep([row, 7])
        states.afterOptimizerStep([row, 7])
    assert made == [[row, 7] for row in range(5)]


@pytest.mark.parametrize("sum_duplicates", [False, True])
def test_repeated_ids_go_back_as_without_a_plan(
    sum_duplicates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for pay in (plan_memo.plans_pay, always):
        monkeypatch.setattr(plan_memo, "plans_pay", pay)
        embedding = layer()
        switcher = ModelFactory(embedding, ROWS, WIDTH, sumDuplicates=sum_duplicates)
        filled(switcher)
        switcher.table["weight"].copy_(torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH))
        switcher.beforeForwardPass([3, 8, 3], [0, 3])
        change = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(4)) * 1e3
        embedding.weight.data.add_(change)
        switcher.afterOptimizerStep([3, 8, 3], [0, 3])
        results.append(table_rows(switcher))
    assert_same_bytes(*results)


# Errors


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("bad", [-1, ROWS, 2**40, -(2**63)])
@pytest.mark.parametrize(
    ("method", "op"),
    [("beforeForwardPass", "pinned_gather"), ("afterOptimizerStep", "pinned_scatter")],
)
def test_bad_ids_are_refused_in_the_words_of_the_op_and_the_next_call_works(
    request: pytest.FixtureRequest, planned: bool, bad: int, method: str, op: str
) -> None:
    if planned:
        request.getfixturevalue("planning")
    table, embedding, weights, states = shared()
    weights.beforeForwardPass([1, 2])
    states.beforeForwardPass([1, 2])
    before, held = table.record.clone(), embedding.weight.detach().clone()
    state = states.given_optimizer.state[embedding.weight]
    kept = {name: rows.clone() for name, rows in state.items()}
    for switcher in (weights, states):
        with pytest.raises(IndexError) as caught:
            getattr(switcher, method)([3, bad])
        assert str(caught.value) == (
            f"{op}: id {bad} at position 1 of index is out of range for a table of {ROWS} rows"
            " (1 of 2 ids are out of range); no row was moved"
        )
    assert_same_bytes(table.record, before)
    assert_same_bytes(embedding.weight, held)
    assert_same_content(state, kept)
    exchange(weights, states, [1, 2])
    assert_same_bytes(table.record, before)


# DataGadget


@pytest.mark.usefixtures("planning")
def test_a_data_gadget_has_one_op_per_batch_and_makes_no_plan(made: Made) -> None:
    data = random_rows(7, (3,))
    gadget = DataGadget(data, CPUPinn=True)
    assert_same_bytes(gadget.getData([1, 1]).cpu(), data[[1, 1]])
    assert not made
