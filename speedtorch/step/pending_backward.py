"""PendingBackwards: which lookups of a step may still bring a gradient, thread by thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

__all__ = ["PendingBackward", "PendingBackwards"]


class PendingBackward:
    """Lives as long as a graph may still bring a gradient of the lookups of a step."""


class PendingBackwards:
    """Those of the lookups of the latest step that has any."""

    def __init__(self) -> None:
        self._now: tuple[int, dict[int, Callable[[], PendingBackward | None]]] = (0, {})
        """The number of the step, and what its lookups wait for by the thread that made them."""

    def made(self, step: int) -> PendingBackward:
        """What a graph keeps for a lookup of this thread in the step of this number."""
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
        """Whether a gradient of rows that were looked up in this step may still come."""
        number, by_thread = self._now
        if number == step:
            for pending in by_thread.values():
                if pending() is not None:
                    return True
        return False

    def other_thread(self, step: int) -> int | None:
        """Another thread of which a lookup in this step still waits for its backward."""
        number, by_thread = self._now
        own = threading.get_ident()
        if number == step:
            for thread, pending in by_thread.items():
                if thread != own and pending() is not None:
                    return thread
        return None
