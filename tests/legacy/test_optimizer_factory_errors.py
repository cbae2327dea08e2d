"""What OptimizerFactory refuses, at construction and later, changing nothing."""

from __future__ import annotations

import os
from typing import Any

import pytest
from optimizer_families import ROWS, WIDTH, Model, build, filled, started, state_rows
from reference import assert_same_bytes, assert_same_content
from torch import optim

from speedtorch import (
    HostTable,
    OptimizerFactory,
    OptimizerFactoryMM,
)

pytestmark = pytest.mark.usefixtures("own_folder")

CONSTRUCTION_ERRORS = [
    (
        {"variable_name": "user"},
        r"variable_name must be a variable of Model \(bias, inner.books, users\), got 'user'",
    ),
    (
        {"embed_dimension": 4},
        r"embed_dimension=4 does not match the rows of 'users', .* \[5\]",
    ),
    ({"dtype": "float16"}, "dtype='float16' does not match 'users', whose dtype is 'float32'"),
    ({"dtype": "half-ish"}, "dtype must be a torch dtype, .* got 'half-ish'"),
    (
        {"table": HostTable(ROWS, WIDTH, state=("exp_avg",), memory="plain")},
        "table must have the fields exp_avg, exp_inf, got weight, exp_avg",
    ),
    (
        {"table": HostTable(9, WIDTH, state=("exp_avg", "exp_inf"), memory="plain")},
        "table must have total_classes=12 rows, got 9",
    ),
    (
        {"table": HostTable(ROWS, 2, state=("exp_avg", "exp_inf"), memory="plain")},
        r"table: the field 'exp_avg' must have rows \[5\] .*, got rows \[2\]",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), CONSTRUCTION_ERRORS)
def test_what_does_not_fit_is_refused_at_construction(
    arguments: dict[str, Any], message: str
) -> None:
    model, optimizer = build()
    given = {
        "total_classes": ROWS,
        "embed_dimension": WIDTH,
        "model": model,
        "variable_name": "users",
    }
    with pytest.raises(ValueError, match=message):
        OptimizerFactory(optimizer, **given | arguments)


@pytest.mark.parametrize("make", [optim.Adafactor, optim.LBFGS])
def test_optimizers_that_do_not_treat_rows_separately_are_refused_by_name(make: Any) -> None:
    model = Model()
    optimizer = make(model.parameters())
    with pytest.raises(ValueError, match=make.__name__):
        OptimizerFactory(optimizer, ROWS, WIDTH, model, "users")


def test_a_variable_that_the_optimizer_does_not_hold_is_refused() -> None:
    model = Model()
    optimizer = optim.Adam([model.bias])
    with pytest.raises(ValueError, match="Adam does not hold this parameter"):
        OptimizerFactory(optimizer, ROWS, WIDTH, model, "users")


@pytest.mark.parametrize("method", ["beforeForwardPass", "afterOptimizerStep"])
def test_a_table_that_was_not_initialised_is_named(method: str) -> None:
    model, optimizer = build()
    table = HostTable(ROWS, WIDTH, state=("exp_avg", "exp_inf"), memory="plain")
    for given in (None, table):
        switcher = OptimizerFactory(optimizer, ROWS, WIDTH, model, "users", table=given)
        with pytest.raises(RuntimeError, match=r"has no table yet\. Call optInit\(\) or a load"):
            getattr(switcher, method)([0, 1, 2])


def test_a_step_without_a_forward_pass_is_named() -> None:
    *_, switcher = started()
    with pytest.raises(RuntimeError, match="no state 'exp_avg' of 'users'. Call beforeForwardPass"):
        switcher.afterOptimizerStep([0])


def test_another_number_of_ids_than_rows_changes_nothing() -> None:
    *_, switcher = started()
    values = filled(switcher)
    switcher.beforeForwardPass([1, 2, 3])
    with pytest.raises(ValueError, match="got 2 ids, but the optimizer's 'exp_avg' has 3 rows"):
        switcher.afterOptimizerStep([1, 2])
    assert_same_content(state_rows(switcher), values)


@pytest.mark.parametrize("bad", [-1, ROWS, 2**40])
def test_an_id_out_of_range_changes_nothing_and_the_next_call_works(bad: int) -> None:
    model, optimizer, switcher = started()
    values = filled(switcher)
    switcher.beforeForwardPass([1, 2])
    state = optimizer.state[model.users.weight]
    with pytest.raises(IndexError):
        switcher.beforeForwardPass([3, bad])
    assert_same_bytes(state["exp_avg"], values["exp_avg"][[1, 2]])
    with pytest.raises(IndexError):
        switcher.afterOptimizerStep([3, bad])
    assert_same_content(state_rows(switcher), values)
    switcher.beforeForwardPass([3, 4])
    assert_same_bytes(state["exp_avg"], values["exp_avg"][[3, 4]])


def test_memory_mapped_state_is_named_after_variable_and_optimizer() -> None:
    model, optimizer = build()
    OptimizerFactoryMM(optimizer, ROWS, WIDTH, model, "users").optInit()
    assert os.listdir() == ["usersAdamax0.memmap"]
    with pytest.warns(UserWarning, match="no effect on a memory-mapped file"):
        OptimizerFactoryMM(optimizer, ROWS, WIDTH, model, "users", CPUPinn=True)
