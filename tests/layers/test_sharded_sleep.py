"""Training states sleep on ranks of DistributedDataParallel and FSDP2."""

from __future__ import annotations

import pytest
from rank_backends import DEALT_RANKS
from rank_processes import in_processes
from sharded_sleep import check_sleep


@DEALT_RANKS
@pytest.mark.parametrize("way", ["ddp", "ddp views", "fully_shard", "fully_shard bfloat16"])
def test_ranks_train_as_if_they_had_not_slept(way: str, ranks: int, backend: str) -> None:
    in_processes(ranks, check_sleep, way, backend=backend)
