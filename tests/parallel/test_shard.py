"""Training on several ranks gives the numbers of one process with all rows and all batches."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from rank_processes import exit_codes, in_processes
from sharded_training import (
    check_a_killed_rank,
    check_a_missing_lookup,
    check_checkpoint,
    check_clipping,
    check_collections,
    check_data_parallel,
    check_errors,
    check_refusals,
    check_saved_before,
    check_training,
    save_checkpoint,
)


@pytest.mark.parametrize(("ranks", "average"), [(2, True), (3, False)])
def test_ranks_train_as_one_process_does(ranks: int, average: bool) -> None:
    in_processes(ranks, check_training, average)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_one_rank_does_wrong_raises_on_all(ranks: int) -> None:
    in_processes(ranks, check_errors)


def test_collections_train_as_in_one_process() -> None:
    in_processes(2, check_collections)


def test_what_cannot_be_sharded_is_refused() -> None:
    in_processes(2, check_refusals)


def test_data_parallel_trains_the_dense_part() -> None:
    in_processes(2, check_data_parallel)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_checkpoint_goes_to_another_number_of_ranks(tmp_path: Path) -> None:
    for saved_by, loaded_by in ((2, 3), (3, 1), (1, 2)):
        folder, wholes = tmp_path / f"of {saved_by}", tmp_path / f"of {saved_by}.pt"
        in_processes(saved_by, save_checkpoint, str(folder), str(wholes))
        in_processes(loaded_by, check_checkpoint, str(folder), str(wholes), saved_by, False)
    in_processes(1, check_checkpoint, str(folder), str(wholes), saved_by, True)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_all_ranks_clip_by_the_norm_of_the_whole_model(sparse: bool) -> None:
    in_processes(2, check_clipping, sparse)


def test_a_lookup_that_not_all_ranks_make_raises_when_the_time_is_over() -> None:
    in_processes(2, check_a_missing_lookup, timeout=3)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_others_end_with_an_error_when_a_rank_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    codes = exit_codes(2, check_a_killed_rank, str(folder), timeout=20)
    assert codes == [3, -signal.SIGKILL]
    assert "rows of other ranks did not come" in (folder / "said").read_text()
    in_processes(2, check_saved_before, str(folder))
