"""Training through ModelFactory and OptimizerFactory equals training the same rows in place.

Everything is compared bit for bit.
"""

from __future__ import annotations

import pytest
import torch
from conftest import NEEDS_GPU
from embedding_reference import Squares, Trained, first_weight, train_in_place, trained
from optimizer_cases import CASES, GPU_VARIANTS, VARIANTS, Case, make_optimizer
from reference import assert_same_content
from torch import Tensor, nn, optim

import speedtorch

pytestmark = pytest.mark.slow

ROWS = 60
STEPS = 12
WIDTHS = (1, 3, 47, 100, 128)


def batches() -> list[Tensor]:
    """Distinct ids in random order, in changing numbers."""
    random = torch.Generator().manual_seed(2)
    return [torch.randperm(ROWS, generator=random)[: 1 + (7 * n) % 23] for n in range(STEPS)]


def in_place(case: Case, variant: str, width: int, device: str) -> Trained:
    return train_in_place(case, variant, width, device, ROWS, batches(), distinct=True)


def train_through_factories(
    case: Case, variant: str, width: int, device: str, *, shared: bool = False
) -> Trained:
    sparse = case.make is optim.SparseAdam
    loss = Squares(width, device, dense=not sparse)
    model = nn.ModuleDict({"embedding": nn.Embedding(1, width, sparse=sparse, device=device)})
    weight = model["embedding"].weight
    optimizer = make_optimizer(case, variant, weight, [] if sparse else [loss.scale])
    state = dict.fromkeys(case.rows, (1 if case.by_rows else width, torch.float32))
    table = speedtorch.HostTable(ROWS, width, state=state) if shared else None
    weights = speedtorch.ModelFactory(model["embedding"], ROWS, width, CPUPinn=True, table=table)
    states = speedtorch.OptimizerFactory(
        optimizer, ROWS, width, model, "embedding", CPUPinn=True, table=table
    )
    weights.zerosInit()
    weights.getCupyVar().copy_(first_weight(ROWS, width))
    states.optInit()
    for ids in batches():
        weights.beforeForwardPass(ids)
        states.beforeForwardPass(ids)
        optimizer.zero_grad()
        loss(model["embedding"](torch.arange(len(ids), device=device))).backward()
        optimizer.step()
        weights.afterOptimizerStep(ids)
        states.afterOptimizerStep(ids)
    speedtorch.synchronize()
    fields = {**states.getCupyVar(), "weight": weights.getCupyVar()}
    return trained(case, optimizer, weight, fields, loss.scale)


@pytest.mark.dealt("variant", "width")
@pytest.mark.parametrize(("width", "shared"), [*((width, False) for width in WIDTHS), (47, True)])
@pytest.mark.parametrize(("case", "variant"), VARIANTS)
def test_training_equals_training_in_place_bitwise(
    case: Case, variant: str, width: int, shared: bool
) -> None:
    expected = in_place(case, variant, width, "cpu")
    found = train_through_factories(case, variant, width, "cpu", shared=shared)
    assert_same_content(found, expected)


@NEEDS_GPU
@pytest.mark.parametrize("shared", [False, True], ids=["two-tables", "shared-table"])
@pytest.mark.parametrize(("case", "variant"), GPU_VARIANTS)
def test_training_on_a_gpu_equals_training_in_place_on_it_bit_for_bit(
    case: Case, variant: str, shared: bool
) -> None:
    expected = in_place(case, variant, 47, "cuda")
    actual = train_through_factories(case, variant, 47, "cuda", shared=shared)
    assert_same_content(actual, expected)


def test_the_reference_changes_only_the_rows_of_a_step() -> None:
    # Guards the tests above: a reference that trained nothing would equal anything.
    after = in_place(CASES["Adamax"], "single", 3, "cpu")
    touched = torch.zeros(ROWS, dtype=torch.bool)
    touched[torch.cat(batches())] = True
    assert torch.equal((after.weight != first_weight(ROWS, 3)).any(1), touched)
    assert after.scalars["step"].item() == STEPS
