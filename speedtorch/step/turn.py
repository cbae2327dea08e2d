"""Turn: one thread at a time uses the rows of a module."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

from speedtorch._C import Turn

__all__ = ["Turn", "alone", "together", "unite"]

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Result = TypeVar("_Result")

# Of who takes several turns: two that each had some of them would wait for the others.
_several = threading.RLock()


def alone(method: _Method) -> _Method:
    """Lets a method wait until no other thread uses the rows, whose Turn is `self.turn`."""

    @wraps(method)
    def in_turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.turn:
            return method(self, *args, **kwargs)

    return in_turn  # type: ignore[return-value]


def together(turns: Sequence[Turn], call: Callable[[], _Result]) -> _Result:
    """Calls a function in several turns. The thread must have none before."""
    if len(turns) == 1:
        with turns[0]:
            return call()
    with _several:
        return _within(turns, 0, call)


def _within(turns: Sequence[Turn], taken: int, call: Callable[[], _Result]) -> _Result:
    # No ExitStack, in whose code Ctrl-C could leave a turn taken. A turn that this thread has may
    # be taken again: the last one is, where there are no four.
    last = len(turns) - 1
    a, b = turns[min(taken + 1, last)], turns[min(taken + 2, last)]
    with turns[taken], a, b, turns[min(taken + 3, last)]:
        return call() if taken + 4 > last else _within(turns, taken + 4, call)


def unite(turns: Sequence[Turn]) -> None:
    """Makes turns one for ever. The thread must have all of them."""
    for each in turns[1:]:
        turns[0].unite(each)
