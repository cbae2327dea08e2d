"""Sharded rows beside FSDP, a GradScaler, DistributedDataParallel and accumulated gradients."""

from __future__ import annotations

import pytest
from rank_backends import BACKENDS
from rank_processes import in_processes
from sharded_clients import (
    MAKES,
    check_accumulation,
    check_fully_shard,
    check_fully_shard_clipped,
    check_fully_shard_refused,
    check_row_parameters,
    check_rows_of_one_rank,
    check_scaled,
    check_scaled_without_gradients,
    check_scalers_refused,
    check_wrapped_modules,
)


@pytest.mark.parametrize(
    ("through", "scaled"),
    [(False, False), (True, False), (False, True)],
    ids=["exact", "through dense layers", "scaled"],
)
@BACKENDS
def test_fully_shard_trains_the_dense_part(through: bool, scaled: bool, backend: str) -> None:
    in_processes(2, check_fully_shard, through, scaled, backend=backend)


@BACKENDS
def test_rows_are_clipped_by_a_norm_with_the_parameters_of_fully_shard(backend: str) -> None:
    in_processes(2, check_fully_shard_clipped, backend=backend)


@BACKENDS
def test_fully_shard_of_rows_raises_and_names_row_parameters(backend: str) -> None:
    in_processes(2, check_fully_shard_refused, backend=backend)


def test_row_parameters_are_those_of_every_module() -> None:
    in_processes(2, check_row_parameters)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] if name == "Adam" else []) for name in MAKES],
)
def test_all_ranks_skip_the_step_that_one_must(name: str) -> None:
    in_processes(2, check_scaled, name)


def test_a_rank_without_gradients_skips_with_the_other_ranks() -> None:
    in_processes(2, check_scaled_without_gradients)


def test_a_scaler_of_one_rank_alone_is_refused() -> None:
    in_processes(2, check_scalers_refused)


def test_data_parallel_may_wrap_a_part_and_names_the_module_to_shard() -> None:
    in_processes(2, check_wrapped_modules)


@pytest.mark.parametrize("synchronised", [True, False], ids=["each", "no_sync"])
def test_gradients_of_several_backwards_add_up(synchronised: bool) -> None:
    in_processes(2, check_accumulation, synchronised)


def test_a_rank_that_nobody_asks_counts_its_steps() -> None:
    in_processes(2, check_rows_of_one_rank)
