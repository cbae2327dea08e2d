"""Errors raised at any line of chosen source files, and real Ctrl-C at random moments.

`Lines` counts what a call executes of these files, line by line, and raises an error at one of
them, as Ctrl-C or a failed allocation there would; `every_interrupt` goes through all lines of a
call.

A function's return counts as a line of its own: an interrupt there comes when all that the function
does is done, and its result is lost. Three places do not count, as Python handles no signal there:
at the end of a `with` an error of a trace function would skip `__exit__`, at that of an `except`
the exception would stay the current one, and at a `yield` the generator's `finally` would not run.
Lines that autograd executes in a backward are among them: it runs in the calling thread meanwhile,
whichever device the gradients are on.
"""

from __future__ import annotations

import dis
import glob
import linecache
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import count
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

import pytest
import torch

import speedtorch

T = TypeVar("T")
Line = tuple[str, int, str]
"""A file's name, the line's number, and whether it is a line or a return."""

_FOLDER = os.path.dirname(os.path.abspath(speedtorch.__file__))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))


def source_files(*patterns: str) -> frozenset[str]:
    """Python files of the package by glob patterns relative to its folder; `**` for all below."""
    files: set[str] = set()
    for pattern in patterns:
        found = glob.glob(os.path.join(_FOLDER, pattern), recursive=True)
        assert found, f"no source file matches {pattern!r}"
        files.update(found)
    return frozenset(files)


PACKAGE = source_files("**/*.py")
OPTIMIZERS = frozenset(glob.glob(os.path.join(_TORCH, "optim", "*.py")))
"""torch's own optimizers."""

TRAINING = PACKAGE - source_files("optim/row_wise_adagrad.py")
"""Without our own optimizer's step, which may leave rows half done as torch's do."""
ONLY_COUNTING = frozenset(
    {"surely_above", "planned_refresh", "_uses_of", "<genexpr>", "<listcomp>"}
)
"""Loops that change nothing themselves: an error in one is that of the line that calls it."""

# What calls the hooks of an optimizer's step has as many lines as there are hooks.
AROUND_STEP = frozenset({"wrapper", "profile_hook_step", "<genexpr>"})


class Lines:
    """Counts the lines that are executed of some files, and raises an error at one of them.

    It catches its own error, and nothing else; what it raised is in `raised`, and whether that came
    out of the call in `came_out`: code that must not fail (a finaliser) swallows it, and code that
    is allowed to wait raises it later.

    Args:
        files: which files count.
        at: at which line, from 1 on; None: at none.
        error: makes the error.
        skip: names of functions whose lines do not count.
    """

    def __init__(
        self,
        files: Iterable[str],
        at: int | None = None,
        error: Callable[[], BaseException] = KeyboardInterrupt,
        *,
        skip: Iterable[str] = (),
    ) -> None:
        self._files = frozenset(files)
        self._skip = frozenset(skip)
        self._at = at
        self._error = error
        self.count = 0
        self.raised: BaseException | None = None
        self.came_out = False
        self.where: Line | None = None
        """Where it was raised."""
        self.seen: list[Line] | None = [] if at is None else None
        """All lines, where none is to fail."""

    def __enter__(self) -> Lines:
        # A device's own thread for backwards is none that Python can trace.
        self._grad = torch.is_grad_enabled()
        self._functions = torch._C._get_torch_function_state()
        self._one_thread = torch.autograd.set_multithreading_enabled(False)
        self._before = sys.gettrace()
        # Kept: CPython 3.11 has no reference while it makes a call's frame object, and a finalizer
        # that the garbage collector runs meanwhile may end the trace.
        self._trace = self._call
        sys.settrace(self._trace)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        sys.settrace(self._before)
        self._one_thread.__exit__(None, None, None)
        torch.set_grad_enabled(self._grad)  # torch may not have come to that
        torch._C._set_torch_function_state(self._functions)  # nor to the end of a `with`
        self.came_out = self.raised is not None and error is self.raised
        if self.came_out:
            assert error is not None
            error.__traceback__ = None  # or it would keep everything that the call had
            error.__context__ = None
        return self.came_out

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in self._files or code.co_name in self._skip:
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "exception":
            return self._line
        if frame.f_lasti in _left_out(frame.f_code, event):
            return self._line
        self.count += 1
        if self.seen is not None:
            self.seen.append((frame.f_code.co_filename, frame.f_lineno, event))
        elif self.count == self._at:
            sys.settrace(None)
            self.where = (frame.f_code.co_filename, frame.f_lineno, event)
            self.raised = self._error()
            raise self.raised
        return self._line


@cache
def _left_out(code: CodeType, event: str) -> frozenset[int]:
    """Places in the code where an event is none of a line."""
    name = "POP_EXCEPT" if event == "line" else "YIELD_VALUE"
    ends = {each.offset for each in dis.get_instructions(code) if each.opname == name}
    return frozenset(ends | _ends_of_with(code) if event == "line" else ends)


def _ends_of_with(code: CodeType) -> set[int]:
    """Places in the code that are lines of a `with` again, after its beginning."""
    begun: set[int] = set()
    ends: set[int] = set()
    for start, end, line in code.co_lines():
        source = linecache.getline(code.co_filename, line or 0)
        if line is None or not source.lstrip().startswith("with "):
            continue
        if line in begun:
            ends.update(range(start, end, 2))
        begun.add(line)
    return ends


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("pretended")


def in_step_of_torch(
    at: int | None = None, error: Callable[[], BaseException] = KeyboardInterrupt
) -> Lines:
    """Lines of torch's optimizers, without those that call the hooks of their steps."""
    return Lines(OPTIMIZERS, at, error, skip=AROUND_STEP)


def every_interrupt(
    prepare: Callable[[], T],
    call: Callable[[T], object],
    error: Callable[[], BaseException] = KeyboardInterrupt,
    *,
    files: Iterable[str] = PACKAGE,
    every: int = 1,
) -> Iterator[tuple[T, Lines]]:
    """Interrupts a call at its lines in turn, each time on something newly prepared.

    `every` 1 is for each line each time that it is executed; 47 is for each 47th of the lines that
    are new to the call, counted from the last one. Yields what was prepared, and where the call was
    interrupted, until a call comes through.
    """
    for number in count(1) if every == 1 else _new_lines(prepare, call, files)[::-every][::-1]:
        prepared = prepare()
        with Lines(files, number, error) as lines:
            call(prepared)
        if lines.raised is None:
            return
        yield prepared, lines


EVERY = pytest.mark.parametrize(
    "every", [47, pytest.param(1, marks=pytest.mark.nightly)], ids=["every-47th-line", "every-line"]
)
"""For every_interrupt: the ordinary run takes a share of the lines, `make nightly` all of them."""


def _new_lines(
    prepare: Callable[[], T], call: Callable[[T], object], files: Iterable[str]
) -> list[int]:
    """Numbers of the lines that a call executes for the first time."""
    call(prepare())  # what is imported or measured at first use is there
    prepared = prepare()
    with Lines(files) as lines:
        call(prepared)
    assert lines.seen is not None
    return first_of_each(lines.seen)


def first_of_each(seen: list[Any]) -> list[int]:
    """Numbers, from 1 on, of the first time that each of the things was seen."""
    first: dict[Any, int] = {}
    for number, each in enumerate(seen, 1):
        first.setdefault(each, number)
    return list(first.values())


class CtrlC:
    """Real SIGINTs, each at a random moment of a piece of work."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._armed = False

    def during(self, work: Callable[[], object], seconds: float) -> KeyboardInterrupt | None:
        """Does the work, which takes so long, with one SIGINT; returns its interrupt or None."""
        sender = threading.Timer(
            self._random.uniform(0, seconds), os.kill, (os.getpid(), signal.SIGINT)
        )
        grad = torch.is_grad_enabled()
        before = signal.signal(signal.SIGINT, self._interrupt)
        sender.start()
        try:
            # Set and read by this thread alone, so that none comes after the work.
            self._armed = True
            work()
            self._armed = False
        except KeyboardInterrupt as error:
            return error
        finally:
            self._armed = False
            sender.join()
            time.sleep(0)  # a signal that is on its way is handled before the handler goes
            signal.signal(signal.SIGINT, before)
            torch.set_grad_enabled(grad)
        return None

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt
