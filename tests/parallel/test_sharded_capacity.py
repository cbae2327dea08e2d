"""Rows of a capacity that are shared out train as those of one process without a capacity.

SPEEDTORCH_ROUNDS sets how many random programs run, 4 by default, and SPEEDTORCH_FIRST the first.
"""

from __future__ import annotations

import os

import pytest
from ordinary_run import programs
from rank_backends import BACKENDS, EVERY_WAY, RANKS, TWO_AND_THREE_RANKS
from rank_processes import in_processes
from sharded_capacity import (
    check_a_bad_id,
    check_a_capture,
    check_a_rank_without_rows,
    check_bytes,
    check_dropped_lookups,
    check_late_faults,
    check_lookups_in_another_order,
    check_more_than_a_share,
    check_padding,
    check_random_batches,
    check_rows_that_were_not_announced,
    check_too_many_rows,
    raised_late,
)
from sharded_training import FITS, FIXED, WAYS, WAYS_OF, check_collections, check_training

ROUNDS = int(os.environ.get("SPEEDTORCH_ROUNDS", programs(4)))
FIRST = int(os.environ.get("SPEEDTORCH_FIRST", "0"))


@EVERY_WAY
@TWO_AND_THREE_RANKS
def test_ranks_train_as_one_process_does(ranks: int, backend: str, every_way: bool) -> None:
    ways = WAYS if every_way else WAYS_OF[ranks]
    in_processes(ranks, check_training, ranks == 2, FIXED, ways, backend=backend)


@BACKENDS
def test_collections_train_as_in_one_process(backend: str) -> None:
    in_processes(2, check_collections, FITS["capacity"], backend=backend)


def check_faults(backend: str) -> None:
    """One after the other."""
    if backend == "nccl":
        check_a_capture()
    else:  # where it is raised at once
        check_too_many_rows()
        check_more_than_a_share()
        check_padding()
        check_a_bad_id()
    check_rows_that_were_not_announced()
    check_lookups_in_another_order()
    with raised_late():
        check_lookups_in_another_order()
    check_late_faults()
    check_a_rank_without_rows()


@RANKS
def test_too_many_rows_of_one_rank_raise_on_all(ranks: int, backend: str) -> None:
    in_processes(ranks, check_faults, backend, backend=backend)


@RANKS
def test_ranks_send_blocks_of_a_fair_share(ranks: int, backend: str) -> None:
    in_processes(ranks, check_bytes, backend=backend)


@RANKS
def test_ranks_begin_the_same_steps_of_dropped_lookups(ranks: int, backend: str) -> None:
    in_processes(ranks, check_dropped_lookups, backend=backend)


@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(n, marks=pytest.mark.nightly) for n in (3, 4))]
)
def test_random_batches_are_trained_or_raise_on_all(ranks: int) -> None:
    in_processes(ranks, check_random_batches, FIRST, ROUNDS)
