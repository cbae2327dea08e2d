"""Rows that are shared out, of which each rank has a cache."""

from __future__ import annotations

from unittest.mock import patch

import torch
from rank_processes import own_device
from torch import Tensor

import speedtorch
from speedtorch.step import hot_rows


def _trained(cache: str | None, capacity: int | None, device: torch.device) -> list[Tensor]:
    """The rows of this rank and their state after 20 steps."""
    torch.manual_seed(0)
    embedding = speedtorch.Embedding(200, 4, device=device, cache=cache, capacity=capacity)
    speedtorch.shard(embedding)
    optimizer = torch.optim.Adam(embedding.parameters(), lr=0.1)
    speedtorch.attach(optimizer, embedding)
    random = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    batches = [(torch.rand(24, generator=random) ** 3 * 200).long() for _ in range(20)]
    for ids in speedtorch.prefetch(batches, embedding, ids=lambda batch: batch):
        optimizer.zero_grad()
        (embedding(ids) ** 2).sum().backward()
        optimizer.step()
    assert cache is None or embedding.report().rows_moved > 50
    embedding.flush()
    return [embedding.table[name].clone() for name in embedding.table.fields]


def check_cache(capacity: int | None) -> None:
    """Ranks train with a cache each as without."""
    restless = {"FIRST": range(1 << 20), "EVERY": 16, "_SURE": 0.0}
    with patch.multiple(hot_rows, **restless):
        each = [_trained(cache, capacity, own_device()) for cache in (None, "1KiB")]
    for rows, others in zip(*each, strict=True):
        assert torch.equal(rows, others)
