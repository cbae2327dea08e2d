"""Loops of prefetch over rows that ranks share: they go at one pace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rank_backends import BACKENDS
from rank_processes import in_processes
from sharded_pace import check_bad_ids, check_decisions, check_evaluations, check_whose_pace


@pytest.mark.parametrize("check", [check_decisions, check_whose_pace, check_bad_ids])
def test_ranks_decide_together(check: Callable[[], None]) -> None:
    in_processes(2, check)


@BACKENDS
def test_an_evaluation_may_prefetch_within_a_training_that_does(backend: str) -> None:
    in_processes(2, check_evaluations, backend=backend)
