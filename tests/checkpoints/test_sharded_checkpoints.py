"""Ranks that share rows out save and load one run together."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_backends import TWO_AND_THREE_RANKS
from rank_processes import in_processes
from sharded_checkpoints import (
    check_deltas,
    check_differing,
    check_failing,
    check_fallback,
    check_followed,
    check_fully_sharded,
    check_loaded,
    check_of_plain,
    check_saved,
    check_unfit,
    check_whole,
    check_without_room,
)
from sharded_generations import check_program
from torch import nn

import speedtorch


@TWO_AND_THREE_RANKS
@pytest.mark.parametrize("stored", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_run_of_ranks_goes_on_and_is_loaded_by_any_number(
    stored: Any, ranks: int, backend: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "run")
    in_processes(ranks, check_saved, folder, stored, backend=backend)
    in_processes(5 - ranks, check_loaded, folder, stored, backend="gloo")


@TWO_AND_THREE_RANKS
@pytest.mark.parametrize("how", ["foreground", "background"])
def test_base_and_deltas_of_ranks_are_the_run_on_any_number(
    how: str, ranks: int, backend: str, tmp_path: Path
) -> None:
    folder, background = str(tmp_path / "run"), how == "background"
    cache = "2KiB" if background else None
    in_processes(ranks, check_deltas, folder, background, cache, backend=backend)
    in_processes(5 - ranks, check_followed, folder, backend="gloo")


@pytest.mark.parametrize("since", [None, 1])
def test_a_part_that_does_not_fit_on_one_rank_is_loaded_on_none(
    since: int | None, tmp_path: Path
) -> None:
    in_processes(2, check_unfit, str(tmp_path / "run"), since)


def test_all_ranks_pass_over_what_one_of_them_finds_damaged(tmp_path: Path) -> None:
    in_processes(2, check_fallback, str(tmp_path / "run"))


@pytest.mark.parametrize("dims", [(2,), (3,), (2, 2)])
def test_shards_of_dtensors_are_saved_and_loaded(dims: tuple[int, ...], tmp_path: Path) -> None:
    in_processes(math.prod(dims), check_fully_sharded, str(tmp_path), dims)
    for each in tmp_path.iterdir():
        assert speedtorch.load(each, generation=2)["step"] == 3  # in one process


def test_dtensors_load_plain_tensors(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    speedtorch.save(tmp_path, layers=layers)
    in_processes(2, check_of_plain, str(tmp_path))


def test_a_table_of_which_one_rank_knows_no_changes_is_whole(tmp_path: Path) -> None:
    in_processes(2, check_whole, str(tmp_path / "run"))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_random_programs_of_ranks(seed: int, tmp_path: Path) -> None:
    in_processes(2 + seed % 2, check_program, str(tmp_path), seed)


def test_files_without_room_for_copies_are_written_before(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    in_processes(2, check_without_room, folder)
    in_processes(3, check_loaded, folder, None)


@pytest.mark.parametrize("failing", [0, 1], ids=["first", "last"])
@pytest.mark.parametrize(
    "how", [{}, {"background": True, "base": 1}], ids=["foreground", "background"]
)
def test_an_error_of_a_rank_raises_on_all_and_keeps_the_old_generation(
    how: dict[str, Any], failing: int, tmp_path: Path
) -> None:
    in_processes(2, check_failing, str(tmp_path), failing, how)


def test_ranks_with_different_tables_raise(tmp_path: Path) -> None:
    in_processes(2, check_differing, str(tmp_path / "run"))
