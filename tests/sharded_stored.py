"""Rows of 16 bits that are shared out: rounded as in one process."""

from __future__ import annotations

import torch
from rank_processes import own_device
from torch import Tensor
from torch.distributed import get_rank, get_world_size

import speedtorch
from speedtorch.table.shared_rows import SharedRows

ROWS, STEPS = 300, 12


def _batches(rank: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(rank)
    return [torch.randint(ROWS, (24,), generator=random) for _ in range(STEPS)]


def _trained(
    parts: list[list[Tensor]], capacity: int | None, device: torch.device, *, shard: bool
) -> speedtorch.Embedding:
    """Gradients are whole numbers, so that no order of adding shows."""
    torch.manual_seed(0 if not shard else get_rank())  # the first rank's seed is that of all
    embedding = speedtorch.Embedding(
        ROWS, 6, device=device, capacity=capacity, stored={"weight": torch.bfloat16}
    ).init_(torch.nn.init.constant_, 0.3)
    if shard:
        speedtorch.shard(embedding, average=False)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.01, momentum=0.9)
    speedtorch.attach(optimizer, embedding)
    factors = torch.arange(1.0, 7.0, device=device)
    for several in zip(*parts, strict=True):
        optimizer.zero_grad()
        (embedding(torch.cat(several)) * factors).sum().backward()
        optimizer.step()
    embedding.flush()
    return embedding


def check_stored(capacity: int | None) -> None:
    """Each rank's rows are those of one process with all batches, bit for bit."""
    device, ranks = own_device(), range(get_world_size())
    every = [_batches(rank) for rank in ranks]
    ours = _trained([every[get_rank()]], capacity, device, shard=True)
    theirs = _trained(every, None, device, shard=False)
    rows = ours.state_dict()["weight"]
    assert isinstance(rows, SharedRows)
    expected = theirs.table["weight"]
    assert rows.field.dtype == torch.bfloat16
    for there, here in rows.blocks:
        own = rows.field[here.start : here.stop]
        assert torch.equal(own, expected[there.start : there.stop])
    assert ours.rounding_state.tolist() == theirs.rounding_state.tolist()
