"""Turn: the lock with which one thread at a time uses the rows of a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

from speedtorch._C import Turn, Turns

__all__ = ["Turn", "Turns", "alone", "unite"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def alone(method: _Method) -> _Method:
    """Decorates a method so that it holds `self.turn`, the lock of the rows."""

    @wraps(method)
    def in_turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.turn:
            return method(self, *args, **kwargs)

    return in_turn  # type: ignore[return-value]


def unite(turns: Sequence[Turn]) -> None:
    """Merges locks into one lock. The calling thread must hold all of them."""
    for each in turns[1:]:
        turns[0].unite(each)
