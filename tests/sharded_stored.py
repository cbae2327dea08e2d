"""Rows of 16 bits that are shared out: rounded as in one process."""

from __future__ import annotations

from typing import Any

import torch
from rank_processes import own_device
from torch import Tensor
from torch.distributed import get_rank, get_world_size

import speedtorch
from speedtorch.nn.row_module import RowModule
from speedtorch.table.row_shard import RowShard

ROWS, STEPS = 300, 12


def _batches(rank: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(rank)
    return [torch.randint(ROWS, (24,), generator=random) for _ in range(STEPS)]


def _made(collection: bool, **settings: Any) -> tuple[Any, RowModule, Any]:
    """A model, what has its rows, and a lookup."""
    settings |= {"stored": {"weight": torch.bfloat16}}
    if not collection:
        embedding = speedtorch.Embedding(ROWS, 6, **settings)
        return embedding, embedding, embedding
    tables = [speedtorch.EmbeddingConfig(ROWS, 6, "wide")]
    model = speedtorch.EmbeddingCollection(tables, **settings)
    return model, model.group_of("wide"), lambda ids: model({"wide": ids})["wide"].values()


def _trained(
    parts: list[list[Tensor]], collection: bool, capacity: int | None, shard: bool
) -> tuple[Any, RowModule]:
    """A model and what has its rows; gradients are whole numbers: no order of adding shows."""
    torch.manual_seed(0 if not shard else get_rank())  # the first rank's seed is that of all
    device = own_device()
    model, embedding, look_up = _made(collection, device=device, capacity=capacity)
    embedding.init_(torch.nn.init.constant_, 0.3)
    if shard:
        speedtorch.shard(model, average=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    speedtorch.attach(optimizer, model)
    factors = torch.arange(1.0, 7.0, device=device)
    for several in zip(*parts, strict=True):
        optimizer.zero_grad()
        (look_up(torch.cat(several)) * factors).sum().backward()
        optimizer.step()
    embedding.flush()
    return model, embedding


def check_stored(collection: bool, capacity: int | None) -> None:
    """Each rank's rows are those of one process with all batches, bit for bit."""
    every = [_batches(rank) for rank in range(get_world_size())]
    model, ours = _trained([every[get_rank()]], collection, capacity, shard=True)
    _, theirs = _trained(every, collection, None, shard=False)
    (rows,) = (values for name, values in model.state_dict().items() if name.endswith("weight"))
    assert isinstance(rows, RowShard)
    expected = theirs.table["weight"]
    assert rows.field.dtype == torch.bfloat16
    for in_table, in_shard in rows.blocks:
        own = rows.field[in_shard.start : in_shard.stop]
        assert torch.equal(own, expected[in_table.start : in_table.stop])
    assert ours.rounding_state.tolist() == theirs.rounding_state.tolist()
