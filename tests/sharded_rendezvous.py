"""Ranks that meet by files beside their collectives, some of which go or are killed."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from killed_saves import killed_at
from sharded_checkpoints import STEPS, Run, assert_same, saved

import speedtorch
from speedtorch.checkpoints.rendezvous import Rendezvous
from speedtorch.files import system_calls
from speedtorch.parallel.collectives import run_on_all, run_on_first
from speedtorch.parallel.ranks import Ranks


def met(folder: str, timeout: float = 60) -> Rendezvous:
    """A rendezvous of all ranks, before any has entered."""
    rendezvous = Rendezvous(f"{folder}/ranks", dist.get_rank(), dist.get_world_size(), timeout)
    dist.barrier()
    if rendezvous.rank == 0:
        rendezvous.make()
    dist.barrier()
    return rendezvous


def removed(rendezvous: Rendezvous, folder: str) -> None:
    if rendezvous.rank == 0:
        rendezvous.remove()
    dist.barrier()
    assert not os.path.exists(f"{folder}/ranks")


def check_values(folder: str) -> None:
    rendezvous = met(folder)
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
    removed(rendezvous, folder)


def check_gone(folder: str) -> None:
    """Ranks hear what one has said before it went, and that it is gone; each told by its own."""
    rendezvous = met(folder)
    with rendezvous:
        dist.barrier()
        assert rendezvous.all_gather(1) == [1] * rendezvous.size
        if rendezvous.rank < rendezvous.size - 1:
            with pytest.raises(RuntimeError, match=f"rank {rendezvous.size - 1} has ended, or has"):
                rendezvous.all_gather(2)
    removed(rendezvous, folder)


def check_timeout(folder: str) -> None:
    """Where there are no locks a rank waits for so long."""

    def own(*given: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    rendezvous = met(folder, timeout=0.3)
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


def check_without_locks(folder: str) -> None:
    """Locks that other machines do not see, or that there are none of, are found in the call."""

    def refused(*given: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    run = Run()
    for number, own in enumerate((refused, lambda *_: None), 1):
        with mock.patch.object(system_calls.calls, "lockf", own):
            assert saved(folder, run.train(number, 1), background=True).generation == number
        other = Run(seed=3)
        speedtorch.load(folder, **other.parts())
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
    run = Run().train(0, STEPS)
    for table in run.tables:
        table.track_changes()
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
    run = Run().train(0, STEPS)
    for table in run.tables:
        table.track_changes()
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
