"""ModuleHook: a hook of a module that copies and files of the module do not have."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from speedtorch.torch_internals import never_compiled

__all__ = ["ModuleHook", "weak_call"]


class ModuleHook:
    """Calls a function with what torch gives a hook; a copy, as of its module, does nothing."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call

    @partial(never_compiled, reason="units come and go")
    def __call__(self, *given: Any) -> Any:
        """What torch calls."""
        return None if self._call is None else self._call(*given)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()


def weak_call(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a bound method for as long as its object is alive; None after that."""
    weak = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        return None if (called := weak()) is None else called(*args)

    return call
