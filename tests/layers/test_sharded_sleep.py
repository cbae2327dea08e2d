"""Training states on ranks of DistributedDataParallel and FSDP2: offloaded, or state in buckets."""

from __future__ import annotations

import pytest
from rank_backends import TWO_AND_THREE_RANKS
from rank_processes import in_processes
from sharded_sleep import check_sleep, check_state_swapper, check_written_asleep


@TWO_AND_THREE_RANKS
@pytest.mark.parametrize("way", ["ddp", "ddp views", "fully_shard", "fully_shard bfloat16"])
def test_ranks_train_as_if_they_had_not_slept(way: str, ranks: int, backend: str) -> None:
    in_processes(ranks, check_sleep, way, backend=backend)


@TWO_AND_THREE_RANKS
@pytest.mark.parametrize("how", ["set_state_dict", "load_state_dict", "in place"])
def test_ranks_compute_with_values_written_while_offloaded(
    how: str, ranks: int, backend: str
) -> None:
    in_processes(ranks, check_written_asleep, how, backend=backend)


@TWO_AND_THREE_RANKS
@pytest.mark.parametrize(
    "way",
    [
        "ddp",
        "fully_shard",
        "fully_shard bfloat16",
        "fully_shard offloaded",
        "fully_shard bfloat16 offloaded",
    ],
)
def test_ranks_step_as_with_all_state_on_the_device(way: str, ranks: int, backend: str) -> None:
    in_processes(ranks, check_state_swapper, way, backend=backend)
