"""Board: shared memory in which the ranks of one machine write what they are about to do.

A rank waits there for the other ranks alone and not for its GPU.
"""

from __future__ import annotations

import fcntl
import mmap
import secrets
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, cast

__all__ = ["WORDS", "Board"]

WORDS = 32
"""The most numbers that a rank passes to another one at once."""

_TOKEN = 16
_NUMBER = 8
_LEFT = -1  # in the place of a rank's numbers
_SPIN = 5e-4
_NAP = 5e-5
_ALIVE = 0.5
"""Seconds: of waiting without sleep, of each sleep after that, between looks at processes."""


class Board:
    """Memory that ranks share, with up to WORDS numbers of each rank for each rank.

    Every number carries which meeting it belongs to, modulo 4. A rank has one row of numbers for
    even meetings and one for odd meetings, and writes the whole row: no number is overwritten while
    another rank may still read it, and none of an earlier meeting is taken for a number of this
    one. A number is one aligned word, which is written and read whole. A lock on a byte of the file
    for each rank shows whether its process lives. The file is closed with the board.
    """

    def __init__(self, file: BinaryIO, rank: int, size: int) -> None:
        self._file, self._rank, self._size = file, rank, size
        self._memory = mmap.mmap(file.fileno(), _TOKEN + _bytes_for(size))
        self._words = memoryview(self._memory).cast("q")[_TOKEN // _NUMBER :]
        self._own = tuple((parity * size + rank) * size * WORDS for parity in (0, 1))
        """Where this rank's row of numbers begins, at an even and at an odd meeting."""
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    @classmethod
    def of_machine(
        cls, rank: int, size: int, agreed: Callable[[Any], Any], every: Callable[[Any], list[Any]]
    ) -> Board | None:
        """That of all ranks, each of which calls this; None if they share no memory of files.

        `agreed` and `every` are those of Together.
        """
        token, path, memory = secrets.token_bytes(_TOKEN), "", Path("/dev/shm")
        with ExitStack() as undone:
            if rank == 0:
                with suppress(OSError):  # none can be made
                    parent = memory if memory.is_dir() else None
                    made_folder = TemporaryDirectory(prefix="speedtorch-", dir=parent)
                    file = Path(undone.enter_context(made_folder), "board")
                    # Only this user reaches it. What is written at once has its memory. The file is
                    # closed before a rank opens it: closing would release this process's locks.
                    file.write_bytes(token + bytes(_bytes_for(size)))
                    path = str(file)
            path, token = agreed((path, token))
            made = cls._opened(path, token, rank, size)
            return made if all(every(made is not None)) else None

    @classmethod
    def _opened(cls, path: str, token: bytes, rank: int, size: int) -> Board | None:
        """On a machine of its own a rank finds no such file, or one of another token."""
        with suppress(OSError, ValueError):  # no such file, one of another size, or no locks
            file = cast(BinaryIO, open(path, "r+b", buffering=0))  # noqa: SIM115
            if file.read(_TOKEN) == token:
                return cls(file, rank, size)
        return None

    def exchange(self, given: Sequence[Sequence[int]], seconds: float) -> list[list[int]] | None:
        """Passes numbers to each rank and waits for as many from each rank, this one included.

        There are as many for each, WORDS at most, from 0 to 2 ** 61 - 1. A rank that passes fewer
        than another one passes zeros after them. None if a rank has not written them in these
        seconds, has left, or its process has ended.
        """
        words, size = self._words, self._size
        even, odd = (words[place] & 3 for place in self._own)
        turn = (even + 1 + (odd == (even + 1) % 4)) % 4  # after that of this rank's last word
        own = self._own[turn % 2]
        for rank in reversed(range(size)):  # the first word of the row, which has the turn, is last
            row = array("q", [turn]) * WORDS
            for place, number in enumerate(given[rank]):
                row[place] = number << 2 | turn
            begin = own + rank * WORDS
            words[begin : begin + WORDS] = row
        start = looked = time.monotonic()
        taken, count = [], len(given[self._rank])
        for rank in range(size):
            begin = ((turn % 2 * size + rank) * size + self._rank) * WORDS
            for place in range(begin, begin + count):
                while words[place] & 3 != turn:
                    now = time.monotonic()
                    if now - start > seconds:
                        return None
                    if now - looked > _ALIVE:
                        looked = now
                        # It may have come and ended since.
                        if not self._lives(rank) and words[place] & 3 != turn:
                            return None
                    time.sleep(0 if now - start < _SPIN else _NAP)
            taken.append([each >> 2 for each in words[begin : begin + count].tolist()])
        return None if any(_LEFT in each for each in taken) else taken

    def leave(self) -> None:
        """Leaves for good: the other ranks' meetings return None now, or as soon as they look."""
        for own in self._own:
            for place in range(own, own + self._size * WORDS):
                self._words[place] = _LEFT << 2 | self._words[place] & 3
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
    """Of the numbers of so many ranks."""
    return 2 * _NUMBER * size * size * WORDS
