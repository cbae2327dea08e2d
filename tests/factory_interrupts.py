"""Exceptions at every line of the package, one run for each line.

`interrupted` raises an error at the n-th place that a call reaches; `every_interrupt` does so for
n = 0, 1, 2, ... until a call comes through untouched. A place is the begin of a line, or the moment
between a function's last line and what its caller does with the result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from inspect import CO_GENERATOR
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import speedtorch

_PACKAGE = Path(speedtorch.__file__).parent

Lines = Callable[[str], bool]
"""Whether a source file's lines are places to raise at."""


def lines_of(*names: str) -> Lines:
    """The lines of files and folders of the package, such as "legacy" or "plan_memo.py"."""
    chosen = [_PACKAGE / name for name in names]
    missing = [str(path) for path in chosen if not path.exists()]
    if missing:
        raise ValueError(f"lines_of: there is no {', '.join(missing)}")
    known: dict[str, bool] = {}

    def chosen_file(file: str) -> bool:
        if file not in known:
            path = Path(file)
            known[file] = any(path == each or each in path.parents for each in chosen)
        return known[file]

    return chosen_file


EVERY_LINE = lines_of("")


class _Injected:
    """A trace function that raises at the n-th place."""

    def __init__(self, lines: Lines, at: int, error: BaseException) -> None:
        self.reached = False
        self._lines, self._left, self._error = lines, at, error

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self.reached or not self._lines(frame.f_code.co_filename):
            return None
        return self._within

    def _within(self, frame: FrameType, event: str, arg: Any) -> Any:
        # A generator returns at each yield, and when it is thrown away: nothing can raise there.
        generates = frame.f_code.co_flags & CO_GENERATOR
        if self.reached or not (event == "line" or (event == "return" and not generates)):
            return self._within
        self._left -= 1
        if self._left < 0:
            self.reached = True
            raise self._error
        return self._within


def interrupted(
    call: Callable[[], object],
    at: int,
    *,
    error: type[BaseException] = KeyboardInterrupt,
    lines: Lines = EVERY_LINE,
) -> bool:
    """Runs a call in which an error is raised at its n-th place.

    Args:
        call: what to run; errors of its own come through.
        at: which place, from 0.
        error: what is raised; the call may catch it.
        lines: where it may be raised.

    Returns:
        Whether the call came to that place.
    """
    raised = error("injected")
    injected = _Injected(lines, at, raised)
    before, grad = sys.gettrace(), torch.is_grad_enabled()
    sys.settrace(injected)
    try:
        call()
    except BaseException as caught:
        if caught is not raised:
            raise
    finally:
        sys.settrace(before)
        # torch.no_grad() that is interrupted as it ends leaves gradients off, whoever uses it.
        torch.set_grad_enabled(grad)
    return injected.reached


def every_interrupt(
    prepare: Callable[[], Any],
    call: Callable[[Any], object],
    *,
    error: type[BaseException] = KeyboardInterrupt,
    lines: Lines = EVERY_LINE,
) -> Iterator[Any]:
    """Interrupts a call at each of its places in turn, each time on something newly prepared.

    Yields:
        What was prepared, after each interrupted call; the call that comes through ends it.
    """
    for at in count():
        prepared = prepare()

        def run(prepared: Any = prepared) -> None:
            call(prepared)

        if not interrupted(run, at, error=error, lines=lines):
            return
        yield prepared
