"""Ranks round rows of 16 bits as one process does."""

from __future__ import annotations

import pytest
from rank_backends import BACKENDS
from rank_processes import in_processes
from sharded_stored import check_stored


@BACKENDS
@pytest.mark.parametrize(
    ("collection", "capacity"),
    [(False, None), (False, 60), (True, None)],
    ids=["counted", "capacity", "collection"],
)
def test_ranks_round_as_one_process_does(
    collection: bool, capacity: int | None, backend: str
) -> None:
    in_processes(2, check_stored, collection, capacity, backend=backend)
