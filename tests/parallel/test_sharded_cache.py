"""A cache on each rank changes no number."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from interrupts import Lines, out_of_memory
from rank_backends import BACKENDS, ON_RANKS
from rank_processes import own_device
from sharded_training import own_rows, same
from torch import Tensor

import speedtorch
from speedtorch.step import hot_rows

pytestmark = ON_RANKS

RESTLESS: dict[str, Any] = {"FIRST": range(1 << 20), "EVERY": 16, "_SURE": 0.0}


def trained(cache: str | None, capacity: int | None = None, *, failures: int = 0) -> list[Tensor]:
    """The rows of this rank and their state after 20 steps, with so many failures to move rows."""
    torch.manual_seed(0)
    embedding = speedtorch.Embedding(200, 4, device=own_device(), cache=cache, capacity=capacity)
    speedtorch.shard(embedding)
    optimizer = torch.optim.Adam(embedding.parameters(), lr=0.1)
    speedtorch.attach(optimizer, embedding)
    random = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    batches = [(torch.rand(24, generator=random) ** 3 * 200).long() for _ in range(20)]
    for number, ids in enumerate(speedtorch.prefetch(batches, embedding, ids=lambda batch: batch)):
        optimizer.zero_grad()
        (embedding(ids) ** 2).sum().backward()
        optimizer.step()
        if number % 4 == 3:
            embedding.flush()  # rows of slots go home, and take them again
    if cache is not None:
        report = embedding.report()
        assert report.failed >= failures
        assert failures or report.rows_moved > 50
    embedding.flush()
    return own_rows(embedding)


@BACKENDS
@pytest.mark.parametrize("capacity", [None, 60], ids=["counted", "capacity"])
def test_ranks_with_caches_train_as_without(capacity: int | None) -> None:
    with patch.multiple(hot_rows, **RESTLESS):
        assert same(trained("1KiB", capacity), trained(None, capacity))


@BACKENDS
def test_an_out_of_memory_refresh_of_one_rank_blocks_no_rank() -> None:
    """Ranks would wait in vain for a rank that raised, in the lookup that it has left."""
    random = Random(0)

    def failing(move: Callable[..., None]) -> Callable[..., None]:
        def fails(*given: Any) -> None:
            with Lines([hot_rows.__file__], random.randint(1, 80), out_of_memory) as lines:
                move(*given)
            if lines.came_out:
                raise out_of_memory()

        return fails

    fails = torch.distributed.get_rank() == 1
    names = ("refresh", "_reload") if fails else ()
    methods = {name: failing(getattr(hot_rows.HotRows, name)) for name in names}
    with patch.multiple(hot_rows, **RESTLESS):
        plain = trained(None)
        with patch.multiple(hot_rows.HotRows, **methods) if fails else nullcontext():
            cached = trained("1KiB", failures=5 * fails)
    assert same(cached, plain)


@BACKENDS
def test_a_rank_without_rows_has_no_cache() -> None:
    for capacity in (None, 4):
        embedding = speedtorch.Embedding(1, 4, device=own_device(), cache="1KiB", capacity=capacity)
        speedtorch.shard(embedding)
        speedtorch.cache(embedding, "1KiB")
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
        for _ in range(2):
            embedding(torch.zeros(3, dtype=torch.int64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
