"""Ranks that write a generation in the background agree on it by files, killed or not."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from killed_saves import killed_at
from ordinary_run import soaked
from rank_backends import on_ranks
from rank_processes import exit_codes, in_processes
from sharded_checkpoints import STEPS, Run, assert_same, check_loaded, saved

import speedtorch
from speedtorch.checkpoints.rendezvous import Rendezvous
from speedtorch.files import system_calls
from speedtorch.parallel.collectives import run_on_all, run_on_first
from speedtorch.parallel.ranks import Ranks


def met(folder: Path, timeout: float = 60) -> Rendezvous:
    """A rendezvous of all ranks, before any has entered."""
    rendezvous = Rendezvous(str(folder / "ranks"), dist.get_rank(), dist.get_world_size(), timeout)
    dist.barrier()
    if rendezvous.rank == 0:
        rendezvous.make()
    dist.barrier()
    return rendezvous


def removed(rendezvous: Rendezvous, folder: Path) -> None:
    if rendezvous.rank == 0:
        rendezvous.remove()
    dist.barrier()
    assert not (folder / "ranks").exists()


@on_ranks
@pytest.mark.parametrize("ranks", [3])
def test_ranks_exchange_values(tmp_path: Path) -> None:
    rendezvous = met(tmp_path)
    rank, size = rendezvous.rank, rendezvous.size
    with rendezvous:
        dist.barrier()
        assert rendezvous.check_locks(Ranks.of())
        for turn in range(3):
            time.sleep(0.02 * ((rank + turn) % size))
            assert rendezvous.all_gather([rank, turn]) == [[each, turn] for each in range(size)]
            assert rendezvous.broadcast(rank + 7) == 7
        assert run_on_all(rendezvous, lambda: rank) == list(range(size))
        assert run_on_first(rendezvous, lambda: "first") == "first"
    removed(rendezvous, tmp_path)


@on_ranks
@pytest.mark.parametrize("ranks", [3])
def test_ranks_read_what_one_has_sent_before_it_left_and_that_it_has_left(tmp_path: Path) -> None:
    rendezvous = met(tmp_path)
    with rendezvous:
        dist.barrier()
        assert rendezvous.all_gather(1) == [1] * rendezvous.size
        if rendezvous.rank < rendezvous.size - 1:
            with pytest.raises(RuntimeError, match=f"rank {rendezvous.size - 1} has ended, or has"):
                rendezvous.all_gather(2)
    removed(rendezvous, tmp_path)


@on_ranks
def test_a_rank_waits_for_the_timeout_where_there_are_no_locks(tmp_path: Path) -> None:

    def own(*given: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    rendezvous = met(tmp_path, timeout=0.3)
    with mock.patch.object(system_calls.calls, "lockf", own), rendezvous:
        assert not rendezvous.check_locks(Ranks.of())
        dist.barrier()
        assert rendezvous.all_gather(rendezvous.rank) == list(range(rendezvous.size))
        if rendezvous.rank == 0:
            begin = time.monotonic()
            with pytest.raises(RuntimeError, match="rank 1 has ended, or has left"):
                rendezvous.all_gather(None)
            assert 0.3 < time.monotonic() - begin < 30
        dist.barrier()
    dist.barrier()


@on_ranks
def test_a_file_system_without_locks_will_do(tmp_path: Path) -> None:
    """Locks that other machines do not see, or that there are none of, are found in the call."""

    def refused(*given: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    run = Run()
    for number, own in enumerate((refused, lambda *_: None), 1):
        with mock.patch.object(system_calls.calls, "lockf", own):
            assert saved(tmp_path, run.train(number, 1), background=True).generation == number
        other = Run(seed=3)
        speedtorch.load(tmp_path, **other.parts())
        dist.barrier()


def within_saves(real: Callable[..., Any], action: Callable[[], None]) -> Callable[..., Any]:
    """A call on files that does something before, in the thread that saves."""

    def call(*args: Any) -> Any:
        if threading.current_thread().name == "speedtorch save":
            action()
        return real(*args)

    return call


def check_killed(folder: str, killed: int) -> None:
    """A rank that is killed within a background save is told on the others."""
    run = Run().train(0, STEPS).tracked()
    saved(folder, run, step=STEPS)
    run.train(STEPS, 1)
    if dist.get_rank() == killed:
        kill = within_saves(system_calls.calls.write, lambda: os.kill(os.getpid(), signal.SIGKILL))
        system_calls.calls.write = kill
    with pytest.warns(RuntimeWarning, match="the background save"):
        saving = speedtorch.async_save(folder, base=1, **run.parts(), step=0)
        with pytest.raises(RuntimeError, match=f"rank {killed} has ended"):
            saving.result(60)
    there = [each for each in os.listdir(folder) if not each.startswith(".")]
    assert there == ["generation-00000001"]
    with pytest.raises(RuntimeError, match=r"rank \d has ended"):
        raise saving.exception() or AssertionError


def check_killed_at(folder: str, calls: list[int], how: dict[str, Any]) -> None:
    """Each rank is killed at its call on a file of this number within a save; 0 is none."""
    run = Run().train(0, STEPS).tracked()
    saved(folder, run, step=STEPS)
    run.train(STEPS, 1)
    dist.barrier()
    killed_at(calls[dist.get_rank()])
    warnings.simplefilter("ignore", RuntimeWarning)
    try:
        saved(folder, run, step=STEPS + 1, **how)
    except RuntimeError as error:
        assert any(each in str(error) for each in ("has ended", "closed by peer", "reset by peer"))


def check_after_kill(folder: str) -> None:
    """The generation before or the new one is whole, and the next save leaves nothing else."""
    run = Run(seed=5)
    step = speedtorch.load(folder, **run.parts())["step"]
    assert_same(run.own(), Run().train(0, step).own())
    saved(folder, run.train(step, 1), step=step + 1)
    dist.barrier()
    there = sorted(os.listdir(folder))
    assert there == [f"generation-{1 + number:08}" for number in range(step - STEPS + 2)], there
    assert all(os.listdir(f"{folder}/{each}") for each in there)
    dist.barrier()


def check_ended(folder: str) -> None:
    """What is saved in the background needs no process group any more."""
    run = Run().train(0, STEPS)
    slow = within_saves(system_calls.calls.write, lambda: time.sleep(0.02))
    system_calls.calls.write = slow
    assert not speedtorch.async_save(folder, **run.parts(), step=STEPS).done()


def check_goes_on(folder: str) -> None:
    """What killed ranks have left is removed by the next save."""
    run = Run(seed=5)
    assert speedtorch.load(folder, **run.parts())["step"] == STEPS
    saved(folder, run, background=True, step=STEPS)
    dist.barrier()
    there = sorted(os.listdir(folder))
    assert there == ["generation-00000001", "generation-00000002"]
    dist.barrier()


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
