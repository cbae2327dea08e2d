"""OptimizerFactory: whose state the optimizer holds and what goes back to the table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from optimizer_families import (
    FAMILIES,
    ROWS,
    WIDTH,
    Model,
    build,
    filled,
    started,
    state_rows,
    train_on,
)
from reference import assert_same_bytes, assert_same_content, random_rows
from torch import optim

import speedtorch
from speedtorch import OptimizerFactory

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request: pytest.FixtureRequest) -> Any:
    """Builds an OptimizerFactory of each family."""
    return request.param


def test_the_optimizer_holds_the_state_of_the_batch(family: Any, device: str) -> None:
    model, optimizer, switcher = started(family, device=device)
    values = filled(switcher)
    switcher.beforeForwardPass(np.array([[3], [11]]), [0, 3])
    state = optimizer.state[model.users.weight]
    speedtorch.synchronize()
    assert sorted(state) == ["exp_avg", "exp_inf", "step"]
    for name, rows in values.items():
        assert_same_bytes(state[name], rows[[3, 11, 0, 3]])
        assert state[name].is_contiguous()
        assert state[name].device.type == device
    assert_same_bytes(state["step"], torch.tensor(0.0))


def test_state_is_written_back_and_the_last_duplicate_wins(family: Any, device: str) -> None:
    model, optimizer, switcher = started(family, device=device)
    expected = filled(switcher)
    ids = [3, 8, 3]
    switcher.beforeForwardPass(ids)
    for name, rows in expected.items():
        new = random_rows(3, (WIDTH,), seed=100 + len(name))
        optimizer.state[model.users.weight][name].copy_(new)
        rows[3], rows[8] = new[2], new[1]
    switcher.afterOptimizerStep(ids)
    assert_same_content(state_rows(switcher), expected)


def test_every_row_starts_as_the_optimizer_creates_it(family: Any, device: str) -> None:
    *_, switcher = started(family, lambda p: optim.Rprop(p, lr=0.5), device)
    rows = state_rows(switcher)
    assert_same_bytes(rows["step_size"], torch.full((ROWS, WIDTH), 0.5))
    assert_same_bytes(rows["prev"], torch.zeros(ROWS, WIDTH))


def test_the_step_count_goes_on_from_batch_to_batch_and_over_an_init() -> None:
    model, optimizer, switcher = started()
    for batch in ([1, 2, 3], [4], [5, 6]):
        train_on(batch, model, optimizer, switcher)
    switcher.optInit()
    switcher.beforeForwardPass([0])
    assert optimizer.state[model.users.weight]["step"].item() == 3


def test_other_variables_and_groups_do_not_change() -> None:
    model = Model()
    groups = [
        {"params": [model.users.weight]},
        {"params": [model.bias], "lr": 0.5},
        {"params": [model.inner["books"].weight]},
    ]
    optimizer = optim.Adam(groups)
    model.bias.grad = torch.ones(3, WIDTH)
    optimizer.step()
    state = optimizer.state[model.bias]
    before = {name: value.clone() for name, value in state.items()}
    switcher = OptimizerFactory(optimizer, ROWS, WIDTH, model, "users")
    switcher.optInit()
    switcher.beforeForwardPass([1])
    switcher.afterOptimizerStep([1])
    assert optimizer.state[model.bias] is state
    assert_same_content(state, before)
    assert set(optimizer.state) == {model.users.weight, model.bias}
    assert [group["lr"] for group in optimizer.param_groups] == [0.001, 0.5, 0.001]


@pytest.mark.parametrize("name", ["inner.books", "inner.books.weight", "bias"])
def test_variables_are_found_by_their_name_with_or_without_weight(name: str) -> None:
    model, optimizer = build()
    switcher = OptimizerFactory(optimizer, ROWS, WIDTH, model, name)
    switcher.optInit()
    switcher.beforeForwardPass([1, 2])
    (held,) = optimizer.state
    assert held is (model.bias if name == "bias" else model.inner["books"].weight)


def test_an_optimizer_without_state_has_nothing_to_exchange(family: Any) -> None:
    model, optimizer, switcher = started(family, lambda p: optim.SGD(p, lr=0.1))
    train_on([1, 2], model, optimizer, switcher)
    assert switcher.getNumpyVersion() == {}


def test_state_that_a_third_party_optimizer_keeps_per_row_is_exchanged() -> None:
    class RowNorms(optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["norm"] = parameter.new_zeros(len(parameter), 1, dtype=torch.float64)
                state["norm"] += parameter.grad.double().square().sum(1, keepdim=True)
                parameter -= parameter.grad / state["norm"].sqrt().clamp(min=1)

    model, optimizer, switcher = started(OptimizerFactory, RowNorms, CPUPinn=True)
    for batch in ([1, 2], [2, 3]):
        train_on(batch, model, optimizer, switcher)
    norms = switcher.getNumpyVersion()["norm"]
    assert norms.dtype == np.float64
    assert norms[:5].flatten().tolist() == [0, 5, 10, 5, 0]
