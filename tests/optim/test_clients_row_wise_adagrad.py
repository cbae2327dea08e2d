"""RowWiseAdagrad has the numbers of torchrec's optimizer and of FBGEMM's.

Needs those libraries: make clients.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from reference import assert_same_bytes
from test_row_wise_adagrad import drawn
from torch import nn

import speedtorch
from speedtorch.optim import RowWiseAdagrad

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

ROWS, WIDTH, STEPS = 50, 33, 20
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "decay": {"weight_decay": 0.1, "lr_decay": 0.2},
    "maximize": {"maximize": True, "eps": 1e-3},
    # torchrec's first sum is a mean of these, which rounds another value.
    "first sum": {"initial_accumulator_value": 0.25},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_torchrecs_optimizer_has_the_same_bits(options: dict[str, Any], dtype: torch.dtype) -> None:
    torchrec = pytest.importorskip("torchrec.optim.rowwise_adagrad")
    ours, theirs = (nn.Parameter(drawn((ROWS, WIDTH), 1, dtype)) for _ in range(2))
    optimizers = [RowWiseAdagrad([ours], **options), torchrec.RowWiseAdagrad([theirs], **options)]
    for step in range(STEPS):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = drawn((ROWS, WIDTH), 2 + step, dtype)
            parameter.grad[step % 3 :: 3] = 0
            optimizer.step()
        if step == STEPS // 2:  # each goes on with the state of the other
            states = [copy.deepcopy(optimizer.state_dict()["state"]) for optimizer in optimizers]
            for optimizer, state in zip(optimizers, reversed(states), strict=True):
                optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    assert_same_bytes(ours.detach(), theirs.detach())
    states = [optimizer.state[p] for optimizer, p in zip(optimizers, (ours, theirs), strict=True)]
    assert_same_bytes(states[0]["sum"], states[1]["sum"])
    assert states[0]["step"] == states[1]["step"] == STEPS


def test_fbgemms_exact_row_wise_adagrad_has_the_same_numbers() -> None:
    """Without weight decay: FBGEMM 1.8.0 has none on the CPU, whatever it is given."""
    training = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    place = (training.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
    theirs = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, 8, *place)],
        optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.1,
        eps=1e-6,
    )
    values = drawn((ROWS, 8), 1)
    theirs.split_embedding_weights()[0].data.copy_(values)
    ours = speedtorch.EmbeddingBag.from_pretrained(values, freeze=False, mode="sum")
    optimizer = RowWiseAdagrad(ours.parameters(), lr=0.1, eps=1e-6)
    speedtorch.attach(optimizer, ours)
    random = torch.Generator().manual_seed(2)
    for step in range(STEPS):
        ids, offsets = torch.randint(ROWS, (30,), generator=random), torch.tensor([0, 11, 12, 30])
        factors = drawn((3, 8), 3 + step)
        (theirs(ids, offsets) * factors).sum().backward()
        optimizer.zero_grad()
        (ours(ids, offsets[:-1]) * factors).sum().backward()
        optimizer.step()
    torch.testing.assert_close(ours.state_dict()["weight"], theirs.split_embedding_weights()[0])
    (own,), ((found,),) = optimizer.state_dict()["state"].values(), theirs.split_optimizer_states()
    torch.testing.assert_close(own["sum"].flatten(), found)
