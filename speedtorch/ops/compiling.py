"""Functions that stay out of the graphs that torch.compile makes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from speedtorch.torch_internals import out_of_graphs

__all__ = ["not_compiled"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_compiled(function: _Function) -> _Function:
    """Breaks a graph that torch.compile makes; costs nothing where none is made."""
    broken = out_of_graphs(function, "the number of held rows changes from step to step")

    @wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (broken if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return cast(_Function, either)
