"""Ranks make the same lookups with any tensors; mistakes raise errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rank_backends import BACKENDS
from rank_processes import in_processes
from sharded_rules import (
    check_any_order_of_parameters,
    check_bad_features,
    check_capacity_above_the_rows,
    check_checkpointed,
    check_equal_features,
    check_groups,
    check_ids_written_by_numpy,
    check_lookups_in_another_order,
    check_no_ids,
    check_no_ids_in_a_loop,
    check_no_ids_of_features,
    check_norms_of_torch,
    check_one_tensor_for_several_lookups,
    check_one_tensor_in_a_loop,
    check_other_tensors_after_an_error,
    check_resize,
    check_sparse_padding,
    check_twice_differentiated,
)
from torch.distributed.checkpoint.metadata import MetadataIndex

import speedtorch
from speedtorch.table.row_shard import RowShard


@BACKENDS
@pytest.mark.parametrize(
    "check",
    [
        check_one_tensor_for_several_lookups,
        check_one_tensor_in_a_loop,
        check_ids_written_by_numpy,
        check_equal_features,
    ],
)
def test_a_lookup_is_never_taken_for_another(check: Callable[[], None], backend: str) -> None:
    in_processes(2, check, backend=backend)


def test_an_ambiguous_lookup_raises() -> None:
    in_processes(2, check_lookups_in_another_order)


@BACKENDS
def test_a_bad_id_of_a_feature_on_one_rank_raises_on_all(backend: str) -> None:
    in_processes(2, check_bad_features, backend=backend)


def test_ids_that_are_no_tensor_on_one_rank_raise_on_all() -> None:
    in_processes(2, check_no_ids)
    in_processes(2, check_no_ids_of_features)
    in_processes(2, check_no_ids_in_a_loop)


def test_torchs_norm_of_all_gradients_is_refused_and_its_scaling_is_not() -> None:
    in_processes(2, check_norms_of_torch)


@BACKENDS
def test_ranks_may_look_up_other_tensors_after_an_error(backend: str) -> None:
    in_processes(2, check_other_tensors_after_an_error, backend=backend)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
@BACKENDS
def test_gradients_of_gradients_are_refused(backend: str) -> None:
    in_processes(2, check_twice_differentiated, backend=backend)


@BACKENDS
def test_sparse_gradients_support_a_padding_index(backend: str) -> None:
    in_processes(2, check_sparse_padding, backend=backend)


@BACKENDS
def test_lookups_may_be_computed_again_in_the_backward_pass(backend: str) -> None:
    in_processes(2, check_checkpointed, backend=backend)


def test_the_order_of_parameters_may_differ_among_ranks() -> None:
    in_processes(2, check_any_order_of_parameters)


def test_groups_of_some_ranks_and_of_all_ranks_can_coexist() -> None:
    in_processes(3, check_groups)


def test_rows_of_ranks_are_not_resized() -> None:
    in_processes(2, check_resize)


def test_ranks_have_the_capacity_of_the_whole_table() -> None:
    in_processes(2, check_capacity_above_the_rows)


def test_sharding_without_a_process_group_is_an_error() -> None:
    module = speedtorch.Embedding(4, 2)
    with pytest.raises(RuntimeError, match=r"not initialised.*init_process_group\(\) first"):
        speedtorch.shard(module)
    assert module(torch.tensor([3])).shape == (1, 2)
    assert module.table["weight"].shape == (4, 2)


def test_a_shard_returns_its_blocks_and_no_others() -> None:
    rows = torch.arange(4.0).view(4, 1)
    shard = RowShard(10, rows, [(range(2, 3), range(1)), (range(6, 9), range(1, 4))])
    places = [MetadataIndex("w", [row, 0]) for row in (2, 6, 3)]
    assert torch.equal(shard.__get_tensor_shard__(places[0]), rows[:1])
    assert torch.equal(shard.__get_tensor_shard__(places[1]), rows[1:])
    with pytest.raises(ValueError, match="w: no block of this rank begins at row 3"):
        shard.__get_tensor_shard__(places[2])
