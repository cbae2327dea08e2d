"""Optional threads that copy and hash for files, and initialize tables.

Unlike the threads of concurrent.futures, these threads accept work during interpreter shutdown,
when a thread may still be saving. threads() also ends them after Ctrl-C. If no thread starts, or a
thread ends before it gets work, the calling thread does the work. CPython's Thread.start() is
unsuitable: the call waits forever for a thread that has too little memory to start.
"""

from __future__ import annotations

import _thread
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

__all__ = ["MOST_THREADS", "Threads", "threads"]

MOST_THREADS = 16
"""The most threads for one file."""

_START_SECONDS = 2.0
"""How long to wait for threads that may have too little memory to start."""

_Result = TypeVar("_Result")
_Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Threads:
    """Threads that do work in the order of begin()."""

    def __init__(self) -> None:
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._count = 0
        """The number of threads."""
        self._begun: SimpleQueue[_thread.LockType] = SimpleQueue()
        """One lock for each thread that has begun, which holds the lock until it ends."""

    def start(self) -> None:
        """Starts a thread. Raises RuntimeError or MemoryError if the system refuses one."""
        _thread.start_new_thread(self._run, ())
        self._count += 1

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

    def _run(self) -> None:
        ended = _thread.allocate_lock()
        with ended:
            self._begun.put(ended)
            while self._run_work(self._work.get()):
                pass
            self._work.put(None)  # ends the next thread

    def end(self) -> None:
        """Does all work that no thread has started, and waits for the end of all threads.

        A thread that began after the end of the interpreter would end the process (SIGSEGV).
        """
        self._work.put(None)
        try:
            while self._run_work(self._work.get()):
                pass
            self._work.put(None)
        finally:
            until = time.monotonic() + _START_SECONDS
            with suppress(Empty):
                for _ in range(self._count):
                    with self._begun.get(timeout=max(0.0, until - time.monotonic())):
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
                made.start()
            except (RuntimeError, MemoryError):  # the calling thread does the rest
                break
        yield made
    finally:
        made.end()
