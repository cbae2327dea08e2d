"""Functions that stay out of the graphs that torch.compile makes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch._compile import _disable_dynamo

__all__ = ["not_compiled"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_REASON = "the number of held rows changes from step to step"


def not_compiled(function: _Function) -> _Function:
    """Breaks a graph that torch.compile makes; costs nothing where none is made.

    torch.compiler.disable would load torch's compiler when a function is decorated, which takes
    longer than all of our own import; this one does so within the first graph that it breaks.
    """
    broken = _disable_dynamo(function)
    # What torch.compiler.disable(reason=) sets: who asks for one graph is told.
    vars(broken).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_REASON)

    @wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (broken if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return cast(_Function, either)
