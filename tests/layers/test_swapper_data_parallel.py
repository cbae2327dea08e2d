"""Modules of a model in DistributedDataParallel: the bits of plain data parallel, or an error."""

from __future__ import annotations

import pytest
from conftest import NEEDS_GPU
from data_parallel_modules import (
    CASES,
    check_a_case_of_data_parallel,
    check_modules_of_data_parallel,
    check_modules_that_data_parallel_ignores,
    check_modules_whose_nodes_are_lost,
    check_refusals_of_data_parallel,
    check_searches_for_nodes,
)
from rank_backends import NEEDS_GPUS
from rank_processes import in_processes

WAYS = pytest.mark.parametrize("way", ["auto", "use"])
MADE = pytest.mark.parametrize("made", ["before", "after"])


@pytest.mark.slow
@WAYS
def test_modules_train_as_in_plain_data_parallel(way: str) -> None:
    in_processes(2, check_modules_of_data_parallel, way, "after")


@WAYS
@MADE
@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=NEEDS_GPU), pytest.param(2, marks=NEEDS_GPUS)]
)
def test_modules_train_as_in_plain_data_parallel_on_gpus(ranks: int, way: str, made: str) -> None:
    in_processes(ranks, check_modules_of_data_parallel, way, made, backend="nccl")


@pytest.mark.slow
@WAYS
@MADE
def test_modules_whose_moves_lose_nodes_train_as_in_plain_data_parallel(
    way: str, made: str
) -> None:
    in_processes(2, check_modules_whose_nodes_are_lost, way, made)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_happens_beside_data_parallel_changes_no_number(case: str) -> None:
    in_processes(2, check_a_case_of_data_parallel, case)


@pytest.mark.slow
def test_a_search_for_lost_nodes_is_refused_by_name() -> None:
    in_processes(2, check_searches_for_nodes)


@pytest.mark.slow
def test_what_data_parallel_would_get_wrong_is_refused_by_name() -> None:
    in_processes(2, check_refusals_of_data_parallel)


@pytest.mark.slow
def test_modules_that_data_parallel_ignores_may_be_stepped_in_backward() -> None:
    in_processes(2, check_modules_that_data_parallel_ignores)
