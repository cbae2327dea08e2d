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

from speedtorch.parallel.board import WORDS, Board
from speedtorch.parallel.ranks import Ranks


def board_of(agreed: Callable[[Any], Any] | None = None) -> Board | None:
    ranks = Ranks.of()
    return Board.of_machine(ranks.rank, ranks.size, agreed or ranks.agreed, ranks.every)


def met(board: Board, number: int, seconds: float) -> list[int] | None:
    """The number of each rank, of those that all tell each other."""
    found = board.exchange([[number]] * dist.get_world_size(), seconds)
    return None if found is None else [each for (each,) in found]


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
        found = met(board, largest - meeting * size - rank, 30)
        assert found == [largest - meeting * size - each for each in range(size)], meeting
    assert met(board, 0, 30) == [0] * size


def check_exchanges(count: int) -> None:
    """Several numbers for each rank, between meetings of one, and none is of an earlier one."""
    rank, size, board = dist.get_rank(), dist.get_world_size(), board_of()
    assert board is not None
    for number in range(count):
        if number % 100 == rank:
            time.sleep(0.01)
        length = WORDS if number % 2 else 1 + number % 5
        given = [
            [1000 * number + 100 * rank + 10 * other + place for place in range(length)]
            for other in range(size)
        ]
        expected = [
            [1000 * number + 100 * each + 10 * rank + place for place in range(length)]
            for each in range(size)
        ]
        assert board.exchange(given, 30) == expected, number
        if number % 3 == 0:
            assert met(board, number, 30) == [number] * size


def check_lengths() -> None:
    """Behind the numbers of a rank that tells fewer there are zeros, whatever was there before."""
    rank, size, board = dist.get_rank(), dist.get_world_size(), board_of()
    assert board is not None
    for _ in range(5):  # more than there are turns
        assert board.exchange([[7] * WORDS] * size, 30) == [[7] * WORDS] * size
    found = board.exchange([[1, 2, 3][: 3 - rank]] * size, 30)
    assert found == [[1, 2, 3][: 3 - rank], [1, 2, 0][: 3 - rank]]


def check_absence() -> None:
    board = board_of()
    assert board is not None
    for late in range(dist.get_world_size()):
        if dist.get_rank() == late:
            time.sleep(1.5)  # longer than it takes to look whether it lives
        assert met(board, 4 + dist.get_rank(), 30) == [4, 5]
    dist.barrier()
    if dist.get_rank() == 0:
        begin = time.monotonic()
        assert met(board, 6, 0.2) is None and time.monotonic() - begin < 5
        board.leave()
    dist.barrier()
    if dist.get_rank() == 1:  # at the meeting that the other rank came to, and at the next one
        begin = time.monotonic()
        assert met(board, 6, 30) is None and met(board, 7, 30) is None
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
    assert met(made, 1, 60) is None and time.monotonic() - begin < 10


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
    in_processes(2, check_lengths)


def test_a_late_rank_is_waited_for_and_an_absent_one_is_not() -> None:
    in_processes(2, check_absence)


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    in_processes(2, check_death)


def test_ranks_of_other_machines_have_none() -> None:
    in_processes(2, check_other_machine)
