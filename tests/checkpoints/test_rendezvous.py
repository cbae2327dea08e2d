"""Ranks that write a generation in the background agree on it by files, killed or not."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from ordinary_run import soaked
from rank_processes import exit_codes, in_processes
from sharded_checkpoints import check_loaded
from sharded_rendezvous import (
    check_after_kill,
    check_ended,
    check_goes_on,
    check_gone,
    check_killed,
    check_killed_at,
    check_timeout,
    check_values,
    check_without_locks,
)


@pytest.mark.parametrize(("ranks", "check"), [(3, check_values), (3, check_gone)])
def test_ranks_exchange_values(ranks: int, check: Callable[..., None], tmp_path: Path) -> None:
    in_processes(ranks, check, str(tmp_path))


@pytest.mark.parametrize("check", [check_timeout, check_without_locks])
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


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("turn", range(soaked(1, 100)))
def test_two_ranks_of_which_one_or_both_are_killed_at_any_call_leave_nothing_behind(
    turn: int, tmp_path: Path
) -> None:
    chance, codes = random.Random(turn), [0, 0]
    how = {"background": chance.random() < 0.5, "base": chance.choice([None, 1])}
    calls = chance.choice([[1, 0], [0, 1], [1, 1]])
    calls = [each * chance.randint(1, 60) for each in calls]
    while -signal.SIGKILL not in codes:  # a save has fewer calls
        folder = str(tmp_path / str(max(calls)))
        codes = exit_codes(2, check_killed_at, folder, calls, how)
        assert set(codes) <= {0, -signal.SIGKILL}, codes
        in_processes(2, check_after_kill, folder)
        calls = [(each + 1) // 2 for each in calls]


@pytest.mark.slow
def test_a_save_goes_on_when_the_process_group_has_gone(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    assert exit_codes(2, check_ended, folder, timeout=20) == [0, 0]
    in_processes(2, check_loaded, folder, None)
