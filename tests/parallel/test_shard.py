"""Training on several ranks is bitwise identical to one process with all rows and batches.

SPEEDTORCH_ROUNDS sets how many random programs run, 3 by default, and SPEEDTORCH_FIRST the first.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from ordinary_run import programs
from rank_backends import BACKENDS, EVERY_WAY, RANKS, TWO_AND_THREE_RANKS
from rank_processes import exit_codes, in_processes
from sharded_training import (
    CASES,
    OPTIMIZERS,
    WAYS,
    check_a_killed_rank,
    check_a_missing_lookup,
    check_accelerated_clipping,
    check_checkpoint,
    check_clipping,
    check_clipping_of_dtypes,
    check_collections,
    check_data_parallel,
    check_errors,
    check_programs,
    check_refusals,
    check_repeated,
    check_saved_before,
    check_training,
    save_checkpoint,
)

ROUNDS = int(os.environ.get("SPEEDTORCH_ROUNDS", programs(3)))
FIRST = int(os.environ.get("SPEEDTORCH_FIRST", "0"))


@EVERY_WAY
@TWO_AND_THREE_RANKS
def test_ranks_train_as_one_process_does(ranks: int, backend: str, every_way: bool) -> None:
    # Sums are exact, and divided once.
    ways, cases = WAYS if every_way else None, CASES
    if backend == "gloo" and not every_way:  # pairs of cases, to two ranks or to three
        cases = {name: CASES[name] for at, name in enumerate(CASES) if (at // 2 - ranks) % 2}
    in_processes(ranks, check_training, True, cases, ways, backend=backend)


@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(n, marks=pytest.mark.nightly) for n in (3, 4))]
)
def test_random_programs_train_as_one_process_does(ranks: int) -> None:
    in_processes(ranks, check_programs, FIRST, ROUNDS)


@EVERY_WAY
@TWO_AND_THREE_RANKS
def test_every_optimizer_trains_on_ranks_as_in_one_process(
    ranks: int, backend: str, every_way: bool
) -> None:
    half = dict(list(OPTIMIZERS.items())[ranks % 2 :: 2])  # the other half has other ranks
    cases = OPTIMIZERS if every_way else half
    in_processes(ranks, check_training, ranks == 2, cases, ["prefetched"], backend=backend)


@RANKS
def test_a_run_has_the_same_bits_every_time(ranks: int, backend: str) -> None:
    in_processes(ranks, check_repeated, backend=backend)


@RANKS
def test_what_one_rank_does_wrong_raises_on_all(ranks: int, backend: str) -> None:
    in_processes(ranks, check_errors, backend=backend)


@BACKENDS
def test_collections_train_as_in_one_process(backend: str) -> None:
    in_processes(2, check_collections, backend=backend)


def test_what_cannot_be_sharded_is_refused() -> None:
    in_processes(2, check_refusals)


@BACKENDS
def test_data_parallel_trains_the_dense_part(backend: str) -> None:
    in_processes(2, check_data_parallel, backend=backend)


@pytest.mark.filterwarnings("ignore::UserWarning")
@BACKENDS
@pytest.mark.parametrize(
    "all_numbers", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["some", "all"]
)
def test_a_checkpoint_goes_to_another_number_of_ranks(
    tmp_path: Path, backend: str, all_numbers: bool
) -> None:
    numbers = ((2, 3), (3, 1), (1, 2)) if backend == "gloo" else ((2, 1), (1, 2))
    numbers = numbers if all_numbers else numbers[:1]
    for saved_by, loaded_by in numbers:
        folder, wholes = tmp_path / f"of {saved_by}", tmp_path / f"of {saved_by}.pt"
        given = (str(folder), str(wholes))
        in_background = backend == "gloo" and saved_by == 2  # which torch does through gloo
        in_processes(saved_by, save_checkpoint, *given, in_background, backend=backend)
        in_processes(loaded_by, check_checkpoint, *given, saved_by, False, backend=backend)
    in_processes(1, check_checkpoint, *given, saved_by, True, backend=backend)


@pytest.mark.filterwarnings("ignore::UserWarning")
@BACKENDS
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_all_ranks_clip_by_the_norm_of_the_whole_model(sparse: bool, backend: str) -> None:
    in_processes(2, check_clipping, sparse, backend=backend)


def test_accelerate_clips_with_the_function_of_the_error() -> None:
    in_processes(2, check_accelerated_clipping)


def test_a_rank_without_gradients_clips_with_the_other_ranks() -> None:
    in_processes(2, check_clipping_of_dtypes)


@BACKENDS
def test_a_lookup_that_not_all_ranks_make_raises_when_the_time_is_over(backend: str) -> None:
    timeout = 3 if backend == "gloo" else 10  # which NCCL's beginning is part of
    in_processes(2, check_a_missing_lookup, timeout + 2, timeout=timeout, backend=backend)


@BACKENDS
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_ranks_raise_after_another_rank_is_killed(tmp_path: Path, backend: str) -> None:
    folder = tmp_path / "saved"
    codes = exit_codes(2, check_a_killed_rank, str(folder), timeout=20, backend=backend)
    assert codes == [3, -signal.SIGKILL]
    assert "an exchange with other ranks failed" in (folder / "said").read_text()
    in_processes(2, check_saved_before, str(folder), backend=backend)
