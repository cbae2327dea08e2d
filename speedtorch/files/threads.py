"""Threads that copy and hash for files, which the calling thread can do without.

They take work until the process ends: those of concurrent.futures take none once the interpreter
has begun to shut down, when a thread that saves may still have some. They end after Ctrl-C. Where
no thread can be started, or one ends before it takes work, the calling thread does the work:
Thread.start() of CPython waits for ever for a thread that has no memory to begin with.
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

_Result = TypeVar("_Result")
_Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Threads:
    """Threads that take work in its order."""

    def __init__(self) -> None:
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._begun: list[_thread.LockType] = []
        """A lock of each thread that has begun, which has it until it ends."""

    def begin(self, function: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
        """Has a thread call a function; result() gives or raises what that does."""
        done: Future[_Result] = Future()
        self._work.put((done, function, arguments))
        return done

    def result(self, done: Future[_Result]) -> _Result:
        """The result of work, which this thread does if no other has taken it."""
        while not (done.running() or done.done()):
            try:
                work = self._work.get_nowait()
            except Empty:  # another thread has taken it
                break
            self._done(work)
        return done.result()

    def run(self) -> None:
        """Works until the end, in a thread."""
        ended = _thread.allocate_lock()
        with ended:
            self._begun.append(ended)
            while self._done(self._work.get()):
                pass
            self._work.put(None)  # for the next thread

    def end(self) -> None:
        """Does the work that no thread has taken, and waits for the rest."""
        self._work.put(None)
        try:
            while self._done(self._work.get()):
                pass
            self._work.put(None)
        finally:
            for each in self._begun:
                with each:
                    pass

    @staticmethod
    def _done(work: _Work | None) -> bool:
        if work is None:
            return False
        done, function, arguments = work
        done.set_running_or_notify_cancel()
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
    made = Threads()
    try:
        for _ in range(min(most, MOST_THREADS, os.cpu_count() or 1)):
            try:
                _thread.start_new_thread(made.run, ())
            except (RuntimeError, MemoryError):  # this thread does the work of others
                break
        yield made
    finally:
        made.end()
