"""Training that is saved goes on in a fresh process, bit for bit, each way that torch has for it.

The process that goes on has stepped nothing before it loads: torch.distributed.checkpoint's recipe
then fills the optimizer's state by a step with gradients of zeros.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_cases import CASES, settings_of
from rank_processes import in_processes
from reference import assert_same_bytes, assert_same_content, copied
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch_checkpoints import Training, WithCheckpoint, through_a_file
from warm_python import finished, warm_python

import speedtorch
from speedtorch.nn.captured_state import _put_back

ROWS, WIDTH = 30, 4
# Adagrad makes its state in its constructor; that of Rprop and ASGD starts with the learning rate.
NAMES = ("SGD", "SGD-momentum", "SparseAdam", "Adam-amsgrad", "Adagrad", "RowWiseAdagrad", "Rprop")
NAMES += ("ASGD",)


class Words(nn.Module):
    """An embedding, bags of embeddings and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {
                "words": speedtorch.Embedding(ROWS, WIDTH),
                "bags": speedtorch.EmbeddingBag(ROWS, 2 * WIDTH, mode="sum"),
            }
        )
        self.out = nn.Linear(3 * WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        words, bags = (table(ids) for table in self.tables.values())
        return self.out(torch.cat([words.mean(1), bags], 1).tanh())


class Pooled(nn.Module):
    """A collection of two tables and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"users": ROWS, "goods": 2 * ROWS}
        tables = [speedtorch.EmbeddingBagConfig(n, WIDTH, name) for name, n in sizes.items()]
        self.tables = speedtorch.EmbeddingBagCollection(tables=tables)
        self.out = nn.Linear(2 * WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.tables(dict.fromkeys(("users", "goods"), ids))
        return self.out(found.values().tanh())


def begin(make: type[nn.Module], name: str, seed: int) -> Training:
    """A model with its optimizers, which have stepped nothing."""
    torch.manual_seed(seed)
    model, case = make(), CASES[name]
    if case.make is optim.SparseAdam:  # which takes no dense gradients
        parts = [model.tables.parameters(), model.out.parameters()]
        optimizers = [optim.SparseAdam(parts[0], lr=0.05), optim.Adam(parts[1], lr=0.05)]
    else:
        optimizers = [case.make(model.parameters(), lr=0.05, **case.settings)]
    speedtorch.attach(optimizers[0], model)
    return model, optimizers


def train(training: Training, steps: Sequence[int]) -> None:
    model, optimizers = training
    for number in steps:
        random = torch.Generator().manual_seed(number)
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.randint(ROWS, (5, 3), generator=random)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


class WithTorchSave:
    """torch.save of state_dict()s."""

    def save(self, training: Training, path: Path) -> None:
        model, optimizers = training
        torch.save([each.state_dict() for each in (model, *optimizers)], path)

    def load(self, training: Training, path: Path) -> None:
        model, optimizers = training
        for each, state in zip((model, *optimizers), torch.load(path), strict=True):
            each.load_state_dict(state)


WAYS: dict[str, Any] = {
    "torch.save": WithTorchSave(),
    "checkpoint": WithCheckpoint(),
    "checkpoint-flat": WithCheckpoint(flatten_optimizer_state_dict=True),
}
MODELS = {"words": Words, "pooled": Pooled}


RESUMED = [
    *(("words", "torch.save", name) for name in NAMES[1::3]),
    *(("words", "checkpoint", name) for name in NAMES),
    *(("words", "checkpoint-flat", name) for name in NAMES[::3]),
    *(("pooled", "torch.save", name) for name in NAMES[2::3]),
    *(("pooled", "checkpoint", name) for name in NAMES[1::2]),
]


def go_on(folder: str) -> None:
    """What the fresh process does."""
    for number, (model, way, name) in enumerate(RESUMED):
        training = begin(MODELS[model], name, seed=1)
        WAYS[way].load(training, Path(folder, str(number)))
        train(training, range(3, 6))
        torch.save(states_of(training), Path(folder, f"{number}.pt"))


def states_of(training: Training) -> list[dict[str, Any]]:
    """What there is to compare, without entries that have nothing: torch's flat form adds some."""
    model, optimizers = training
    states = [optimizer.state_dict() for optimizer in optimizers]
    for state in states:
        state["state"] = {number: kept for number, kept in state["state"].items() if kept}
    return [model.state_dict(), *states]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch, where no processes are joined
def test_a_fresh_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    expected = []
    for number, (model, way, name) in enumerate(RESUMED):
        training = begin(MODELS[model], name, seed=0)
        train(training, range(3))
        WAYS[way].save(training, tmp_path / str(number))
        train(training, range(3, 6))
        expected.append(states_of(training))
    program = f"import test_attach_resume; test_attach_resume.go_on({str(tmp_path)!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = finished([warm_python(), "-c", program], env=environment)
    assert done.returncode == 0, done.stderr
    for number, states in enumerate(expected):
        assert_same_content(torch.load(tmp_path / f"{number}.pt"), states), RESUMED[number]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        *(("SGD-momentum", "foreach"), ("RMSprop-centered-momentum", "foreach")),
        *(("Adam", "foreach"), ("Adam", "fused"), ("AdamW", "fused"), ("Adagrad", "fused")),
        ("RowWiseAdagrad", "foreach"),
    ],
)
def test_plain_torch_and_ours_go_on_from_what_either_has_saved(
    name: str, variant: str, dtype: torch.dtype
) -> None:
    def begin_one(module: nn.Module) -> tuple[nn.Module, optim.Optimizer]:
        settings = settings_of(CASES[name], variant)
        return module, CASES[name].make(module.parameters(), **settings)

    def go_on(module: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
        for number in steps:
            random = torch.Generator().manual_seed(number)
            factors = torch.randn(ROWS, 8, generator=random).to(dtype)
            optimizer.zero_grad()
            (module(torch.arange(ROWS)) * factors).sum().backward()
            optimizer.step()

    theirs = begin_one(nn.Embedding(ROWS, 8, dtype=dtype))
    ours = begin_one(speedtorch.Embedding.from_module(theirs[0]))
    speedtorch.attach(ours[1], ours[0])
    saved = []
    for each in (theirs, ours):
        go_on(*each, range(3))
        saved.append(through_a_file([part.state_dict() for part in each]))
    go_on(*theirs, range(3, 6))
    for states, to in itertools.product(saved, ("torch", "ours", "ours, attached later")):
        kind = nn.Embedding if to == "torch" else speedtorch.Embedding
        resumed = begin_one(kind(ROWS, 8, dtype=dtype))
        if to == "ours":
            speedtorch.attach(resumed[1], resumed[0])
        for part, state in zip(resumed, copied(states), strict=True):
            part.load_state_dict(state)
        if to == "ours, attached later":
            speedtorch.attach(resumed[1], resumed[0])
        go_on(*resumed, range(3, 6))
        for part, expected in zip(resumed, theirs, strict=True):
            assert_same_content(part.state_dict(), expected.state_dict())


@pytest.mark.usefixtures("restless")
@pytest.mark.filterwarnings("ignore")  # of torch, where no processes are joined
@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
@pytest.mark.parametrize("cache", [None, "200B"])
@pytest.mark.parametrize("capacity", [None, 8])
def test_a_model_goes_back_to_its_checkpoint_while_it_holds_later_rows(
    capacity: int | None, cache: str | None, rate: float | Tensor, tmp_path: Path
) -> None:
    """torch writes to the memory of state_dict(), after a step of rate 0 that moves no row."""
    model = nn.Sequential(speedtorch.Embedding(ROWS, WIDTH, capacity=capacity, cache=cache))

    def train_rows() -> None:
        sgd = optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            model(torch.tensor([1, 2])).sum().backward()
            sgd.step()
            sgd.zero_grad()

    way = WithCheckpoint()
    train_rows()
    way.save((model, [optim.SGD(model.parameters(), lr=rate)]), tmp_path)
    expected = model.state_dict()["0.weight"].clone()
    train_rows()
    assert not torch.equal(model.state_dict()["0.weight"], expected)
    way.load((model, [optim.SGD(model.parameters(), lr=rate)]), tmp_path)
    assert_same_bytes(model.state_dict()["0.weight"], expected)
    assert_same_bytes(model(torch.tensor([1, 2])), expected[1:3])


def test_a_step_of_rate_zero_that_moves_rows_counts() -> None:
    """A gradient that is infinite makes them NaN."""
    model = speedtorch.Embedding(ROWS, WIDTH)
    model(torch.tensor([1, 2])).sum().backward()
    model.state_dict()  # exposes the table's memory to writes
    assert model.weight.grad is not None
    model.weight.grad[[1, 2]] = torch.inf
    optim.SGD(model.parameters(), lr=0.0).step()
    assert model.state_dict()["weight"].isnan().any(1).nonzero().flatten().tolist() == [1, 2]


@pytest.mark.parametrize("capacity", [None, 8])
def test_a_step_with_gradients_of_zeros_counts_and_trains_no_row(capacity: int | None) -> None:
    model = nn.Sequential(speedtorch.Embedding(ROWS, WIDTH, capacity=capacity))
    adam = optim.Adam(model.parameters(), lr=0.1)
    speedtorch.attach(adam, model)
    before = model.state_dict()["0.weight"].clone()
    state = get_optimizer_state_dict(model, adam)["state"]["0.weight"]
    assert state["exp_avg"].shape == (ROWS, WIDTH) and state["step"] == 1
    assert not bool(state["exp_avg"].any())
    assert_same_bytes(model.state_dict()["0.weight"], before)


def test_what_a_graph_has_tried_out_before_the_first_step_counts_for_nothing() -> None:
    model = nn.Sequential(speedtorch.Embedding(ROWS, WIDTH))
    adam = optim.Adam(model.parameters(), lr=0.1)
    speedtorch.attach(adam, model)
    assert not adam.state
    model(torch.arange(3)).sum().backward()
    adam.step()
    _put_back(adam, {}, {id(model[0].weight)})
    assert adam.state_dict()["state"][0]["step"] == 0


def check_ranks_go_on(folder: str) -> None:
    def begin_one(seed: int) -> Training:
        torch.manual_seed(seed)
        model = nn.Sequential(speedtorch.Embedding(200, 2))
        speedtorch.shard(model)
        optimizer = optim.Adam(model.parameters(), lr=0.25)
        speedtorch.attach(optimizer, model)
        return model, [optimizer]

    def train_one(training: Training, steps: range) -> dict[str, Tensor]:
        model, (optimizer,) = training
        for number in steps:
            optimizer.zero_grad()
            model(torch.arange(number, 200, 3)).square().sum().backward()
            optimizer.step()
        table = model[0].table
        return {name: table[name].clone() for name in table.fields}

    training, way = begin_one(0), WithCheckpoint()
    train_one(training, range(3))
    way.save(training, Path(folder))
    expected = train_one(training, range(3, 5))
    again = begin_one(1)
    way.load(again, Path(folder))
    assert_same_content(train_one(again, range(3, 5)), expected)
    assert_same_content(again[1][0].state_dict()["state"][0]["step"], torch.tensor(5.0))


@pytest.mark.slow
def test_ranks_that_have_stepped_nothing_go_on(tmp_path: Path) -> None:
    in_processes(2, check_ranks_go_on, str(tmp_path))
