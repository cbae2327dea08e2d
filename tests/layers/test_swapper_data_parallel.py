"""Units of a model in DistributedDataParallel: the bits of plain data parallel, or an error."""

from __future__ import annotations

import pytest
from data_parallel_units import (
    check_refusals_of_data_parallel,
    check_units_of_data_parallel,
    check_units_that_data_parallel_ignores,
)
from rank_processes import in_processes


@pytest.mark.slow
@pytest.mark.parametrize("way", ["auto", "use"])
def test_units_train_as_in_plain_data_parallel(way: str) -> None:
    in_processes(2, check_units_of_data_parallel, way)


@pytest.mark.slow
def test_what_data_parallel_would_get_wrong_is_refused_by_name() -> None:
    in_processes(2, check_refusals_of_data_parallel)


@pytest.mark.slow
def test_units_that_data_parallel_ignores_may_be_stepped_in_backward() -> None:
    in_processes(2, check_units_that_data_parallel_ignores)
