"""A cache on each rank changes no number."""

from __future__ import annotations

import pytest
from rank_backends import BACKENDS
from rank_processes import in_processes
from sharded_cache import check_cache, check_fewer_rows_than_ranks, check_too_little_memory


@BACKENDS
@pytest.mark.parametrize("capacity", [None, 60], ids=["counted", "capacity"])
def test_ranks_with_caches_train_as_without(capacity: int | None, backend: str) -> None:
    in_processes(2, check_cache, capacity, backend=backend)


@BACKENDS
def test_an_out_of_memory_refresh_of_one_rank_blocks_no_rank(backend: str) -> None:
    in_processes(2, check_too_little_memory, backend=backend)


@BACKENDS
def test_a_rank_without_rows_has_no_cache(backend: str) -> None:
    in_processes(2, check_fewer_rows_than_ranks, backend=backend)
