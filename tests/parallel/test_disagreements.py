"""Ranks that differ are told on all of them, by name, before anything has changed."""

from __future__ import annotations

import pytest
from rank_processes import in_processes
from sharded_disagreements import (
    check_late_calls,
    check_meshes,
    check_other_calls,
    check_other_calls_on_machines,
    check_other_models,
    check_replicas,
)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_setting_that_differs_is_named(ranks: int) -> None:
    in_processes(ranks, check_other_models)


def test_a_mesh_is_refused_with_the_remedy() -> None:
    in_processes(2, check_meshes)


@pytest.mark.dealt("capacity")
@pytest.mark.dealt("ranks")
@pytest.mark.parametrize("capacity", [None, 41], ids=["counted", "capacity"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_exchange_that_differs_is_named_before_a_row_changes(
    ranks: int, capacity: int | None
) -> None:
    in_processes(ranks, check_other_calls, capacity)


@pytest.mark.dealt("capacity")
@pytest.mark.parametrize(
    "capacity",
    [None, pytest.param(41, marks=pytest.mark.nightly)],
    ids=["counted", "capacity"],
)
def test_so_is_one_between_machines(capacity: int | None) -> None:
    in_processes(2, check_other_calls_on_machines, capacity)


def test_a_backward_that_differs_changes_no_row_where_errors_come_late() -> None:
    in_processes(2, check_late_calls)


def test_replicas_of_shared_rows_are_refused_on_all_ranks() -> None:
    in_processes(4, check_replicas)
