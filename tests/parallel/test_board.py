"""Ranks of one machine meet in shared memory, and find which of them has ended or is absent."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rank_processes import in_processes

from speedtorch.parallel.board import Board
from speedtorch.parallel.ranks import Ranks


def board_of(agreed: Callable[[Any], Any] | None = None) -> Board | None:
    ranks = Ranks.of()
    return Board.of_machine(ranks.rank, ranks.size, agreed or ranks.agreed, ranks.every)


def open_files() -> int:
    """How many boards this process has open."""
    files = Path("/proc/self/fd")
    named = []
    for each in files.iterdir():
        with suppress(FileNotFoundError):  # that of the folder itself
            named.append(os.readlink(each))
    return sum("speedtorch-" in each for each in named)


def check_meetings(count: int) -> None:
    rank, size, board = dist.get_rank(), dist.get_world_size(), board_of()
    assert board is not None
    dist.barrier()
    assert os.readlink(f"/proc/self/fd/{board._file.fileno()}").endswith("(deleted)")
    largest = 2**61 - 1
    for meeting in range(count):
        if meeting % 100 == rank:
            time.sleep(0.01)
        found = board.meet(largest - meeting * size - rank, 30)
        assert found == [largest - meeting * size - each for each in range(size)], meeting
    assert board.meet(0, 30) == [0] * size


def check_exchanges(count: int) -> None:
    """Numbers for each rank, between meetings without any."""
    rank, size, board = dist.get_rank(), dist.get_world_size(), board_of()
    assert board is not None
    for number in range(count):
        if number % 100 == rank:
            time.sleep(0.01)
        given = [1000 * number + 10 * rank + other for other in range(size)]
        numbers, taken = board.exchange(number + rank, given, 30) or ([], [])
        assert numbers == [number + each for each in range(size)], number
        assert taken == [1000 * number + 10 * each + rank for each in range(size)], number
        if number % 3 == 0:
            assert board.meet(number, 30) == [number] * size


def check_absence() -> None:
    board = board_of()
    assert board is not None
    for late in range(dist.get_world_size()):
        if dist.get_rank() == late:
            time.sleep(1.5)  # longer than it takes to look whether it lives
        assert board.meet(4 + dist.get_rank(), 30) == [4, 5]
    dist.barrier()
    if dist.get_rank() == 0:
        begin = time.monotonic()
        assert board.meet(6, 0.2) is None and time.monotonic() - begin < 5
        board.leave()
    dist.barrier()
    if dist.get_rank() == 1:  # at the meeting that the other rank came to, and at the next one
        begin = time.monotonic()
        assert board.meet(6, 30) is None and board.meet(7, 30) is None
        assert time.monotonic() - begin < 5
    dist.barrier()


def check_death() -> None:
    """A file that a process closes loses its locks, as when the process ends."""
    ranks = Ranks.of()
    made = board_of()
    assert made is not None
    if ranks.rank:
        made._file.close()
        dist.barrier()
        return
    dist.barrier()
    begin = time.monotonic()
    assert made.meet(1, 60) is None and time.monotonic() - begin < 10


def check_other_machine() -> None:
    """A rank that sees no such file, or another one, lets all do without."""
    ranks = Ranks.of()

    def elsewhere(said: tuple[str, bytes]) -> tuple[str, bytes]:
        path, token = ranks.agreed(said)
        return (path + ".not", token) if ranks.rank else (path, token)

    def other(said: tuple[str, bytes]) -> tuple[str, bytes]:
        path, token = ranks.agreed(said)
        return path, (bytes(len(token)) if ranks.rank else token)

    before = open_files()
    for each in (elsewhere, other):
        assert board_of(each) is None
    assert open_files() == before


def test_each_gets_what_all_have_written() -> None:
    in_processes(2, check_meetings, 2_000)
    in_processes(3, check_meetings, 300)
    in_processes(2, check_exchanges, 2_000)
    in_processes(3, check_exchanges, 300)


def test_a_late_rank_is_waited_for_and_an_absent_one_is_not() -> None:
    in_processes(2, check_absence)


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    in_processes(2, check_death)


def test_ranks_of_other_machines_have_none() -> None:
    in_processes(2, check_other_machine)
