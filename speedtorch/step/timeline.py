"""Names in a torch.profiler timeline for what a step does outside of its ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

from speedtorch.torch_internals import is_profiling

__all__ = ["in_timeline"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def in_timeline(name: str) -> Callable[[_Function], _Function]:
    """Gives the calls of a function a name in the timeline while a profiler records one."""

    def named(function: _Function) -> _Function:
        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not is_profiling():  # a range takes as long as a small op, recorded or not
                return function(*args, **kwargs)
            with torch.profiler.record_function(name):
                return function(*args, **kwargs)

        return called  # type: ignore[return-value]

    return named
