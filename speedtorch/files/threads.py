"""Threads that copy and hash for files.

They take work until the process ends: those of concurrent.futures take none once the interpreter
has begun to shut down, when a thread that saves may still have some. They end after Ctrl-C and
where no more can be started, too: those of a pool of multiprocessing would wait for ever.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

__all__ = ["MOST_THREADS", "Threads", "threads"]

MOST_THREADS = 16

_Result = TypeVar("_Result")
_Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Threads:
    """Threads that take work in its order."""

    def __init__(self) -> None:
        self._work: SimpleQueue[_Work | None] = SimpleQueue()

    def begin(self, function: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
        """Has a thread call a function; the future gives or raises what that does."""
        done: Future[_Result] = Future()
        self._work.put((done, function, arguments))
        return done

    def end(self) -> None:
        """Ends the threads once they have done all work."""
        self._work.put(None)

    def run(self) -> None:
        """Works until the end, in a thread."""
        while self._done(self._work.get()):
            pass
        self.end()  # of the next thread

    @staticmethod
    def _done(work: _Work | None) -> bool:
        if work is None:
            return False
        done, function, arguments = work
        try:
            result = function(*arguments)
        except BaseException as error:
            done.set_exception(error)
            del work, done, arguments  # which the error would keep with this frame
        else:
            done.set_result(result)
        return True


@contextmanager
def threads(most: int) -> Iterator[Threads]:
    """One for each core, `most` and 16 at most; at the end all their work is done."""
    made, started = Threads(), list[threading.Thread]()
    try:
        for _ in range(min(most, MOST_THREADS, os.cpu_count() or 1)):
            thread = threading.Thread(target=made.run, name="speedtorch files", daemon=True)
            thread.start()
            started.append(thread)
        yield made
    finally:
        made.end()
        for thread in started:
            thread.join()
