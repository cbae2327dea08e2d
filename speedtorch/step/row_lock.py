"""RowLock: the reentrant lock with which one thread at a time uses the rows of a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

from speedtorch._C import RowLock, RowLocks

__all__ = ["RowLock", "RowLocks", "merge_locks", "serialized"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def serialized(method: _Method) -> _Method:
    """Decorates a method so that it holds `self.lock`, the lock of the rows."""

    @wraps(method)
    def call_locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the method while this thread has the lock."""
        with self.lock:
            return method(self, *args, **kwargs)

    return call_locked  # type: ignore[return-value]


def merge_locks(locks: Sequence[RowLock]) -> None:
    """Merges locks into one lock. The calling thread must hold all of them."""
    for lock in locks[1:]:
        locks[0].merge(lock)
