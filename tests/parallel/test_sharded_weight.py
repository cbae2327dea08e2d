"""The weight of sharded rows answers for the whole table, or raises and changes nothing."""

from __future__ import annotations

import pytest
from rank_processes import in_processes
from sharded_weight import LOOKUPS, check_every_function, check_lookups_are_trained, check_weight


@pytest.mark.parametrize("attached", [False, True], ids=["SGD", "Adagrad"])
def test_operations_are_those_of_the_whole_table_or_raise(attached: bool) -> None:
    in_processes(2, check_weight, attached)


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_of_the_weight_are_trained_by_global_ids(name: str) -> None:
    in_processes(2, check_lookups_are_trained, name)


def test_every_function_of_torch_treats_all_elements_alike_or_raises() -> None:
    in_processes(2, check_every_function)
