"""The benchmarks' table of TorchRec trains as one table of torch's does.

Needs torchrec: make clients.
"""

from __future__ import annotations

import importlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_processes import in_processes
from torch import Tensor, nn

from benchmarks import torchrec_ranks

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("torchrec")

ROWS, STEPS = 1001, 5


def block(table: torchrec_ranks.Table) -> Tensor:
    """The rows of this rank."""
    (rows,) = (param.detach() for param in table.rows.parameters())
    return rows


def trains_as_one_table() -> None:
    """Steps of both ways: gradients are averaged over the ranks, and the rows step by them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with mock.patch.object(torchrec_ranks, "DEVICE", "cuda"):
        place = torchrec_ranks.places()[0]
    sgd = importlib.import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType.EXACT_SGD
    place = place._replace(settings={"optimizer": sgd, "learning_rate": 0.5})  # no Adam on a CPU
    gradient = torch.randn(64, 8, generator=torch.Generator().manual_seed(rank))
    table = torchrec_ranks.Table(ROWS, place, gradient)
    blocks = [torch.empty(0)] * ranks
    dist.all_gather_object(blocks, block(table))
    alone = nn.Embedding(ROWS, 8, _weight=torch.cat(blocks))
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    for count, loop in ((64, table.steps), (64, table.pipelined), (32, table.pipelined)):
        drawn = [torch.randint(ROWS // 10, (count,)) * 9 for _ in range(STEPS)]
        assert len(list(loop([table.batch(ids) for ids in drawn]))) == STEPS
        for ids in drawn:
            optimizer.zero_grad()
            alone(ids).backward(gradient[:count])
            assert alone.weight.grad is not None
            dist.all_reduce(alone.weight.grad)
            alone.weight.grad /= ranks
            optimizer.step()
        own = alone.weight.detach().split([len(block) for block in blocks])[rank]
        torch.testing.assert_close(block(table), own)
        assert not torch.equal(own, blocks[rank])


def test_torchrecs_ranks_train_as_one_table() -> None:
    in_processes(2, trains_as_one_table)
