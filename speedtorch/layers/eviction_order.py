"""EvictionOrder: which units, or which optimizer state alone, are evicted first."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from math import inf
from typing import NamedTuple

from speedtorch.layers.device_units import DeviceUnits
from speedtorch.layers.unit import Unit
from speedtorch.layers.unit_calls import Caller
from speedtorch.layers.uses import Uses

__all__ = ["Eviction", "EvictionOrder"]


class Eviction(NamedTuple):
    """A unit to evict, or its optimizer state alone."""

    unit: Unit
    state_only: bool = False


class EvictionPriority(IntEnum):
    """Prefetched units are evicted after idle ones, and at last the state of units in use."""

    IDLE, PREFETCHED, STATE_IN_USE = range(3)


class _Candidate(NamedTuple):
    """What may be evicted; of those with the same next use the lowest `turn` is first."""

    priority: EvictionPriority
    next_use: float
    turn: int
    eviction: Eviction
    nbytes: int
    is_used: bool


class EvictionOrder:
    """Evicts what is used last in the order seen before, else the least recently used.

    Attributes:
        caller: predicts when units are used; None: nothing does.
        turns: units that are used next, one after another, with their turns.
        prefetched: units that were prefetched and not used since.
    """

    def __init__(self, units: DeviceUnits, uses: Uses) -> None:
        self._units, self._uses = units, uses
        self.caller: Caller[Unit] | None = None
        self.turns: dict[Unit, int] = {}
        self.prefetched: set[Unit] = set()

    def follow(self, caller: Caller[Unit] | None) -> None:
        """Sets the caller."""
        self.caller = caller

    def candidates(self) -> list[_Candidate]:
        """Units and state that may be evicted, in the order of eviction."""
        found, needs, first = [], self._uses.needs(), EvictionPriority.IDLE
        for place, unit in enumerate(self._units.by_last_use):
            nbytes, is_used = self._units.bytes_of(unit), unit in needs
            if not nbytes:
                continue
            use = self._next_use(unit, state=False)
            use_of_state = self._next_use(unit, state=True)
            # State that a step has made is not copied yet: it goes with its unit if that may go.
            state_bytes = unit.packs.state_bytes + (unit.packs.made_state_bytes if is_used else 0)
            may_split = state_bytes and not (is_used and needs[unit].state)
            if may_split and (is_used or use_of_state > use):
                is_needed = not use_of_state or use_of_state == use == inf or unit in self.turns
                at = EvictionPriority.STATE_IN_USE if is_used and is_needed else first
                eviction = Eviction(unit, state_only=True)
                found.append(_Candidate(at, use_of_state, place, eviction, state_bytes, is_used))
                nbytes -= state_bytes
            if not is_used:
                is_due = unit in self.prefetched or unit in self.turns
                at, turn = (EvictionPriority.PREFETCHED, -place) if is_due else (first, place)
                found.append(_Candidate(at, use, turn, Eviction(unit), nbytes, is_used))
        found.sort(key=lambda each: (each.priority, -each.next_use, each.turn))
        return found

    def evictable(
        self, candidates: Iterable[_Candidate], unit: Unit | None, *, by_force: bool = False
    ) -> dict[Eviction, int]:
        """What may be evicted for `unit`, and its bytes; the unit's own state if that is in use.

        by_force: also what is used before `unit`, then prefetched units, then state of units in
        use.
        """
        soonest = inf if unit is None else self._next_use(unit, state=False)
        return {
            each.eviction: each.nbytes
            for each in candidates
            if (each.is_used or each.eviction.unit is not unit)
            and (by_force or (not each.priority and (soonest == inf or each.next_use > soonest)))
        }

    def _next_use(self, unit: Unit, *, state: bool) -> float:
        """As Caller.next_use, behind the units that have a turn."""
        if unit in self.turns:
            return self.turns[unit] - next(iter(self.turns.values()))
        later = inf if self.caller is None else self.caller.next_use(unit, state=state)
        return later + len(self.turns)
