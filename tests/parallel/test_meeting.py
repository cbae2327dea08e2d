"""Ranks that write a generation in the background agree on it by files, killed or not."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from rank_processes import exit_codes, in_processes
from sharded_checkpoints import check_loaded
from sharded_meetings import (
    check_ended,
    check_goes_on,
    check_gone,
    check_killed,
    check_patience,
    check_values,
    check_without_locks,
)


@pytest.mark.parametrize(("ranks", "check"), [(3, check_values), (3, check_gone)])
def test_ranks_tell_each_other(ranks: int, check: Callable[..., None], tmp_path: Path) -> None:
    in_processes(ranks, check, str(tmp_path))


@pytest.mark.parametrize("check", [check_patience, check_without_locks])
def test_a_file_system_without_locks_will_do(check: Callable[..., None], tmp_path: Path) -> None:
    in_processes(2, check, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 2], ids=["first", "last"])
def test_a_rank_that_is_killed_within_a_save_leaves_the_generation_before(
    killed: int, tmp_path: Path
) -> None:
    folder = str(tmp_path / "run")
    codes = exit_codes(3, check_killed, folder, killed)
    assert codes == [-signal.SIGKILL if rank == killed else 0 for rank in range(3)]
    in_processes(2, check_loaded, folder, None)
    in_processes(2, check_goes_on, folder)


@pytest.mark.slow
def test_a_save_goes_on_when_the_process_group_has_gone(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    assert exit_codes(2, check_ended, folder, timeout=20) == [0, 0]
    in_processes(2, check_loaded, folder, None)
