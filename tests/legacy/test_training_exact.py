"""Training through ModelFactory and OptimizerFactory equals training the same rows in place.

The reference knows nothing of our classes: full-size tensors for the weight and every state field;
each step takes the batch's rows out with index_select, runs the same optimizer on them, and puts
them back with index_copy_. Everything is compared bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from conftest import NEEDS_GPU
from optimizer_cases import CASES, GPU_VARIANTS, VARIANTS, Case, first_scalars, make_optimizer
from reference import assert_same_content
from torch import Tensor, nn, optim

import speedtorch

pytestmark = pytest.mark.slow

ROWS = 60
STEPS = 12
WIDTHS = (1, 3, 47, 100, 128)


class Model(nn.Module):
    """An embedding of one batch, and a variable of its own group that is trained as well."""

    def __init__(self, width: int, *, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1, width, sparse=sparse)
        self.scale = nn.Parameter(torch.full((width,), 0.5), requires_grad=not sparse)

    def forward(self, positions: Tensor, targets: Tensor) -> Tensor:
        return (self.embedding(positions) * self.scale - targets).square().sum()


class Trained(NamedTuple):
    """What training leaves behind."""

    weight: Tensor
    rows: dict[str, Tensor]
    scalars: dict[str, Any]
    scale: Tensor
    scale_state: dict[str, Any]


def build(case: Case, variant: str, width: int, device: str) -> tuple[Model, optim.Optimizer]:
    sparse = case.make is optim.SparseAdam
    model = Model(width, sparse=sparse).to(device)
    others = [] if sparse else [model.scale]
    return model, make_optimizer(case, variant, model.embedding.weight, others)


def first_weight(width: int) -> Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(1))


def batches(width: int) -> list[tuple[Tensor, Tensor]]:
    """Distinct ids in random order, in changing numbers, and targets `[ids, width]`."""
    random = torch.Generator().manual_seed(2)
    result = []
    for step in range(STEPS):
        ids = torch.randperm(ROWS, generator=random)[: 1 + (step * 7) % 23]
        result.append((ids, torch.randn(ids.numel(), width, generator=random)))
    return result


def learn(model: Model, optimizer: optim.Optimizer, targets: Tensor) -> None:
    device = model.scale.device
    optimizer.zero_grad()
    model(torch.arange(len(targets), device=device), targets.to(device)).backward()
    optimizer.step()


def train_in_place(case: Case, variant: str, width: int, device: str) -> Trained:
    model, optimizer = build(case, variant, width, device)
    parameter = model.embedding.weight
    weight = first_weight(width).to(device)
    rows = {name: torch.full_like(weight, value) for name, value in case.rows.items()}
    scalars = first_scalars(case, variant, device)
    for ids, targets in batches(width):
        ids = ids.to(device)
        parameter.grad = None
        parameter.data = weight.index_select(0, ids)
        taken = {name: each.index_select(0, ids) for name, each in rows.items()}
        optimizer.state[parameter] = {**scalars, **taken}
        learn(model, optimizer, targets)
        state = optimizer.state[parameter]
        weight.index_copy_(0, ids, parameter.data)
        for name, each in rows.items():
            each.index_copy_(0, ids, state[name])
        scalars = {name: state[name] for name in scalars}
    scale_state = dict(optimizer.state.get(model.scale, {}))
    return Trained(weight, rows, scalars, model.scale.detach(), scale_state)


def train_through_factories(
    case: Case, variant: str, width: int, device: str, *, shared: bool = False
) -> Trained:
    model, optimizer = build(case, variant, width, device)
    table = speedtorch.HostTable(ROWS, width, state=tuple(case.rows)) if shared else None
    weights = speedtorch.ModelFactory(model.embedding, ROWS, width, CPUPinn=True, table=table)
    states = speedtorch.OptimizerFactory(
        optimizer, ROWS, width, model, "embedding", CPUPinn=True, table=table
    )
    weights.zerosInit()
    weights.getCupyVar().copy_(first_weight(width))
    states.optInit()
    for ids, targets in batches(width):
        weights.beforeForwardPass(ids)
        states.beforeForwardPass(ids)
        learn(model, optimizer, targets)
        weights.afterOptimizerStep(ids)
        states.afterOptimizerStep(ids)
    speedtorch.synchronize()
    state = optimizer.state[model.embedding.weight]
    return Trained(
        weights.getCupyVar(),
        states.getCupyVar(),
        {name: value for name, value in state.items() if name not in case.rows},
        model.scale.detach(),
        dict(optimizer.state.get(model.scale, {})),
    )


@pytest.mark.dealt("width")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("case", "variant"), VARIANTS)
def test_training_equals_training_in_place_bit_for_bit(
    case: Case, variant: str, width: int
) -> None:
    expected = train_in_place(case, variant, width, "cpu")
    assert_same_content(train_through_factories(case, variant, width, "cpu"), expected)


@pytest.mark.parametrize(("case", "variant"), VARIANTS)
def test_training_with_one_shared_table_is_the_same_bit_for_bit(case: Case, variant: str) -> None:
    expected = train_in_place(case, variant, 47, "cpu")
    actual = train_through_factories(case, variant, 47, "cpu", shared=True)
    assert_same_content(actual, expected)


@NEEDS_GPU
@pytest.mark.parametrize("shared", [False, True], ids=["two-tables", "shared-table"])
@pytest.mark.parametrize(("case", "variant"), GPU_VARIANTS)
def test_training_on_a_gpu_equals_training_in_place_on_it_bit_for_bit(
    case: Case, variant: str, shared: bool
) -> None:
    expected = train_in_place(case, variant, 47, "cuda")
    actual = train_through_factories(case, variant, 47, "cuda", shared=shared)
    assert_same_content(actual, expected)


def test_the_reference_moves_rows_and_leaves_others_alone() -> None:
    # Guards the tests above: a reference that trained nothing would equal anything.
    trained = train_in_place(CASES["Adamax"], "single", 3, "cpu")
    touched = torch.zeros(ROWS, dtype=torch.bool)
    for ids, _ in batches(3)[:3]:
        touched[ids] = True
    assert not torch.equal(trained.weight[touched], first_weight(3)[touched])
    assert trained.scalars["step"].item() == STEPS
