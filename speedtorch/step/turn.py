"""Turn: one thread at a time uses the rows of a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

from speedtorch._C import Turn, Turns

__all__ = ["Turn", "Turns", "alone", "unite"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def alone(method: _Method) -> _Method:
    """Lets a method wait until no other thread uses the rows, whose Turn is `self.turn`."""

    @wraps(method)
    def in_turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.turn:
            return method(self, *args, **kwargs)

    return in_turn  # type: ignore[return-value]


def unite(turns: Sequence[Turn]) -> None:
    """Makes turns one from now on. The thread must have all of them."""
    for each in turns[1:]:
        turns[0].unite(each)
