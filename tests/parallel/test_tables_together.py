"""Tables that prefetch, announce or a collection knows together: one comparison, one exchange."""

from __future__ import annotations

import pytest
from rank_processes import in_groups_at_once, in_processes
from sharded_together import (
    check_a_group_that_is_too_large,
    check_an_error_of_one_rank,
    check_bad_ids,
    check_exchanges,
    check_groups,
    check_kinds,
    check_no_ids,
    check_no_ids_late,
    check_other_tables,
)

CAPACITY = pytest.mark.parametrize("capacity", [None, 41], ids=["counted", "capacity"])
MACHINES = pytest.mark.parametrize("on_machine", [True, False], ids=["machine", "machines"])


@CAPACITY
@MACHINES
def test_ranks_compare_and_request_once_for_all_tables(
    capacity: int | None, on_machine: bool
) -> None:
    in_processes(2, check_exchanges, capacity, on_machine)


@pytest.mark.parametrize(("ranks", "on_machine"), [(2, True), (3, True), (2, False)])
def test_tables_of_all_kinds_train_as_in_one_process(ranks: int, on_machine: bool) -> None:
    in_processes(ranks, check_kinds, on_machine)


@CAPACITY
@pytest.mark.parametrize(("ranks", "on_machine"), [(2, True), (3, False)])
def test_groups_that_exchange_rows_jointly_train_as_in_one_process(
    capacity: int | None, ranks: int, on_machine: bool
) -> None:
    in_processes(ranks, check_groups, capacity, on_machine)


@MACHINES
def test_a_group_that_is_too_large_raises_on_all_ranks(on_machine: bool) -> None:
    in_processes(2, check_a_group_that_is_too_large, on_machine)


def test_an_error_of_one_rank_loads_no_rows_of_other_tables() -> None:
    """On one machine, and between two."""
    in_groups_at_once(2, check_an_error_of_one_rank, (True,), (False,), timeout=2.0)


@pytest.mark.dealt("on_machine")
@CAPACITY
@MACHINES
def test_bad_ids_of_one_table_raise_on_all_ranks(capacity: int | None, on_machine: bool) -> None:
    in_processes(2, check_bad_ids, capacity, on_machine)


@pytest.mark.dealt("on_machine")
@CAPACITY
@MACHINES
def test_a_batch_that_cannot_be_read_raises_on_all_ranks(
    capacity: int | None, on_machine: bool
) -> None:
    in_processes(2, check_no_ids, capacity, on_machine)


@MACHINES
def test_bad_ids_raise_on_all_ranks_if_errors_are_raised_late(on_machine: bool) -> None:
    in_processes(2, check_no_ids_late, on_machine)


@pytest.mark.dealt("ranks")
@CAPACITY
@pytest.mark.parametrize("ranks", ["machine", "machines", "GPUs of machines"])
def test_other_tables_on_one_rank_raise_on_all_ranks(capacity: int | None, ranks: str) -> None:
    in_processes(2, check_other_tables, capacity, ranks == "machine", "GPUs" in ranks)
