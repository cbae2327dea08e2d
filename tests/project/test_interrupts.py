"""Interrupts of the tests come only where Python could raise them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
