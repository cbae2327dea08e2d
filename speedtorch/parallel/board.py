"""Board: shared memory in which the ranks of one machine write what they are about to do.

A rank waits there for the other ranks alone and not for its GPU.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

__all__ = ["Board"]

_TOKEN = 16
_NUMBER = 8
_LEFT = -1  # in the place of a rank's numbers
_SPIN = 5e-4
_NAP = 5e-5
_ALIVE = 0.5
"""Seconds: of waiting without sleep, of each sleep after that, between looks at processes."""


class Board:
    """Memory that ranks share, with a number of each rank, and one that each has for each other.

    A number carries which meeting it is of, modulo 4, and each rank has one row of numbers for even
    meetings and one for odd ones: no number is overwritten while another rank may still read it,
    and each is one aligned word, which is written and read whole. A lock on a byte of the file for
    each rank tells whether its process lives.

    Args:
        file: open for reading and writing; closed with this.
        rank: this one.
        size: how many there are.
    """

    def __init__(self, file: BinaryIO, rank: int, size: int) -> None:
        self._file, self._rank, self._size = file, rank, size
        self._memory = mmap.mmap(file.fileno(), _TOKEN + _bytes_for(size))
        self._words = memoryview(self._memory).cast("q")[_TOKEN // _NUMBER :]
        self._own = tuple((parity * size + rank) * (1 + size) for parity in (0, 1))
        """Where this rank's row of numbers begins, at an even and at an odd meeting."""
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    @classmethod
    def of_machine(
        cls, rank: int, size: int, agreed: Callable[[Any], Any], every: Callable[[Any], list[Any]]
    ) -> Board | None:
        """That of all ranks, each of which calls this; None if they share no memory of files.

        Args:
            rank: this one.
            size: how many there are.
            agreed: gives what the first rank says.
            every: gives what each rank says.
        """
        token = secrets.token_bytes(_TOKEN)
        with _new_file(token + bytes(_bytes_for(size))) if rank == 0 else nullcontext("") as own:
            path, token = agreed((own, token))
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

    def meet(self, number: int, seconds: float) -> list[int] | None:
        """Waits for the number of each rank at this meeting, `size` of them.

        Args:
            number: of this rank, from 0 to 2 ** 61 - 1.
            seconds: to wait at most.

        Returns None if some have not come by then, have left, or their processes have ended.
        """
        found = self.exchange(number, [0] * self._size, seconds)
        return None if found is None else found[0]

    def exchange(
        self, number: int, given: Sequence[int], seconds: float
    ) -> tuple[list[int], list[int]] | None:
        """As meet(), and each rank gives each a number of its own: also those for this rank."""
        words, size = self._words, self._size
        even, odd = (words[place] & 3 for place in self._own)
        turn = (even + 1 + (odd == (even + 1) % 4)) % 4  # after that of this rank's last word
        own = self._own[turn % 2]
        for place, each in enumerate(given, own + 1):
            words[place] = each << 2 | turn
        words[own] = number << 2 | turn  # an interrupt comes before or after it
        start = looked = time.monotonic()
        rows = range(turn % 2 * size * (1 + size), (turn % 2 + 1) * size * (1 + size), 1 + size)
        for rank, row in enumerate(rows):
            for place in (row, row + 1 + self._rank):
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
        numbers, taken = ([words[row + at] >> 2 for row in rows] for at in (0, 1 + self._rank))
        return None if _LEFT in numbers else (numbers, taken)

    def leave(self) -> None:
        """Leaves for good: the other ranks' meetings return None now, or as soon as they look."""
        for own in self._own:
            for place in range(own, own + 1 + self._size):
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
    return 2 * _NUMBER * size * (1 + size)


@contextmanager
def _new_file(content: bytes) -> Iterator[str]:
    """The path of a file that only this user can open, in memory if there is a folder for that.

    "": none can be made. What is written at once has its memory: a full file system is known here.
    The file is closed before a rank opens it, as closing would release the locks of this process.
    """
    memory, path = Path("/dev/shm"), ""
    with ExitStack() as undone:
        with suppress(OSError):
            file, made = tempfile.mkstemp("", "speedtorch-", memory if memory.is_dir() else None)
            undone.callback(os.unlink, made)
            with open(file, "wb") as opened:
                opened.write(content)
            path = made
        yield path
