"""Interrupts of the tests come only where Python could raise them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from interrupts import Lines


class Counted:
    """Counts its blocks that are open."""

    def __init__(self) -> None:
        self.open = 0

    def __enter__(self) -> None:
        self.open += 1

    def __exit__(self, *_: object) -> None:
        self.open -= 1


@contextmanager
def within(counted: Counted) -> Iterator[None]:
    with counted:
        yield


def call(counted: Counted) -> int:
    with within(counted):
        try:
            raise ValueError
        except ValueError:
            return 1


def test_an_interrupt_leaves_no_block_and_keeps_no_exception_current() -> None:
    for line in range(1, 99):
        counted = Counted()
        with Lines([__file__], line, skip=["__enter__", "__exit__"]) as lines:
            call(counted)
        assert counted.open == 0, lines.where
        assert sys.exc_info() == (None, None, None), lines.where
        if lines.raised is None:
            break
    assert 5 < line < 98


class Cycle:
    """Garbage whose finalizer runs code of this file."""

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        total = 0
        for number in range(3):
            total += number


def nothing(*_: object) -> None:
    pass


def calls() -> None:
    kept: list[list[object]] = []
    for _ in range(40):
        kept.append([])
    nothing([kept], [kept])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_of_a_finalizer_ends_no_call_of_the_tracer() -> None:
    thresholds = gc.get_threshold()
    try:
        for threshold in range(1, 120):
            gc.collect()
            Cycle()
            gc.set_threshold(threshold)
            with Lines([__file__], 3, skip=["calls", "nothing", "__init__"]) as lines:
                calls()
            gc.set_threshold(*thresholds)
            assert not lines.came_out
    finally:
        gc.set_threshold(*thresholds)
