"""ModuleHook: a module hook that does nothing in copies and pickles of the module."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from speedtorch.torch_internals import never_compiled

__all__ = ["ModuleHook", "weak_call"]


class ModuleHook:
    """Calls a function with the hook's arguments; a copied or unpickled hook does nothing."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call

    @partial(never_compiled, reason="offloaded modules move between host and device")
    def __call__(self, *given: Any) -> Any:
        """Calls the function; torch calls this."""
        return None if self._call is None else self._call(*given)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()


def weak_call(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a bound method without keeping its object alive; returns None once that is deleted."""
    weak = weakref.WeakMethod(method)

    return lambda *args: None if (called := weak()) is None else called(*args)
