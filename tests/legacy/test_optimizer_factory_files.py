"""Files of OptimizerFactory: the state of every row, and the step count with it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from optimizer_families import ROWS, WIDTH, build, started, state_rows
from reference import assert_same_bytes, assert_same_content
from torch import Tensor, optim

from speedtorch import (
    CPUPytorchOptimizerFactory,
    GPUPytorchOptimizerFactory,
    OptimizerFactory,
    OptimizerFactoryMM,
    PytorchOptimizerFactory,
)

pytestmark = pytest.mark.usefixtures("own_folder")

OPTIMIZERS = {
    "Adamax": optim.Adamax,
    "ASGD": optim.ASGD,
    "NAdam": optim.NAdam,
    "SparseAdam": optim.SparseAdam,
    "SGD-momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
}


def trained(make: Any, maker: Any) -> tuple[Any, dict[str, Any]]:
    """A switcher after two steps, and the optimizer's state of the last batch."""
    model, optimizer, switcher = started(maker, make)
    for batch in ([1, 2, 3], [4, 1]):
        switcher.beforeForwardPass(batch)
        model.users.weight.data = torch.zeros(len(batch), WIDTH)
        gradient = torch.ones(len(batch), WIDTH)
        sparse = isinstance(optimizer, optim.SparseAdam)
        model.users.weight.grad = gradient.to_sparse(1) if sparse else gradient
        optimizer.step()
        switcher.afterOptimizerStep(batch)
    return switcher, optimizer.state[model.users.weight]


NAMES = ["state", "state.safetensors"]
FILES = [
    *((maker, "Cupy", name) for maker in (OptimizerFactory, OptimizerFactoryMM) for name in NAMES),
    (GPUPytorchOptimizerFactory, "Torch", "state.pt"),
    (CPUPytorchOptimizerFactory, "Torch", "state.pt"),
    (PytorchOptimizerFactory, "Torch", "state.pt"),
]


@pytest.mark.dealt("maker", "kind", "name")
@pytest.mark.parametrize(("maker", "kind", "name"), FILES)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_saved_state_comes_back_with_its_step_count(
    make: Any, maker: Any, kind: str, name: str
) -> None:
    first, state = trained(make, maker)
    getattr(first, f"save{kind}")(name)
    model, optimizer = build(make)
    second = maker(optimizer, ROWS, WIDTH, model, "users")
    getattr(second, f"load{kind}")(name)
    resumed = optimizer.state[model.users.weight]
    assert_same_content(state_rows(second), state_rows(first))
    for name in set(state) - set(first.table.fields):
        if isinstance(state[name], Tensor):
            assert_same_bytes(resumed[name], state[name])
        else:
            assert type(resumed[name]) is type(state[name])
            assert resumed[name] == state[name]


def test_npy_files_are_named_after_the_state() -> None:
    switcher, _ = trained(optim.Adamax, OptimizerFactory)
    switcher.saveCupy("mine")
    names = ["mine.exp_avg.npy", "mine.exp_inf.npy", "mine.step.npy"]
    assert sorted(os.listdir()) == names
    assert np.load("mine.step.npy").tolist() == [2.0] * ROWS


def test_a_file_of_another_optimizer_changes_nothing() -> None:
    trained(optim.NAdam, OptimizerFactory)[0].saveCupy("other.safetensors")
    switcher, state = trained(optim.Adamax, OptimizerFactory)
    before = {name: rows.clone() for name, rows in state_rows(switcher).items()}
    with pytest.raises(ValueError, match=r"holds exp_avg .*mu_product.*; expected .*exp_inf"):
        switcher.loadCupy("other.safetensors")
    assert state["step"].item() == 2
    assert_same_content(state_rows(switcher), before)


def test_an_optimizer_without_state_cannot_be_saved_or_loaded() -> None:
    *_, switcher = started(OptimizerFactory, lambda p: optim.SGD(p, lr=0.1))
    message = "SGD with these settings keeps no state: there is nothing to save or load"
    with pytest.raises(ValueError, match=message):
        switcher.saveCupy("state.npy")
    with pytest.raises(ValueError, match=message):
        switcher.loadCupy("state.npy")


def test_state_that_is_no_number_cannot_be_saved() -> None:
    class Labelled(optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter].setdefault("label", "mine")
                parameter.sub_(parameter.grad, alpha=0.1)

    *_, switcher = started(OptimizerFactory, lambda p: Labelled(p, lr=0.1))
    with pytest.raises(ValueError, match="state 'label' is a str, which files of rows cannot hold"):
        switcher.saveCupy("state.npy")
