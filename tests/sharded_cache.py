"""Rows that are shared out, of which each rank has a cache."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from interrupts import Lines, out_of_memory
from rank_processes import own_device
from torch import Tensor

import speedtorch
from speedtorch.step import hot_rows

RESTLESS: dict[str, Any] = {"FIRST": range(1 << 20), "EVERY": 16, "_SURE": 0.0}


def _trained(
    cache: str | None, capacity: int | None, device: torch.device, *, failures: int = 0
) -> list[Tensor]:
    """The rows of this rank and their state after 20 steps, with so many failures to move rows."""
    torch.manual_seed(0)
    embedding = speedtorch.Embedding(200, 4, device=device, cache=cache, capacity=capacity)
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
    return [embedding.table[name].clone() for name in embedding.table.fields]


def check_cache(capacity: int | None) -> None:
    """Ranks train with a cache each as without."""
    with patch.multiple(hot_rows, **RESTLESS):
        results = [_trained(cache, capacity, own_device()) for cache in (None, "1KiB")]
    for rows, expected in zip(*results, strict=True):
        assert torch.equal(rows, expected)


def check_too_little_memory() -> None:
    """Memory runs out on one rank at lines that move rows: no rank waits in vain, or trains else.

    Where the rank raised, the others would wait for it in the lookup that it has left.
    """
    random = Random(0)

    def failing(move: Callable[..., None]) -> Callable[..., None]:
        def fails(*given: Any) -> None:
            with Lines([hot_rows.__file__], random.randint(1, 80), out_of_memory) as lines:
                move(*given)
            if lines.came_out:
                raise out_of_memory()

        return fails

    methods = ("refresh", "_reload")
    failing_methods = {name: failing(getattr(hot_rows.HotRows, name)) for name in methods}
    with patch.multiple(hot_rows, **RESTLESS):
        plain = _trained(None, None, own_device())
        if torch.distributed.get_rank() == 1:
            with patch.multiple(hot_rows.HotRows, **failing_methods):
                cached = _trained("1KiB", None, own_device(), failures=5)
        else:
            cached = _trained("1KiB", None, own_device())
    for rows, expected in zip(cached, plain, strict=True):
        assert torch.equal(rows, expected)


def check_fewer_rows_than_ranks() -> None:
    """A rank without rows has no cache, and raises nothing."""
    for capacity in (None, 4):
        embedding = speedtorch.Embedding(1, 4, device=own_device(), cache="1KiB", capacity=capacity)
        speedtorch.shard(embedding)
        speedtorch.cache(embedding, "1KiB")
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
        for _ in range(2):
            embedding(torch.zeros(3, dtype=torch.int64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
