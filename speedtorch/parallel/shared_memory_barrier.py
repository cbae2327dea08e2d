"""SharedMemoryBarrier: the ranks of one machine exchange numbers in shared memory.

exchange() waits for the other ranks, and not for the GPU.
"""

from __future__ import annotations

import fcntl
import mmap
import secrets
import time
from array import array
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, cast

from speedtorch.parallel.collectives import Collectives

__all__ = ["WORDS", "SharedMemoryBarrier"]

WORDS = 32
"""The maximum count of numbers that a rank passes to another rank in one exchange()."""

_TOKEN = 16
_NUMBER = 8
_ABORTED = -1  # replaces the numbers of a rank that has called abort()
_SPIN = 5e-4
_NAP = 5e-5
_ALIVE = 0.5
"""Seconds: _SPIN of waiting without sleep, then _NAP per sleep; _ALIVE between process checks."""


class SharedMemoryBarrier:
    """Shared memory with up to WORDS numbers from each rank to each rank.

    A word of 8 bytes contains a number, and in its two lowest bits the index modulo 4 of the
    exchange() call. A reader waits until a word has the index of the reader's own call. The CPU
    reads and writes an aligned word atomically.

    Each rank writes two rows of the memory: one in even calls and one in odd calls. A row has WORDS
    words for each rank, and each call writes all of them. A rank begins call n + 2 only
    after all ranks have written in call n + 1, and thus have read the numbers of call n. Therefore
    no rank overwrites a number that another rank may still read.

    Each rank locks one byte of the file. The lock shows whether the rank's process lives. The file
    is closed when the barrier is deleted.
    """

    def __init__(self, file: BinaryIO, rank: int, size: int) -> None:
        self._file, self._rank, self._size = file, rank, size
        self._memory = mmap.mmap(file.fileno(), _TOKEN + _bytes_for(size))
        self._words = memoryview(self._memory).cast("q")[_TOKEN // _NUMBER :]
        self._own = tuple((parity * size + rank) * size * WORDS for parity in (0, 1))
        """Where this rank's row of numbers begins, for even and for odd calls."""
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    @classmethod
    def of_ranks(cls, ranks: Collectives) -> SharedMemoryBarrier | None:
        """Maps one file on all ranks; None if a rank cannot map it. All ranks must call this."""
        token, path, memory = secrets.token_bytes(_TOKEN), "", Path("/dev/shm")
        with ExitStack() as undone:
            if ranks.rank == 0:
                with suppress(OSError):  # no file can be created
                    parent = memory if memory.is_dir() else None
                    folder = TemporaryDirectory(prefix="speedtorch-", dir=parent)
                    file = Path(undone.enter_context(folder), "barrier")
                    # Only this user can open the file. The write allocates all its memory. The file
                    # is closed before a rank opens it: closing releases this process's locks.
                    file.write_bytes(token + bytes(_bytes_for(ranks.size)))
                    path = str(file)
            path, token = ranks.broadcast((path, token))
            barrier = cls._opened(path, token, ranks.rank, ranks.size)
            return barrier if all(ranks.all_gather(barrier is not None)) else None

    @classmethod
    def _opened(cls, path: str, token: bytes, rank: int, size: int) -> SharedMemoryBarrier | None:
        """Opens the file; None on another machine, where it is missing or its token differs."""
        with suppress(OSError, ValueError):  # no such file, a wrong size, or no locks
            file = cast(BinaryIO, open(path, "r+b", buffering=0))  # noqa: SIM115
            if file.read(_TOKEN) == token:
                return cls(file, rank, size)
        return None

    def exchange(self, sent: Sequence[Sequence[int]], seconds: float) -> list[list[int]] | None:
        """Sends `sent[rank]` to each rank, and returns the list that each rank sends to this one.

        All lists of `sent` have one length, at most WORDS. The numbers are 0 to 2 ** 61 - 1. The
        returned lists have the same length: shorter lists of other ranks are padded with zeros, and
        longer lists are cut.

        Returns None if a rank does not write within `seconds`, has called abort(), or its process
        has ended. The ranks may then be at different calls, so the caller must call abort(), and
        exchange() must not be called again.
        """
        words, size = self._words, self._size
        even, odd = (words[place] & 3 for place in self._own)
        call = (even + 1 + (odd == (even + 1) % 4)) % 4  # this call's number, modulo 4
        own = self._own[call % 2]
        # The words for rank 0 are last. `even` and `odd` read the first of them, so a call that
        # Ctrl-C interrupts before counts as not made.
        for rank in reversed(range(size)):
            row = array("q", [call]) * WORDS
            for place, number in enumerate(sent[rank]):
                row[place] = number << 2 | call
            begin = own + rank * WORDS
            words[begin : begin + WORDS] = row
        start = looked = time.monotonic()
        received, count = [], len(sent[self._rank])
        for rank in range(size):
            begin = ((call % 2 * size + rank) * size + self._rank) * WORDS
            for place in range(begin, begin + count):
                while words[place] & 3 != call:
                    now = time.monotonic()
                    if now - start > seconds:
                        return None
                    if now - looked > _ALIVE:
                        looked = now
                        # The rank may have written its word and ended since the last look.
                        if not self._lives(rank) and words[place] & 3 != call:
                            return None
                    time.sleep(0 if now - start < _SPIN else _NAP)
            received.append([word >> 2 for word in words[begin : begin + count].tolist()])
        return None if any(_ABORTED in numbers for numbers in received) else received

    def abort(self) -> None:
        """Makes the current and each later exchange() of the other ranks return None."""
        for own in self._own:
            for place in range(own, own + self._size * WORDS):
                self._words[place] = _ABORTED << 2 | self._words[place] & 3
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._rank)

    def _lives(self, rank: int) -> bool:
        if rank == self._rank:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return False


def _bytes_for(size: int) -> int:
    """Bytes for the numbers of `size` ranks."""
    return 2 * _NUMBER * size * size * WORDS
