"""Uses: callers that keep units on the device, and what each use needs there."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from speedtorch.layers.unit import Unit

__all__ = ["Need", "Use", "Uses"]


@dataclass(eq=False)
class Use:
    """Units that remain on the device until the holder of this ends or drops it.

    A backward makes gradients of `trained` units; `stepped` units are stepped during this use.
    """

    units: tuple[Unit, ...]
    state: bool
    trained: set[Unit]
    stepped: set[Unit]


class Need(NamedTuple):
    """Whether the uses of a unit need optimizer state, and gradients that a backward makes."""

    state: bool
    gradients: bool


class Uses:
    """The current uses, and the needs of each unit's last one."""

    def __init__(self) -> None:
        self._current: weakref.WeakSet[Use] = weakref.WeakSet()
        self._last: weakref.WeakKeyDictionary[Unit, Need] = weakref.WeakKeyDictionary()

    def begin(self, units: Iterable[Unit], *, state: bool = False, gradients: bool = False) -> Use:
        """Keeps units on the device until `end()`, or until the use that it returns is dropped."""
        units = tuple(units)
        use = Use(units, state, set(units if gradients else ()), set(units if state else ()))
        for other in self._current if state else ():
            other.stepped.update(unit for unit in use.units if unit in other.units)
        self._current.add(use)
        return use

    def end(self, use: Use) -> None:
        """Ends a use; later uses of its units are expected to have the same needs."""
        self._current.discard(use)
        for unit in () if use.state else use.units:
            self._last[unit] = Need(unit in use.stepped, unit in use.trained)

    def of(self, unit: Unit) -> list[Use]:
        """The current uses of a unit."""
        return [use for use in self._current if unit in use.units]

    def last_need(self, unit: Unit) -> Need | None:
        """The needs of the last use that has ended; None: there was none."""
        return self._last.get(unit)

    def needs(self) -> dict[Unit, Need]:
        """The needs of all units in use."""
        found: dict[Unit, Need] = {}
        for use in self._current:
            for unit in use.units:
                state, gradients = found.get(unit, (False, False))
                found[unit] = Need(state or use.state, gradients or unit in use.trained)
        return found
