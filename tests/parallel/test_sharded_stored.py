"""Ranks round rows of 16 bits as one process does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from rank_backends import BACKENDS, ON_RANKS
from rank_processes import own_device
from sharded_training import assert_own_rows, row_modules, train_both
from torch.distributed import get_rank

import speedtorch
from speedtorch.nn.row_module import RowModule

pytestmark = ON_RANKS

ROWS, STEPS = 300, 12


def embedding(**settings: Any) -> RowModule:
    return speedtorch.Embedding(ROWS, 6, **settings)


def collection(**settings: Any) -> speedtorch.EmbeddingCollection:
    return speedtorch.EmbeddingCollection([speedtorch.EmbeddingConfig(ROWS, 6, "t")], **settings)


def train(model: Any, ranks: Sequence[int]) -> None:
    """Gradients are whole numbers, so that no order of adding shows."""
    drawn = [torch.Generator().manual_seed(rank) for rank in ranks]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    speedtorch.attach(optimizer, model)
    factors = torch.arange(1.0, 7.0, device=own_device())
    for _ in range(STEPS):
        optimizer.zero_grad()
        ids = torch.cat([torch.randint(ROWS, (24,), generator=random) for random in drawn])
        found = model(ids) if isinstance(model, RowModule) else model({"t": ids})["t"].values()
        ((found * factors).sum() / len(ranks)).backward()
        optimizer.step()


@BACKENDS
@pytest.mark.parametrize(
    ("kind", "capacity"),
    [(embedding, None), (embedding, 60), (collection, None)],
    ids=["counted", "capacity", "collection"],
)
def test_ranks_round_as_one_process_does(kind: Callable[..., Any], capacity: int | None) -> None:
    def make(seed: int, capacity: int | None = None) -> Any:
        torch.manual_seed(seed)  # that of the first rank is used on all
        stored = {"weight": torch.bfloat16}
        model = kind(stored=stored, capacity=capacity, device=own_device())
        row_modules(model)[0].init_(torch.nn.init.constant_, 0.3)
        return model

    make_shard = partial(make, get_rank(), capacity)
    model, whole = train_both(make_shard, train, make_whole=partial(make, 0))
    assert_own_rows(model, whole)
    (ours,), (theirs,) = row_modules(model), row_modules(whole)
    assert ours.table["weight"].dtype == torch.bfloat16
    assert ours.rounding_state.tolist() == theirs.rounding_state.tolist()
