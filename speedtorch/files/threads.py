"""Optional threads that copy and hash for files, and initialize tables.

Unlike the threads of concurrent.futures, these threads accept work during interpreter shutdown,
when a thread may still be saving. threads() also ends them after Ctrl-C. If no thread starts, or a
thread ends before it gets work, the calling thread does the work. CPython's Thread.start() is
unsuitable: the call waits forever for a thread that has too little memory to start.
"""

from __future__ import annotations

import _thread
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

__all__ = ["MOST_THREADS", "Threads", "threads"]

MOST_THREADS = 16
"""The most threads for one file."""

_Result = TypeVar("_Result")
_Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Threads:
    """Threads that do work in the order of begin()."""

    def __init__(self) -> None:
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._locks: list[_thread.LockType] = []
        """One lock for each started thread, which holds the lock until it ends."""

    def begin(self, function: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
        """Queues a call of a function; result() returns its result or raises its error."""
        done: Future[_Result] = Future()
        self._work.put((done, function, arguments))
        return done

    def result(self, done: Future[_Result]) -> _Result:
        """Waits for `done`; runs queued work in this thread until some thread has begun `done`."""
        while not (done.running() or done.done()):
            try:
                work = self._work.get_nowait()
            except Empty:  # another thread has taken it
                break
            self._run_work(work)
        return done.result()

    def run(self) -> None:
        """Does queued work in a new thread until end()."""
        ended = _thread.allocate_lock()
        with ended:
            self._locks.append(ended)
            while self._run_work(self._work.get()):
                pass
            self._work.put(None)  # ends the next thread

    def end(self) -> None:
        """Does all work that no thread has started, and waits for the other threads."""
        self._work.put(None)
        try:
            while self._run_work(self._work.get()):
                pass
            self._work.put(None)
        finally:
            for lock in self._locks:
                with lock:
                    pass

    @staticmethod
    def _run_work(work: _Work | None) -> bool:
        if work is None:
            return False
        done, function, arguments = work
        done.set_running_or_notify_cancel()
        try:
            result = function(*arguments)
        except BaseException as error:
            done.set_exception(error)
            del work, done, arguments  # the error's traceback would keep them
        else:
            done.set_result(result)
        return True


@contextmanager
def threads(most: int) -> Iterator[Threads]:
    """Starts one thread per core, at most `most`; waits for all their work at the end."""
    made = Threads()
    try:
        for _ in range(min(most, os.cpu_count() or 1)):
            try:
                _thread.start_new_thread(made.run, ())
            except (RuntimeError, MemoryError):  # the calling thread does the rest
                break
        yield made
    finally:
        made.end()
