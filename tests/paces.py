"""How the loops of prefetch go in tests: as on a GPU that has enough to do, unless a test chooses.

On the CPU prefetch hands batches through, and on a GPU it measures; both would leave most of what
plans batches ahead to chance.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from speedtorch.nn.prefetch_pace import AHEAD, Pace, pace_of
from speedtorch.nn.row_module import RowModule

__all__ = ["AHEAD", "Turning", "choose", "install"]

prefetch = importlib.import_module("speedtorch.nn.prefetch")  # nn has a function of the name
_chosen: list[Pace | None] = [AHEAD]


class Turning:
    """Plans some batches ahead, and then hands some through."""

    def __init__(self, every: int = 3, *, checks: bool = True) -> None:
        self._every, self._steps, self.checks = every, 0, checks

    @property
    def is_ahead(self) -> bool:
        return self._steps // self._every % 2 == 0

    def begin(self) -> None:
        pass

    def note_step(self) -> None:
        self._steps += 1


def choose(pace: Pace | None = AHEAD) -> None:
    """Lets the loops that begin from now on go at this pace; None: as users have it."""
    _chosen[0] = pace


def _pace_of(modules: Sequence[RowModule]) -> Pace:
    return _chosen[0] or pace_of(modules)


def install() -> None:
    prefetch.pace_of = _pace_of
