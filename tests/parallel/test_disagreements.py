"""Differences among ranks raise on all ranks, before any row has changed."""

from __future__ import annotations

import pytest
from rank_processes import in_groups_at_once, in_processes
from sharded_disagreements import (
    check_flagged_errors,
    check_join,
    check_late_calls,
    check_meshes,
    check_other_calls,
    check_other_calls_on_machines,
    check_other_models,
    check_other_steps,
    check_own_errors,
    check_replicas,
    check_replicas_of_meshes,
    check_skipped_batches,
)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_setting_that_differs_is_named(ranks: int) -> None:
    in_processes(ranks, check_other_models)


def test_a_mesh_is_refused_with_the_remedy() -> None:
    in_processes(2, check_meshes)


# The ordinary run has each call that differs once, on one machine or between two, and some calls
# again with a capacity.
ALL, FIRST, SECOND, THIRD = slice(None), slice(0, None, 2), slice(1, None, 2), slice(2, None, 3)


@pytest.mark.parametrize(
    ("ranks", "capacity", "part"),
    [
        pytest.param(2, None, FIRST, id="2-counted-half"),
        pytest.param(2, 41, THIRD, id="2-capacity-third"),
        *(
            pytest.param(ranks, capacity, ALL, id=f"{ranks}-{name}", marks=pytest.mark.nightly)
            for ranks in (2, 3)
            for capacity, name in ((None, "counted"), (41, "capacity"))
        ),
    ],
)
def test_an_exchange_that_differs_is_named_before_a_row_changes(
    ranks: int, capacity: int | None, part: slice
) -> None:
    in_processes(ranks, check_other_calls, capacity, part)


@pytest.mark.parametrize(
    ("capacity", "part"),
    [
        pytest.param(None, SECOND, id="counted-half"),
        pytest.param(None, ALL, id="counted", marks=pytest.mark.nightly),
        pytest.param(41, ALL, id="capacity", marks=pytest.mark.nightly),
    ],
)
def test_an_exchange_that_differs_on_several_machines_is_named(
    capacity: int | None, part: slice
) -> None:
    in_processes(2, check_other_calls_on_machines, capacity, part)


@pytest.mark.parametrize(("ranks", "capacity"), [(2, None), (3, 41)])
def test_a_step_that_differs_is_named_before_a_row_changes(
    ranks: int, capacity: int | None
) -> None:
    in_processes(ranks, check_other_steps, capacity)


def test_a_backward_that_differs_changes_no_row_if_errors_are_raised_late() -> None:
    in_processes(2, check_late_calls)


def test_replicas_of_shared_rows_are_refused_on_all_ranks() -> None:
    in_processes(4, check_replicas)


def test_replicas_of_fully_shard_and_replicate_are_refused() -> None:
    in_processes(4, check_replicas_of_meshes)


def test_a_batch_is_skipped_on_one_rank_or_on_all() -> None:
    in_processes(2, check_skipped_batches)


def test_join_is_refused_at_the_first_lookup() -> None:
    in_processes(2, check_join)


def test_an_all_reduced_error_of_one_rank_skips_a_batch() -> None:
    in_processes(2, check_flagged_errors)


@pytest.mark.parametrize(
    ("ranks", "on_machine"),
    [(2, True), (2, False), pytest.param(3, True, marks=pytest.mark.nightly)],
)
def test_an_error_of_one_rank_raises_on_the_waiting_ranks(ranks: int, on_machine: bool) -> None:
    """Before its lookup, after it or in backward."""
    timeout = 3.0  # also of the steps before, on a machine that other tests keep busy
    calls = [(where, on_machine, timeout) for where in ("before", "after", "within")]
    in_groups_at_once(ranks, check_own_errors, *calls, timeout=timeout)
