"""Files of OptimizerFactory: the state of every row, and the step count with it."""

from __future__ import annotations

import copy
import os
from typing import Any

import numpy as np
import pytest
import torch
from optimizer_families import ROWS, WIDTH, build, started, state_rows, train_on
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
        train_on(batch, model, optimizer, switcher)
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
def test_saved_state_is_loaded_with_its_step_count(
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


@pytest.mark.parametrize(
    ("maker", "name"),
    [
        (OptimizerFactory, "CUPYcorpi"),
        (OptimizerFactoryMM, "CUPYmemmap"),
        (GPUPytorchOptimizerFactory, "pytorchGPUVar"),
        (CPUPytorchOptimizerFactory, "pytorchCPUVar"),
    ],
)
def test_the_state_is_a_list_in_the_attribute_of_2019(maker: Any, name: str) -> None:
    switcher, _ = trained(optim.Adamax, maker)
    assert switcher.optVarList == ["exp_avg", "exp_inf"]
    for state, rows in zip(switcher.optVarList, getattr(switcher, name), strict=True):
        assert_same_bytes(rows, switcher.table[state])


def test_a_list_of_2019_is_loaded_as_the_page_converts_it() -> None:
    torch.save([torch.full((ROWS, WIDTH), 2.0), torch.full((ROWS, WIDTH), 3.0)], "state.torch")
    model, optimizer = build(optim.Adamax)
    state = GPUPytorchOptimizerFactory(optimizer, ROWS, WIDTH, model, "users")
    with pytest.raises(ValueError, match=r"state\.torch must contain .* got a list"):
        state.loadTorch("state.torch")
    values = dict(zip(state.optVarList, torch.load("state.torch"), strict=True))
    values["step"] = torch.full((ROWS,), 5.0)
    torch.save(values, "state.pt")
    state.loadTorch("state.pt")
    assert (state.getNumpyVersion()["exp_inf"] == 3).all()
    assert optimizer.state[model.users.weight]["step"] == 5


def test_npy_files_are_named_after_the_state() -> None:
    switcher, _ = trained(optim.Adamax, OptimizerFactory)
    switcher.saveCupy("mine")
    names = ["mine.exp_avg.npy", "mine.exp_inf.npy", "mine.step.npy"]
    assert sorted(os.listdir()) == names
    assert np.load("mine.step.npy").tolist() == [2.0] * ROWS


def test_a_file_of_another_optimizer_changes_nothing() -> None:
    trained(optim.NAdam, OptimizerFactory)[0].saveCupy("other.safetensors")
    switcher, state = trained(optim.Adamax, OptimizerFactory)
    before = copy.deepcopy(state_rows(switcher))
    with pytest.raises(ValueError, match=r"contain .*exp_inf.*, got exp_avg .*mu_product"):
        switcher.loadCupy("other.safetensors")
    assert state["step"].item() == 2
    assert_same_content(state_rows(switcher), before)


def test_memory_mapped_state_is_named_after_variable_and_optimizer() -> None:
    started(OptimizerFactoryMM)
    assert os.listdir() == ["usersAdamax0.memmap"]


def test_state_that_is_no_number_cannot_be_saved() -> None:
    class Labelled(optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter].setdefault("label", "mine")
                parameter.sub_(parameter.grad, alpha=0.1)

    *_, switcher = started(OptimizerFactory, lambda p: Labelled(p, lr=0.1))
    with pytest.raises(ValueError, match="'label' is a str, which files of rows cannot contain"):
        switcher.saveCupy("state.npy")
