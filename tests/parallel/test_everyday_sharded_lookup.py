"""A lookup of sharded rows calls few ops, because the host is the bottleneck."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from dispatched_ops import Ops
from rank_backends import ON_RANKS
from sharded_training import raised_late
from torch import Tensor, nn, optim

import speedtorch

pytestmark = ON_RANKS

KEYS = [f"t{number}" for number in range(26)]
COUNTED = ["shard_ids", "alltoall_base_", "load_batch", "embedding", "alltoall_base_"]
REQUESTED = ["shard_ids", "alltoall_base_", "requested_ids"]
HELD = ["diff_ids", "exchange_rows", "hold_rows", "embedding", "alltoall_base_"]
NUMBER = "_local_scalar_dense"  # of one tensor, which the CPU reads
AT_ONCE = [*REQUESTED, NUMBER, "plan_batch", NUMBER, "plan_fault", "allreduce_", NUMBER, *HELD]
# As on a GPU, where nothing is read.
LATE = [*REQUESTED, "plan_batch", "plan_fault", "maximum", "allreduce_", "spoil_plan", *HELD]
BACKWARD = ["sum_rows", "alltoall_base_", "sum_rows"]
IN_BLOCKS = ["sum_rows", "index_select", "alltoall_base_", "sum_rows"]
WAYS = {
    "counted": (None, False, COUNTED, BACKWARD),
    "capacity": (4096, False, AT_ONCE, IN_BLOCKS),
    "capacity, raised late": (4096, True, LATE, IN_BLOCKS),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_lookup_calls_few_ops(way: str) -> None:
    """The ops of an Embedding and of a collection."""
    capacity, late, forward, backward = WAYS[way]
    tables = [speedtorch.EmbeddingBagConfig(1000, 8, key) for key in KEYS]
    modules: list[nn.Module] = [
        speedtorch.Embedding(1000, 8, capacity=capacity),
        speedtorch.EmbeddingBagCollection(tables, capacity=capacity),
    ]
    expected = [
        ["clone", *forward, "embedding"],
        ["cat", "table_ids", "clone", *forward, "pool_rows"],
    ]
    for module, names in zip(modules, expected, strict=True):
        speedtorch.shard(module)
        optimizer = optim.SGD(module.parameters(), lr=0.1)
        speedtorch.attach(optimizer, module)
        with raised_late() if late else nullcontext():
            for _ in range(3):
                ids = {key: torch.randint(1000, (64,)) for key in KEYS}
                with Ops() as ops:
                    found = module(ids[KEYS[0]] if module is modules[0] else ids)
                rows: Tensor = found if isinstance(found, Tensor) else found.values()
                optimizer.zero_grad()
                with Ops() as back:
                    rows.backward(torch.ones_like(rows))
                optimizer.step()
        assert ops.names == names
        assert [name for name in back.names if name != "ones_like"] == backward
