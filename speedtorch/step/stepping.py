"""Stepping: the optimizer whose step() runs in a thread, and the weights among its parameters."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from speedtorch.step.row_weight import RowWeight

__all__ = ["Entered", "places_of_weights", "stepping"]


class Entered(Protocol):
    """An optimizer whose step() runs."""

    @property
    def weights(self) -> Sequence[RowWeight]:
        """Those that it is known to hold."""

    def forget(self) -> None:
        """Called when it holds others: its next step looks at each parameter again."""


class Stepping(threading.local):
    """The optimizer whose step() runs in this thread; an exception may have left it.

    It keeps neither the optimizer nor its weights.
    """

    _now: tuple[Callable[[], Any], Callable[[], Any]] | None = None

    def begin(self, optimizer: torch.optim.Optimizer, entered: Entered) -> None:
        """Called before a step()."""
        self._now = weakref.ref(optimizer), weakref.ref(entered)

    def end(self) -> None:
        """Called after it."""
        self._now = None

    @property
    def now(self) -> tuple[torch.optim.Optimizer, Entered] | None:
        """It, and what is known of its weights."""
        if self._now is None:
            return None
        optimizer, entered = (each() for each in self._now)
        if optimizer is None or entered is None:
            return None
        return optimizer, entered


stepping = Stepping()


def places_of_weights(optimizer: torch.optim.Optimizer) -> list[tuple[list[Any], int]]:
    """Where the weights of rows are that an optimizer holds: a list of a group, and the index."""
    return [
        (held, place)
        for group in optimizer.param_groups
        for held in (group["params"],)
        for place, each in enumerate(held)
        if type(each) is RowWeight and each._rows._weight() is each
    ]
