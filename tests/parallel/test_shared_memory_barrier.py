"""Ranks of one machine exchange numbers in shared memory; a missing rank is found."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from rank_backends import ON_RANKS

from speedtorch.parallel.ranks import Ranks
from speedtorch.parallel.shared_memory_barrier import WORDS, SharedMemoryBarrier

pytestmark = ON_RANKS
TWO_AND_THREE = pytest.mark.parametrize(("ranks", "count"), [(2, 2_000), (3, 300)])


def make_barrier() -> SharedMemoryBarrier:
    """The barrier of all ranks, which share this machine."""
    barrier = SharedMemoryBarrier.of_ranks(Ranks.of())
    assert barrier is not None
    return barrier


def all_gather(barrier: SharedMemoryBarrier, number: int, seconds: float) -> list[int] | None:
    """Sends a number to all ranks and returns the number of each rank; None as exchange()."""
    found = barrier.exchange([[number]] * dist.get_world_size(), seconds)
    return None if found is None else [received for (received,) in found]


def open_files() -> int:
    """The number of barriers that this process has open."""
    files = Path("/proc/self/fd")
    named = []
    for file in files.iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the folder itself
            named.append(os.readlink(file))
    return sum("speedtorch-" in target for target in named)


@TWO_AND_THREE
def test_every_rank_receives_the_large_number_of_each(count: int) -> None:
    """The ranks are late in turns."""
    rank, size, barrier = dist.get_rank(), dist.get_world_size(), make_barrier()
    dist.barrier()
    assert os.readlink(f"/proc/self/fd/{barrier._file.fileno()}").endswith("(deleted)")
    largest = 2**61 - 1
    for call in range(count):
        if call % 100 == rank:
            time.sleep(0.01)
        found = all_gather(barrier, largest - call * size - rank, 30)
        assert found == [largest - call * size - sender for sender in range(size)], call
    assert all_gather(barrier, 0, 30) == [0] * size


@TWO_AND_THREE
def test_every_rank_receives_the_numbers_of_all_ranks(count: int) -> None:
    """Calls with several numbers per rank and with one alternate; none reads an earlier call's."""
    rank, size, barrier = dist.get_rank(), dist.get_world_size(), make_barrier()
    for number in range(count):
        if number % 100 == rank:
            time.sleep(0.01)
        length = WORDS if number % 2 else 1 + number % 5
        sent = [
            [1000 * number + 100 * rank + 10 * receiver + place for place in range(length)]
            for receiver in range(size)
        ]
        expected = [
            [1000 * number + 100 * sender + 10 * rank + place for place in range(length)]
            for sender in range(size)
        ]
        assert barrier.exchange(sent, 30) == expected, number
        if number % 3 == 0:
            assert all_gather(barrier, number, 30) == [number] * size


def test_zeros_follow_the_numbers_of_a_rank_that_sends_fewer() -> None:
    """Also after calls with more numbers."""
    rank, size, barrier = dist.get_rank(), dist.get_world_size(), make_barrier()
    for _ in range(5):  # calls are counted modulo 4
        assert barrier.exchange([[7] * WORDS] * size, 30) == [[7] * WORDS] * size
    found = barrier.exchange([[1, 2, 3][: 3 - rank]] * size, 30)
    assert found == [[1, 2, 3][: 3 - rank], [1, 2, 0][: 3 - rank]]


def test_a_late_rank_is_awaited_and_an_absent_rank_is_not() -> None:
    """After a timeout and abort() the other rank does not wait either."""
    barrier = make_barrier()
    for late in range(dist.get_world_size()):
        if dist.get_rank() == late:
            time.sleep(1.5)  # longer than it takes to look whether it lives
        assert all_gather(barrier, 4 + dist.get_rank(), 30) == [4, 5]
    dist.barrier()
    if dist.get_rank() == 0:
        begin = time.monotonic()
        assert all_gather(barrier, 6, 0.2) is None and time.monotonic() - begin < 5
        barrier.abort()
    dist.barrier()
    if dist.get_rank() == 1:  # at the call that the other rank made, and at the next one
        begin = time.monotonic()
        assert all_gather(barrier, 6, 30) is None and all_gather(barrier, 7, 30) is None
        assert time.monotonic() - begin < 5
    dist.barrier()


def test_a_signal_ends_the_wait_and_the_next_exchanges_are_complete() -> None:
    """As Ctrl-C does. The other rank then reads the numbers of the interrupted exchange."""
    rank, barrier = dist.get_rank(), make_barrier()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    assert all_gather(barrier, rank, 30) == [0, 1]
    dist.barrier()
    if rank == 0:
        before = signal.signal(signal.SIGALRM, interrupt)
        for _ in range(2):  # in the wait for the exchange, and again in the exchange after it
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                all_gather(barrier, 7, 30)
        signal.signal(signal.SIGALRM, before)
        dist.barrier()
    else:
        dist.barrier()  # reads nothing before both interrupts
        assert all_gather(barrier, 8, 30) == [7, 8]
    for number in range(100):
        assert all_gather(barrier, number, 30) == [number] * 2


def test_wrong_numbers_raise_and_are_no_exchange() -> None:
    """Each list has one length, at most WORDS, and numbers below 2 ** 61."""
    rank, size, barrier = dist.get_rank(), dist.get_world_size(), make_barrier()
    wrong = ([[1]], [[], []], [[1], [1, 2]], [[0] * (WORDS + 1)] * 2, [[2**61]] * 2, [[-1]] * 2)
    for sent in wrong:
        with pytest.raises(ValueError, match="expected"):
            barrier.exchange(sent, 30)
    for sent, error in (
        ([["1"]] * 2, TypeError),
        ([[2**64]] * 2, OverflowError),
        (1, TypeError),
        ([1, [1, 2]], TypeError),
    ):
        with pytest.raises(error):
            barrier.exchange(sent, 30)  # type: ignore[arg-type]
    assert all_gather(barrier, 5 + rank, 30) == [5 + other for other in range(size)]


def test_a_rank_whose_process_has_ended_is_not_awaited() -> None:
    """A file that a process closes loses its locks, as when the process ends."""
    ranks = Ranks.of()
    barrier = make_barrier()
    if ranks.rank:
        barrier._file.close()
        dist.barrier()
        return
    dist.barrier()
    begin = time.monotonic()
    assert all_gather(barrier, 1, 60) is None and time.monotonic() - begin < 10


def test_ranks_on_several_machines_have_no_barrier() -> None:
    """The file is missing on one rank, or its token differs."""
    ranks = Ranks.of()

    def missing(value: tuple[str, bytes]) -> tuple[str, bytes]:
        path, token = dist_broadcast(value)
        return (path + ".not", token) if ranks.rank else (path, token)

    def replaced(value: tuple[str, bytes]) -> tuple[str, bytes]:
        path, token = dist_broadcast(value)
        return path, (bytes(len(token)) if ranks.rank else token)

    before, dist_broadcast = open_files(), ranks.broadcast
    for broadcast in (missing, replaced):
        with patch.object(ranks, "broadcast", broadcast):
            assert SharedMemoryBarrier.of_ranks(ranks) is None
    assert open_files() == before
