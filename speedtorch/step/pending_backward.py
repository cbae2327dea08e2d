"""PendingBackwards: lookups of a step whose backward may still run, by thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

__all__ = ["PendingBackward", "PendingBackwards"]


class PendingBackward:
    """Lives as long as an autograd graph may still run the backward of a step's lookups."""


class PendingBackwards:
    """The pending backwards of the latest step that has lookups."""

    def __init__(self) -> None:
        self._now: tuple[int, dict[int, Callable[[], PendingBackward | None]]] = (0, {})
        """The number of the step, and weak references to its PendingBackward by thread."""

    def made(self, step: int) -> PendingBackward:
        """Returns the object that the autograd graph of a lookup must keep alive.

        All lookups of one thread in one step share the object.
        """
        number, by_thread = self._now
        if number != step:
            number, by_thread = self._now = step, {}
        thread = threading.get_ident()
        reference = by_thread.get(thread)
        pending = None if reference is None else reference()
        if pending is None:
            pending = PendingBackward()
            by_thread[thread] = weakref.ref(pending)
        return pending

    def are_expected(self, step: int) -> bool:
        """Whether the backward of a lookup of this step may still run."""
        number, by_thread = self._now
        if number == step:
            for pending in by_thread.values():
                if pending() is not None:
                    return True
        return False

    def other_thread(self, step: int) -> int | None:
        """The id of another thread with a pending backward in this step, or None."""
        number, by_thread = self._now
        own = threading.get_ident()
        if number == step:
            for thread, pending in by_thread.items():
                if thread != own and pending() is not None:
                    return thread
        return None
