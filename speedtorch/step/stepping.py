"""Stepping: the optimizer whose step() runs in a thread, and its RowWeights."""

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
        """The RowWeights found among the optimizer's parameters."""

    def forget(self) -> None:
        """Called when the parameters have changed: the next step searches all of them again."""


class Stepping(threading.local):
    """The optimizer whose step() runs in this thread, or was ended by an exception.

    References to the optimizer and its weights are weak.
    """

    _now: tuple[Callable[[], Any], Callable[[], Any]] | None = None

    def begin(self, optimizer: torch.optim.Optimizer, entered: Entered) -> None:
        """Called before a step()."""
        self._now = weakref.ref(optimizer), weakref.ref(entered)

    def end(self) -> None:
        """Called after a step()."""
        self._now = None

    @property
    def now(self) -> tuple[torch.optim.Optimizer, Entered] | None:
        """The optimizer and its Entered, or None."""
        if self._now is None:
            return None
        optimizer, entered = (reference() for reference in self._now)
        if optimizer is None or entered is None:
            return None
        return optimizer, entered


stepping = Stepping()


def places_of_weights(optimizer: torch.optim.Optimizer) -> list[tuple[list[Any], int]]:
    """The places of an optimizer's RowWeights: the parameter list of a group, and the index."""
    return [
        (group["params"], place)
        for group in optimizer.param_groups
        for place, param in enumerate(group["params"])
        if type(param) is RowWeight and param._rows._weight() is param
    ]
