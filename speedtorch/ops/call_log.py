"""Formats calls as text, and logs each public call under SPEEDTORCH_LOG=calls."""

import inspect
import logging
import reprlib
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from numbers import Number
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from speedtorch.torch_internals import as_plain

__all__ = ["call_text", "log_calls"]

_log = logging.getLogger("speedtorch.calls")
_busy: set[int] = set()  # threads inside a public call, whose nested calls are not logged


class _Texts(reprlib.Repr):
    """Formats arguments and results without a read of any tensor or a wait for a GPU."""

    def repr_instance(self, x: object, level: int) -> str:
        """A tensor's dtype, shape and device, a short value itself, or another object's type."""
        if isinstance(x, Tensor):
            with as_plain():
                shape = "[nested]" if x.is_nested else list(x.shape)
                return f"{str(x.dtype).removeprefix('torch.')}{shape}@{x.device}"
        is_short = x is None or isinstance(x, Number | torch.dtype | torch.device)
        return str(x) if is_short else type(x).__name__

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """The first items, unsorted, because sorting would compare and read tensors."""
        return f"dict{self.repr_list([*x.items()], level)}"

    repr_set = repr_frozenset = repr_instance  # reprlib sorts sets, which compares their elements


call_text = _Texts().repr
"""Returns a short text of a value: for a tensor its dtype, shape and device, without elements."""


def _logged(function: Callable[..., Any], *, of_object: bool) -> Any:
    """Wraps a function to log its calls; a method is named by the type of its object."""

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        """Logs the call, except within another public call or under torch.compile."""
        # torch.compile traces only this branch.
        if torch.compiler.is_compiling() or (thread := threading.get_ident()) in _busy:
            return function(*arguments, **named)
        shown = [*map(call_text, arguments), *(f"{k}={call_text(v)}" for k, v in named.items())]
        name = function.__qualname__
        if of_object and arguments:
            kind = arguments[0] if isinstance(arguments[0], type) else type(arguments[0])
            name, shown = f"{kind.__name__}.{function.__name__}", shown[1:]
        outcome, began = "", time.perf_counter()
        _busy.add(thread)
        try:
            result = function(*arguments, **named)
            outcome = f"-> {call_text(result)}"
            return result
        except BaseException as error:
            outcome = f"raised {type(error).__name__}: {error}"
            raise
        finally:
            taken = (time.perf_counter() - began) * 1e6
            _busy.discard(thread)
            _log.info("%s(%s) %s, %.0f us", name, ", ".join(shown), outcome, taken)

    return call


def log_calls(*modules: ModuleType) -> None:
    """Logs the calls of all public functions, constructors and methods of modules from now on.

    Wrappers replace the functions, and the methods of classes and of their bases in speedtorch.
    Properties are not logged.
    """
    handler = logging.StreamHandler()
    # The handlers of the root logger, if there are any, print the records instead of this handler.
    handler.addFilter(lambda _: not logging.getLogger().handlers)
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    # The modules, classes and base classes whose members are replaced, with the members' names.
    owners: dict[Any, list[str]] = {module: module.__all__ for module in modules}
    for kind in [vars(module)[name] for module in modules for name in module.__all__]:
        for base in inspect.getmro(kind) if inspect.isclass(kind) else ():
            if base.__module__.startswith("speedtorch."):
                owners[base] = [name for name in vars(base) if not name.startswith("_")]
                owners[base] += ["__init__"] if "__init__" in vars(base) else []
    for owner, names in owners.items():
        for name, member in [(name, vars(owner)[name]) for name in names]:
            function = getattr(member, "__func__", member)  # unwraps class and static methods
            if inspect.isfunction(function):
                is_static = owner in modules or isinstance(member, staticmethod)
                logged = _logged(function, of_object=not is_static)
                # A class or static method is wrapped in its own kind again.
                setattr(owner, name, logged if function is member else type(member)(logged))
                if owner in modules:  # pickle looks functions up in their defining module
                    setattr(sys.modules[function.__module__], name, logged)
