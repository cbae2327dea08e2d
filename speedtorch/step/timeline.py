"""Named torch.profiler ranges for the work of a step outside ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

from speedtorch.torch_internals import is_profiling

__all__ = ["in_timeline"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def in_timeline(name: str) -> Callable[[_Function], _Function]:
    """Decorates a function so that a running profiler records its calls under `name`."""

    def decorate(function: _Function) -> _Function:
        """Returns the function with its calls recorded."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            """Calls the function, in a range if a profiler is running."""
            if not is_profiling():  # a range costs as much time as a small op, even unrecorded
                return function(*args, **kwargs)
            with torch.profiler.record_function(name):
                return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
