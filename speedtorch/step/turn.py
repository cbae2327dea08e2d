"""Turn: one thread at a time uses the rows of a module."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from speedtorch._C import Turn

__all__ = ["Turn", "alone"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def alone(method: _Method) -> _Method:
    """Lets a method wait until no other thread uses the rows, whose Turn is `self.turn`."""

    @wraps(method)
    def in_turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.turn:
            return method(self, *args, **kwargs)

    return in_turn  # type: ignore[return-value]
