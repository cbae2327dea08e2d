"""SharedMemoryBarrier: the ranks of one machine exchange numbers in shared memory.

exchange() waits for the other ranks, and not for the GPU.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, cast

from speedtorch._C import RankWords
from speedtorch.parallel.collectives import Collectives

__all__ = ["WORDS", "SharedMemoryBarrier"]

WORDS = 32
"""The maximum count of numbers that a rank passes to another rank in one exchange()."""

_TOKEN = 16
_NUMBER = 8


class SharedMemoryBarrier:
    """Shared memory with up to WORDS numbers from each rank to each rank.

    The memory is a file, in which each rank locks one byte to show that its process lives. The file
    is closed when the barrier is deleted.
    """

    def __init__(self, file: BinaryIO, rank: int, size: int) -> None:
        self._file = file
        self._words = RankWords(file.fileno(), _TOKEN, WORDS, rank, size)

    @classmethod
    def of_ranks(cls, ranks: Collectives) -> SharedMemoryBarrier | None:
        """Maps the same file on all ranks, which must all call this; None if a rank cannot."""
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
        return self._words.exchange(sent, seconds)

    def abort(self) -> None:
        """Makes the current and each later exchange() of the other ranks return None."""
        self._words.abort()


def _bytes_for(size: int) -> int:
    """Bytes for the numbers of `size` ranks."""
    return 2 * _NUMBER * size * size * WORDS
