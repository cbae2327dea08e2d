"""Rendezvous: an all-gather by files, concurrent with the collectives of training.

Each rank appends a line of JSON to its file for each value, and an empty line when it leaves. Each
rank also locks its file. The system releases the lock when the process ends. On a file system
without locks, a rank counts as ended if its next line is missing after a timeout.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
import time
from contextlib import ExitStack, suppress
from typing import Any

from speedtorch.files.system_calls import (
    calls,
    opened,
    opened_folder,
    read_file,
    share_lock,
    where_supported,
    write_all,
)
from speedtorch.parallel.collectives import Collectives

__all__ = ["Rendezvous"]

_SHORTEST_NAP, _LONGEST_NAP = 2e-3, 0.25  # seconds


class Rendezvous:
    """Ranks that write one checkpoint while training continues; see Collectives.

    The first rank must call make() before any rank enters. All ranks must call check_locks() after
    all have entered, and before all_gather(). The first rank leaves last and must call remove().
    Without locks, a rank waits `timeout` seconds for another rank's line.
    """

    def __init__(self, folder: str, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size = rank, size
        self._folder, self._timeout = folder, timeout
        self._lines_read = [0] * size
        self._in_use, self._sees_locks = False, True
        self._exit_stack = ExitStack()

    def make(self) -> None:
        """Creates the folder with a file for each rank, so that all ranks can read at once."""
        calls.make_folder(self._folder)
        for rank in range(self.size):
            with opened(self._path(rank), os.O_WRONLY | os.O_CREAT | os.O_EXCL):
                pass

    def remove(self) -> None:
        """Removes the folder after all ranks have left, or have ended by lock or timeout.

        If an exception has ended this rank's wait for the others, the next save removes the folder.
        Without locks a rank that is slower than the timeout loses the folder and raises.
        """
        if not self._in_use:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Rendezvous:
        with ExitStack() as stack:
            if self.rank == 0:
                parent = stack.enter_context(opened_folder(os.path.dirname(self._folder)))
                with where_supported(errno.EBADF, errno.ENOLCK):
                    share_lock(parent)  # or another save would remove the folder as abandoned
            file = opened(self._path(self.rank), os.O_WRONLY | os.O_APPEND)
            self._file = stack.enter_context(file)
            with suppress(OSError):  # no locks on this file system: check_locks() returns False
                calls.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._exit_stack, self._in_use = stack.pop_all(), True
        return self

    def __exit__(self, *_: object) -> None:
        with self._exit_stack, suppress(OSError):
            with suppress(OSError):  # the lock is released in any case
                write_all(self._file, b"\n")
            if self.rank == 0:
                for rank in self._other_ranks():
                    while self._line(rank):  # until the rank has left or ended
                        pass
            self._in_use = False

    def check_locks(self, ranks: Collectives) -> bool:
        """Whether all ranks, which have entered, see all locks; if not, timeouts replace locks."""
        sees_all = False
        with suppress(OSError):  # no locks on this file system
            sees_all = not any(map(self._is_free, self._other_ranks()))
        self._sees_locks = all(ranks.all_gather(sees_all))
        return self._sees_locks

    def all_gather(self, value: Any) -> list[Any]:
        """All-gathers a value that consists of lists, numbers, strings and None.

        Raises RuntimeError if another rank has left, or has ended by lock or timeout.
        """
        self._publish(value)
        return [value if rank == self.rank else self._value_of(rank) for rank in range(self.size)]

    def broadcast(self, value: Any) -> Any:
        """Broadcasts the first rank's value; see all_gather()."""
        if self.rank:
            return self._value_of(0)
        self._publish(value)
        return value

    def _publish(self, value: Any) -> None:
        write_all(self._file, json.dumps(value).encode() + b"\n")
        calls.fsync(self._file)  # makes the line visible to others on a network file system

    def _value_of(self, rank: int) -> Any:
        if line := self._line(rank):
            return json.loads(line)
        raise RuntimeError(
            f"save: rank {rank} has ended, or has left the save, or is late (on a file system"
            " without locks). Save again on all ranks."
        )

    def _other_ranks(self) -> list[int]:
        """All ranks but this one, whose lock a second open and close of its file would release."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def _line(self, rank: int) -> bytes:
        """Waits for the next line of another rank; empty if the rank has left or ended.

        A rank that leaves writes an empty line; a rank that ends without one has no next line.
        """
        begin, nap = time.monotonic(), _SHORTEST_NAP
        while True:
            waited = time.monotonic() - begin
            # Before the read: a rank that has ended by now writes no line after the read.
            has_ended = self._is_free(rank) if self._sees_locks else waited > self._timeout
            lines = bytes(read_file(self._path(rank), math.inf)).split(b"\n")[:-1]
            if len(lines) > self._lines_read[rank]:
                self._lines_read[rank] += 1
                return lines[self._lines_read[rank] - 1]
            if has_ended or b"" in lines:
                return b""
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)

    def _is_free(self, rank: int) -> bool:
        """Whether no process holds another rank's lock."""
        with opened(self._path(rank), os.O_WRONLY) as descriptor:
            try:
                calls.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return False
        return True

    def _path(self, rank: int) -> str:
        return os.path.join(self._folder, f"rank-{rank:05d}")
