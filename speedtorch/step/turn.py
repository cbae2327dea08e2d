"""Turn: one thread at a time uses the rows of a module."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

__all__ = ["Turn", "alone"]

_Method = TypeVar("_Method", bound=Callable[..., Any])

_GIVE_WAY = 5e-5  # seconds: what a thread that waits for a lock takes to wake up


class Turn:
    """A lock that a thread may take again while it has it: `with turn:`.

    A thread that releases it gives way to one that waits. Python's own locks go to the thread that
    asks next, which in a loop is the same thread for minutes.
    """

    __slots__ = ("_acquire", "_release", "_waiting")

    def __init__(self) -> None:
        lock = threading.RLock()
        self._acquire, self._release = lock.acquire, lock.release
        self._waiting = 0

    def __enter__(self) -> None:
        if not self._acquire(False):
            self._waiting += 1
            try:
                self._acquire()
            finally:
                self._waiting -= 1

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._release()
        if self._waiting:
            time.sleep(_GIVE_WAY)


def alone(method: _Method) -> _Method:
    """Lets a method wait until no other thread uses the rows, whose Turn is `self.turn`."""

    @wraps(method)
    def in_turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.turn:
            return method(self, *args, **kwargs)

    return in_turn  # type: ignore[return-value]
