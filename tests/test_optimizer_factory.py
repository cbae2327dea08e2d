"""OptimizerFactory: whose state the optimizer holds, what goes back, files, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import assert_same_bytes, random_rows
from torch import Tensor, nn, optim

import speedtorch
from speedtorch import (
    CPUPytorchOptimizerFactory,
    GPUPytorchOptimizerFactory,
    HostTable,
    ModelFactory,
    OptimizerFactory,
    OptimizerFactoryMM,
    PytorchOptimizerFactory,
)

ROWS, WIDTH = 12, 5


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory-mapped families write to the current folder."""
    monkeypatch.chdir(tmp_path)


class Model(nn.Module):
    """Two embeddings, one of them within another module, and a variable without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(3, WIDTH)
        self.inner = nn.ModuleDict({"books": nn.Embedding(3, WIDTH)})
        self.bias = nn.Parameter(torch.zeros(3, WIDTH))


def build(make: Any = optim.Adamax, device: str = "cpu") -> tuple[Model, Any]:
    model = Model().to(device)
    return model, make(model.parameters())


MAKERS = {
    "OptimizerFactory": OptimizerFactory,
    "OptimizerFactory-pinned": lambda *a, **k: OptimizerFactory(*a, CPUPinn=True, **k),
    "GPUPytorch": GPUPytorchOptimizerFactory,
    "CPUPytorch": CPUPytorchOptimizerFactory,
    "Pytorch": PytorchOptimizerFactory,
    "Pytorch-pageable": lambda *a, **k: PytorchOptimizerFactory(*a, deviceType="cpu", **k),
    "MM": OptimizerFactoryMM,
}


@pytest.fixture(params=MAKERS.values(), ids=MAKERS.keys())
def family(request: pytest.FixtureRequest) -> Any:
    """Builds an OptimizerFactory of each family."""
    return request.param


def filled(switcher: Any) -> dict[str, Tensor]:
    """Gives a started switcher known state and returns a copy of it."""
    rows = {name: random_rows(ROWS, (WIDTH,), seed=len(name)) for name in switcher.table.fields}
    for name, values in rows.items():
        switcher.table[name].copy_(values)
    return rows


def state_rows(switcher: Any) -> dict[str, Tensor]:
    switcher.table.settle()
    return {name: switcher.table[name].detach().cpu() for name in switcher.table.fields}


# ------------------------------------------------------------------------------------------------
# Exchange
# ------------------------------------------------------------------------------------------------


def test_the_optimizer_holds_the_state_of_the_batch(family: Any, device: str) -> None:
    model, optimizer = build(device=device)
    switcher = family(optimizer, ROWS, WIDTH, model, "users")
    switcher.optInit()
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


def test_state_goes_back_and_of_duplicates_the_last_stays(family: Any, device: str) -> None:
    model, optimizer = build(device=device)
    switcher = family(optimizer, ROWS, WIDTH, model, "users")
    switcher.optInit()
    expected = filled(switcher)
    ids = [3, 8, 3]
    switcher.beforeForwardPass(ids)
    for name, rows in expected.items():
        new = random_rows(3, (WIDTH,), seed=100 + len(name))
        optimizer.state[model.users.weight][name].copy_(new)
        rows[3], rows[8] = new[2], new[1]
    switcher.afterOptimizerStep(ids)
    for name, rows in state_rows(switcher).items():
        assert_same_bytes(rows, expected[name])


def test_every_row_starts_as_the_optimizer_creates_it(family: Any, device: str) -> None:
    model, optimizer = build(lambda p: optim.Rprop(p, lr=0.5), device)
    switcher = family(optimizer, ROWS, WIDTH, model, "users")
    switcher.optInit()
    rows = state_rows(switcher)
    assert_same_bytes(rows["step_size"], torch.full((ROWS, WIDTH), 0.5))
    assert_same_bytes(rows["prev"], torch.zeros(ROWS, WIDTH))


def test_the_step_count_goes_on_from_batch_to_batch_and_over_an_init() -> None:
    model, optimizer = build()
    switcher = OptimizerFactory(optimizer, ROWS, WIDTH, model, "users")
    switcher.optInit()
    for batch in ([1, 2, 3], [4], [5, 6]):
        switcher.beforeForwardPass(batch)
        model.users.weight.data = torch.zeros(len(batch), WIDTH)
        model.users.weight.grad = torch.ones(len(batch), WIDTH)
        optimizer.step()
        switcher.afterOptimizerStep(batch)
    switcher.optInit()
    switcher.beforeForwardPass([0])
    assert optimizer.state[model.users.weight]["step"].item() == 3


def test_other_variables_and_groups_stay_as_they_are() -> None:
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
    for name, value in before.items():
        assert_same_bytes(state[name], value)
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
    model, optimizer = build(lambda p: optim.SGD(p, lr=0.1))
    switcher = family(optimizer, ROWS, WIDTH, model, "users")
    switcher.optInit()
    switcher.beforeForwardPass([1, 2])
    model.users.weight.grad = torch.ones(3, WIDTH)
    optimizer.step()
    switcher.afterOptimizerStep([1, 2])
    assert switcher.getNumpyVersion() == {}


def test_one_table_holds_weight_and_state_of_a_row_side_by_side(device: str) -> None:
    model, optimizer = build(device=device)
    table = HostTable(ROWS, WIDTH, state=("exp_avg", "exp_inf"))
    weights = ModelFactory(model.users, ROWS, WIDTH, table=table)
    states = OptimizerFactory(optimizer, ROWS, WIDTH, model, "users", table=table)
    weights.uniformDistributionInit(-1, 1)
    states.optInit()
    record = table.record.clone()
    weights.beforeForwardPass([4, 2])
    states.beforeForwardPass([4, 2])
    model.users(torch.arange(2, device=device)).sum().backward()
    optimizer.step()
    weights.afterOptimizerStep([4, 2])
    states.afterOptimizerStep([4, 2])
    table.settle()
    changed = (table.record != record).all(1)
    assert changed.nonzero().flatten().tolist() == [2, 4]
    assert (table["exp_inf"][[2, 4]] == 1).all()


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

    model, optimizer = build(RowNorms)
    switcher = OptimizerFactory(optimizer, ROWS, WIDTH, model, "users", CPUPinn=True)
    switcher.optInit()
    for batch in ([1, 2], [2, 3]):
        switcher.beforeForwardPass(batch)
        model.users.weight.data = torch.zeros(2, WIDTH)
        model.users.weight.grad = torch.ones(2, WIDTH)
        optimizer.step()
        switcher.afterOptimizerStep(batch)
    norms = switcher.getNumpyVersion()["norm"]
    assert norms.dtype == np.float64
    assert norms[:5].flatten().tolist() == [0, 5, 10, 5, 0]


# ------------------------------------------------------------------------------------------------
# Files
# ------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "Adamax": optim.Adamax,
    "ASGD": optim.ASGD,
    "NAdam": optim.NAdam,
    "SparseAdam": optim.SparseAdam,
    "SGD-momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
}


def trained(make: Any, maker: Any) -> tuple[Any, dict[str, Any]]:
    """A switcher after two steps, and the optimizer's state of the last batch."""
    model, optimizer = build(make)
    switcher = maker(optimizer, ROWS, WIDTH, model, "users")
    switcher.optInit()
    for batch in ([1, 2, 3], [4, 1]):
        switcher.beforeForwardPass(batch)
        model.users.weight.data = torch.zeros(len(batch), WIDTH)
        gradient = torch.ones(len(batch), WIDTH)
        sparse = isinstance(optimizer, optim.SparseAdam)
        model.users.weight.grad = gradient.to_sparse(1) if sparse else gradient
        optimizer.step()
        switcher.afterOptimizerStep(batch)
    return switcher, optimizer.state[model.users.weight]


@pytest.mark.parametrize("name", ["state", "state.safetensors"])
@pytest.mark.parametrize("maker", [OptimizerFactory, OptimizerFactoryMM])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_saved_state_comes_back_with_its_step_count(make: Any, maker: Any, name: str) -> None:
    first, state = trained(make, maker)
    first.saveCupy(name)
    model, optimizer = build(make)
    second = maker(optimizer, ROWS, WIDTH, model, "users")
    second.loadCupy(name)
    assert_resumed(first, state, second, optimizer.state[model.users.weight])


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize(
    "maker", [GPUPytorchOptimizerFactory, CPUPytorchOptimizerFactory, PytorchOptimizerFactory]
)
def test_torchs_files_bring_the_state_back_with_its_step_count(make: Any, maker: Any) -> None:
    first, state = trained(make, maker)
    first.saveTorch("state.pt")
    model, optimizer = build(make)
    second = maker(optimizer, ROWS, WIDTH, model, "users")
    second.loadTorch("state.pt")
    assert_resumed(first, state, second, optimizer.state[model.users.weight])


def assert_resumed(first: Any, state: dict[str, Any], second: Any, resumed: dict[str, Any]) -> None:
    for name, rows in state_rows(second).items():
        assert_same_bytes(rows, state_rows(first)[name])
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
    for name, rows in state_rows(switcher).items():
        assert_same_bytes(rows, before[name])


def test_an_optimizer_without_state_cannot_be_saved_or_loaded() -> None:
    model, optimizer = build(lambda p: optim.SGD(p, lr=0.1))
    switcher = OptimizerFactory(optimizer, ROWS, WIDTH, model, "users")
    switcher.optInit()
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

    model, optimizer = build(lambda p: Labelled(p, lr=0.1))
    switcher = OptimizerFactory(optimizer, ROWS, WIDTH, model, "users")
    switcher.optInit()
    with pytest.raises(ValueError, match="state 'label' is a str, which files of rows cannot hold"):
        switcher.saveCupy("state.npy")


# ------------------------------------------------------------------------------------------------
# Refusals
# ------------------------------------------------------------------------------------------------

CONSTRUCTION_ERRORS = [
    (
        {"variable_name": "user"},
        "variable_name='user' is no variable of Model; it has: bias, inner.books, users",
    ),
    ({"embed_dimension": 4}, r"embed_dimension=4: the rows of 'users', \[3, 5\]"),
    ({"dtype": "float16"}, "dtype='float16': 'users' is 'float32'"),
    ({"dtype": "half-ish"}, "dtype='half-ish' is no dtype of torch's"),
    (
        {"table": HostTable(ROWS, WIDTH, state=("exp_avg",), memory="plain")},
        "table: it has no field 'exp_inf', only weight, exp_avg; needed are exp_avg, exp_inf",
    ),
    (
        {"table": HostTable(9, WIDTH, state=("exp_avg", "exp_inf"), memory="plain")},
        "table: it has 9 rows, total_classes is 12",
    ),
    (
        {"table": HostTable(ROWS, 2, state=("exp_avg", "exp_inf"), memory="plain")},
        r"table: its field 'exp_avg' has rows \[2\] .* needed are rows \[5\]",
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
        with pytest.raises(RuntimeError, match=r"has no table yet: call optInit\(\) or a load"):
            getattr(switcher, method)([0, 1, 2])


def test_a_step_without_a_forward_pass_is_named() -> None:
    model, optimizer = build()
    switcher = OptimizerFactory(optimizer, ROWS, WIDTH, model, "users")
    switcher.optInit()
    with pytest.raises(RuntimeError, match="no state 'exp_avg' of 'users': call beforeForwardPass"):
        switcher.afterOptimizerStep([0])


def test_another_number_of_ids_than_rows_changes_nothing() -> None:
    model, optimizer = build()
    switcher = OptimizerFactory(optimizer, ROWS, WIDTH, model, "users")
    switcher.optInit()
    values = filled(switcher)
    switcher.beforeForwardPass([1, 2, 3])
    with pytest.raises(ValueError, match="got 2 ids, but the optimizer's 'exp_avg' holds 3 rows"):
        switcher.afterOptimizerStep([1, 2])
    for name, rows in state_rows(switcher).items():
        assert_same_bytes(rows, values[name])


@pytest.mark.parametrize("bad", [-1, ROWS, 2**40])
def test_an_id_out_of_range_changes_nothing_and_the_next_call_works(bad: int) -> None:
    model, optimizer = build()
    switcher = OptimizerFactory(optimizer, ROWS, WIDTH, model, "users")
    switcher.optInit()
    values = filled(switcher)
    switcher.beforeForwardPass([1, 2])
    state = optimizer.state[model.users.weight]
    with pytest.raises(IndexError):
        switcher.beforeForwardPass([3, bad])
    assert_same_bytes(state["exp_avg"], values["exp_avg"][[1, 2]])
    with pytest.raises(IndexError):
        switcher.afterOptimizerStep([3, bad])
    for name, rows in state_rows(switcher).items():
        assert_same_bytes(rows, values[name])
    switcher.beforeForwardPass([3, 4])
    assert_same_bytes(state["exp_avg"], values["exp_avg"][[3, 4]])


def test_memory_mapped_state_is_named_after_variable_and_optimizer() -> None:
    model, optimizer = build()
    OptimizerFactoryMM(optimizer, ROWS, WIDTH, model, "users").optInit()
    assert os.listdir() == ["usersAdamax0.memmap"]
    with pytest.warns(UserWarning, match="no effect on a memory-mapped file"):
        OptimizerFactoryMM(optimizer, ROWS, WIDTH, model, "users", CPUPinn=True)
