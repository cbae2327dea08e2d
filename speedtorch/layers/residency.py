"""Residency: which units have device memory, within a budget, and which are evicted for them."""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtorch.layers.offloaded_module import AutoLoader, OffloadedModule
from speedtorch.layers.transfer_stats import Memory, TransferStats
from speedtorch.memory.byte_count import text_of
from speedtorch.memory.side_stream import end_of_current
from speedtorch.torch_internals import current_stream

__all__ = ["Leaver", "Residency", "Use"]


@dataclass(eq=False)
class Use:
    """Units that remain on the device while a caller holds this object; `state`: for a step."""

    units: tuple[OffloadedModule, ...]
    state: bool
    trained: set[OffloadedModule]
    """Units for which a backward is expected to create gradients."""
    stepped: set[OffloadedModule]
    """Units that are stepped during this use."""


class Need(NamedTuple):
    """Whether uses of a unit need optimizer state for a step, and gradients of a backward."""

    state: bool
    gradients: bool


class Leaver(NamedTuple):
    """A unit that may be evicted, or only its optimizer state."""

    unit: OffloadedModule
    of_state: bool = False


class EvictionPriority(IntEnum):
    """Order of eviction: prefetched units come after idle ones, and state in use comes last."""

    IDLE, PREFETCHED, STATE_IN_USE = range(3)


class Candidate(NamedTuple):
    """A unit or state that may be evicted, and how soon a call needs it.

    Attributes:
        use: number of calls until the next use.
        turn: order among equal `use`; the lowest is evicted first.
        nbytes: bytes of device memory.
        is_used: whether the unit is in use.
    """

    priority: EvictionPriority
    use: float
    turn: int
    leaver: Leaver
    nbytes: int
    is_used: bool


class Residency:
    """Loads units to the device within a budget, and evicts other units for them.

    The evicted unit has the farthest next use in the recorded order. If the order is unknown, the
    unit is the least recently used one. Units in use are never evicted; their state may be.

    `first_state` returns, per optimizer, the bytes of state that a first step creates for a
    parameter.

    Attributes:
        hits: uses that found their unit on the device; `misses`: uses that did not.
        seconds_waited: seconds that the host has waited for evictions.
    """

    def __init__(
        self,
        device: torch.device,
        budget: int | None,
        traffic: TransferStats,
        first_state: Mapping[Optimizer, Callable[[Tensor], int]],
    ) -> None:
        self._device, self._budget, self._traffic = device, budget, traffic
        self._first_state = first_state
        self._there: OrderedDict[OffloadedModule, None] = OrderedDict()
        """Units that may have device memory, least recently used first."""
        self._uses: weakref.WeakSet[Use] = weakref.WeakSet()
        """Current uses; their callers hold the references."""
        self._wanted: dict[OffloadedModule, bool] = {}
        """Units to prefetch, and whether with their state."""
        self._awaited: set[OffloadedModule] = set()
        """Prefetched units that were not used yet."""
        self._going: list[Leaver] = []
        """Units and state in write-back before their eviction, oldest first."""
        self._left: dict[
            OffloadedModule, tuple[torch.cuda.Event | None, torch.cuda.Stream | None, int]
        ] = {}
        """For units not in use, the last use: end event, stream, and count of changes then."""
        self._others: dict[OffloadedModule, int] = {}
        """Bytes allocated for a unit on the device since its load, and expected in its uses."""
        self._last_needs: weakref.WeakKeyDictionary[OffloadedModule, Need] = (
            weakref.WeakKeyDictionary()
        )
        """Needs of each unit's last ended use, which the next use is expected to have."""
        self._calls: AutoLoader | None = None
        self._turns: dict[OffloadedModule, int] = {}
        """Units that each() uses next, with their positions."""
        self.hits = self.misses = 0
        self.seconds_waited = 0.0

    @property
    def there(self) -> list[OffloadedModule]:
        """Units with device memory, least recently used first."""
        return [each for each in self._there if self.bytes_of(each)]

    @contextmanager
    def using(self, units: Iterable[OffloadedModule], *, state: bool) -> Iterator[None]:
        """Context manager that loads units and keeps them on the device."""
        use = self.begin_use(units, state=state)
        try:
            self.fill_use(use)
            yield
        finally:
            self.end_use(use)

    def begin_use(
        self, units: Iterable[OffloadedModule], *, state: bool = False, gradients: bool = False
    ) -> Use:
        """Prevents eviction of units until end_use(), or until the returned Use is dropped."""
        units = tuple(units)
        use = Use(units, state, set(units if gradients else ()), set(units if state else ()))
        for other in self._uses if state else ():
            other.stepped.update(unit for unit in use.units if unit in other.units)
        self._uses.add(use)
        return use

    def fill_use(self, use: Use) -> None:
        """Loads the units of a use."""
        for unit in use.units:
            self._enter(unit, state=use.state)

    def _to_come(self, unit: OffloadedModule, need: Need) -> int:
        """Bytes that a unit in use will need beyond the counted ones, as in its last use."""
        last = self._last_needs.get(unit)
        if last is None or self._calls is not None:  # a AutoLoader knows the needs
            return 0
        count = unit.missing_gradients() if last.gradients and not need.gradients else 0
        return count + (unit.missing_bytes(state=True) if last.state and not need.state else 0)

    def expect_gradients(self, unit: OffloadedModule) -> None:
        """Frees budget for the gradients that a backward is about to create for a unit.

        Raises RuntimeError if the budget is too small.
        """
        if self._budget is None:
            return
        uses = [use for use in self._uses if unit in use.units]
        for use in uses:
            use.trained.add(unit)
        need = Need(any(use.state for use in uses), gradients=True)
        self._others[unit] = self._other_bytes(unit, need)
        self._makes_room(unit, 0, waits=True)

    def end_use(self, use: Use) -> None:
        """Ends a use, so that its units may be evicted."""
        self._uses.discard(use)
        for unit in use.units:
            if not use.state:
                self._last_needs[unit] = Need(unit in use.stepped, unit in use.trained)
            self._leave(unit)
        self._makes_room(None, 0, waits=False)
        self.advance()

    def plan(self, wanted: dict[OffloadedModule, bool]) -> None:
        """Replaces the units to prefetch; the values say whether with state."""
        self._wanted = wanted
        self._awaited &= wanted.keys()
        self.advance()

    def ask(self, unit: OffloadedModule, *, state: bool) -> None:
        """Requests a prefetch of a unit, with or without state; advance() starts the copy."""
        self._wanted[unit] = state

    def each(
        self, units: Collection[OffloadedModule], *, state: bool, ahead: int
    ) -> Generator[OffloadedModule, None, None]:
        """Yields loaded units, those on the device first, and prefetches the next ones.

        A unit is in use until the next one is requested, or the generator is closed.
        """
        order = sorted(units, key=lambda unit: not unit.device_bytes)
        try:
            self._turns = {unit: turn for turn, unit in enumerate(order)}
            for turn, unit in enumerate(order):
                with self.using([unit], state=state):
                    for later in order[turn + 1 : turn + 1 + ahead]:
                        self.ask(later, state=state)
                    self.advance()
                    yield unit
                    self._turns.pop(unit, None)
        finally:
            self._turns = {}

    def is_used(self, unit: OffloadedModule) -> bool:
        """Whether a unit is in use."""
        return any(unit in use.units for use in self._uses)

    def _needs(self) -> dict[OffloadedModule, Need]:
        """Needs of the units in use."""
        found: dict[OffloadedModule, Need] = {}
        for use in self._uses:
            for unit in use.units:
                state, gradients = found.get(unit, (False, False))
                found[unit] = Need(state or use.state, gradients or unit in use.trained)
        return found

    def check_room_to_step(self, units: Iterable[OffloadedModule]) -> None:
        """Raises RuntimeError if the budget is too small to step one of the units."""
        if self._budget is None:
            return
        needs = self._needs()
        for unit in units:
            used = [each for each in self._there if each in needs and each is not unit]
            needed = unit.needed_bytes + self._new_state(unit)
            needed += sum(self.bytes_of(each) for each in used)
            if needed > self._budget:
                raise RuntimeError(
                    f"budget: {text_of(self._budget)} are {text_of(needed - self._budget)} too"
                    f" little to step unit {unit.name!r}, with its state and gradients, beside the"
                    f" units in use, {[each.name for each in used]}; no unit has been stepped: give"
                    " more"
                )

    def _enter(self, unit: OffloadedModule, *, state: bool) -> None:
        self._end_failed()
        # From here on the program may queue work on the unit that is not tracked.
        end, stream, _ = self._left.pop(unit, (None, None, 0))
        if end is not None and stream is not self._stream():
            # The last use, and the copy to the device before it, were on another stream.
            current_stream(self._device).wait_event(end)
        unit.begin_use()
        if unit.has_new_tensors and sum(unit in use.units for use in self._uses) == 1:
            self.send_home(Leaver(unit))
        self._keep(unit, state=state)
        is_there = not unit.missing_bytes(state=state)
        self.hits += is_there
        self.misses += not is_there
        if self._budget is not None:
            self._there.setdefault(unit)
            self._others[unit] = self._other_bytes(unit, self._needs().get(unit))
        self._bring(unit, state=state, waits=True)
        self._awaited.discard(unit)

    def _leave(self, unit: OffloadedModule) -> None:
        if self.is_used(unit):
            return
        self._others[unit] = unit.other_bytes()
        self._there[unit] = None
        self._there.move_to_end(unit)
        unit.end_use()
        self._left[unit] = end_of_current(self._device), self._stream(), unit.changes

    def _stream(self) -> torch.cuda.Stream | None:
        return current_stream(self._device) if self._device.type == "cuda" else None

    def advance(self) -> None:
        """Prefetches requested units as far as they fit without waiting."""
        missing = {}
        for unit, state in list(self._wanted.items()):
            if count := unit.missing_bytes(state=state):
                missing[unit] = count
            else:
                self._keep(unit, state=state)
                self._awaited.add(unit)
        if not missing:
            return
        spare = 0
        if self._budget is not None:
            # Without `spare`, later needs of units in use would evict the prefetched units unused.
            spare = sum(self._to_come(unit, need) for unit, need in self._needs().items())
            free, order = self._budget - self.taken() - spare, self._candidates()
            missing = {
                unit: count
                for unit, count in missing.items()
                if count <= free or count <= free + sum(self._leaving(order, unit).values())
            }
            if missing:
                over = sum(missing.values()) - free
                self._write_back(over, self._leaving(order, next(reversed(missing))))
        for unit in missing:
            state = self._wanted[unit]
            if not self._bring(unit, state=state, waits=False, spare=spare):
                return
            self._keep(unit, state=state)
            self._awaited.add(unit)

    def _keep(self, unit: OffloadedModule, *, state: bool) -> None:
        """Removes a unit from the requested prefetches and from pending evictions."""
        self._wanted.pop(unit, None)
        self._going = [
            each for each in self._going if each.unit is not unit or each.of_state > state
        ]

    def _bring(self, unit: OffloadedModule, *, state: bool, waits: bool, spare: int = 0) -> bool:
        """Loads a unit; without `waits` prefetches it, or returns False if it does not fit now.

        `spare` bytes of the budget remain free.
        """
        self._there.setdefault(unit)
        while self._makes_room(unit, unit.missing_bytes(state=state) + spare, waits=waits):
            try:
                (unit.load if waits else unit.prefetch)(state=state)
            except torch.OutOfMemoryError:  # other programs may use the GPU too
                if not waits:
                    return False
                victim = next(iter(self._leaving(self._candidates(), unit, by_force=True)), None)
                if victim is None:
                    raise
                self.send_home(victim)
            else:
                return True
        return False

    def _makes_room(self, unit: OffloadedModule | None, missing: int, *, waits: bool) -> bool:
        """Evicts other units until `missing` bytes fit; returns whether they fit."""
        if self._budget is None:
            return True
        if self.taken() + missing > self._budget:
            self._count_others()
        left = set()
        while (over := self.taken() + missing - self._budget) > 0:
            self._write_back(over, self._leaving(self._candidates(), unit, by_force=waits))
            home = (e for e in self._going if e.unit.is_written_back(only_state=e.of_state))
            victim = next(home, self._going[0] if waits and self._going else None)
            if victim is None:
                if not waits:
                    return False
                needs = self._needs()
                used = [each.name for each in self._there if each in needs]
                raise RuntimeError(
                    f"budget: {text_of(self._budget)} are {text_of(over)} too little for the units"
                    f" that are used at once, {used}, with their gradients; give more, or use fewer"
                    " at once"
                )
            if victim in left:
                raise RuntimeError(f"unit {victim.unit.name!r} could not leave the device")
            left.add(victim)
            self.send_home(victim)
        return True

    def _write_back(self, over: int, leaving: dict[Leaver, int]) -> None:
        """Starts write-back of the first candidates, until they free `over` bytes."""
        if over <= 0:
            return
        self._going = [each for each in self._going if each in leaving]
        over -= sum(leaving[each] for each in self._going)
        for each, nbytes in leaving.items():
            if over <= 0:
                return
            if each not in self._going:
                end = self.end_of_use(each.unit)
                each.unit.write_back(end, only_state=each.of_state)
                self._going.append(each)
                over -= nbytes

    def _candidates(self) -> list[Candidate]:
        """Units and state that may be evicted, in the order of eviction."""
        found, needs, first = [], self._needs(), EvictionPriority.IDLE
        for place, unit in enumerate(self._there):
            nbytes, is_used = self.bytes_of(unit), unit in needs
            if not nbytes:
                continue
            use = self._next_use(unit, state=False)
            use_of_state = self._next_use(unit, state=True)
            # State that a step created is not copied yet. An idle unit is evicted together with it.
            of_state = unit.state_bytes + (unit.created_state_bytes if is_used else 0)
            may_split = of_state and not (is_used and needs[unit].state)
            if may_split and (is_used or use_of_state > use):
                is_needed = not use_of_state or use_of_state == use == inf or unit in self._turns
                at = EvictionPriority.STATE_IN_USE if is_used and is_needed else first
                leaver = Leaver(unit, of_state=True)
                found.append(Candidate(at, use_of_state, place, leaver, of_state, is_used))
                nbytes -= of_state
            if not is_used:
                is_due = unit in self._awaited or unit in self._turns
                at, turn = (EvictionPriority.PREFETCHED, -place) if is_due else (first, place)
                found.append(Candidate(at, use, turn, Leaver(unit), nbytes, is_used))
        found.sort(key=lambda each: (each.priority, -each.use, each.turn))
        return found

    def _leaving(
        self, order: Iterable[Candidate], besides: OffloadedModule | None, *, by_force: bool = False
    ) -> dict[Leaver, int]:
        """Candidates that may be evicted for the unit `besides`, with their bytes.

        Only the state of `besides` may be included, and only if `besides` is in use. With
        `by_force`, candidates with an earlier next use than `besides` are included, and at the end
        prefetched units and then the state of units in use that may be stepped.
        """
        soonest = inf if besides is None else self._next_use(besides, state=False)
        return {
            each.leaver: each.nbytes
            for each in order
            if (each.is_used or each.leaver.unit is not besides)
            and (by_force or (not each.priority and (soonest == inf or each.use > soonest)))
        }

    def _next_use(self, unit: OffloadedModule, *, state: bool) -> float:
        """AutoLoader.next_use(), counted after the units that each() uses next."""
        if unit in self._turns:
            return self._turns[unit] - next(iter(self._turns.values()))
        later = inf if self._calls is None else self._calls.next_use(unit, state=state)
        return later + len(self._turns)

    def send_home(self, leaver: Leaver, *, search: bool = False) -> int:
        """Evicts a unit or only its state, and returns the freed bytes.

        search: whether to search for views of the unit. False: only if there may be some.
        """
        begin, unit, end = time.perf_counter(), leaver.unit, self.end_of_use(leaver.unit)
        is_home = unit.is_written_back(only_state=leaver.of_state)
        before = self._traffic.copied[Memory.HOST]
        try:
            if leaver.of_state:
                freed = unit.evict_state(end)
                need = self._needs().get(unit)
                self._others[unit] = self._other_bytes(unit, need)  # without state made by a step
                if need is None:
                    unit.track()
            else:
                # Tensors saved by autograd lose their memory; other views keep it. The search for
                # views is slow, and with a AutoLoader a graph that needs the unit is usual.
                may_be_kept = unit.returned_views or unit.has_views or not unit.has_graph
                search = search or self._calls is None or may_be_kept
                freed = unit.evict(end, search=search)
                self._awaited.discard(unit)
                freed += self._others.pop(unit, 0)
        except BaseException:
            self._left.pop(unit, None)  # it may be on the device, and no longer tracked
            raise
        if not is_home or self._traffic.copied[Memory.HOST] > before:
            self.seconds_waited += time.perf_counter() - begin
        if not self.bytes_of(unit):
            self._there.pop(unit, None)
        return freed

    def end_of_use(self, unit: OffloadedModule) -> torch.cuda.Event | None:
        """End event of a unit's last use; None: in use, or used since then outside any use."""
        end, _, changes = self._left.get(unit, (None, None, 0))
        return end if end is not None and changes == unit.changes else None

    def _end_failed(self) -> None:
        if self._calls is not None:
            self._calls.end_failed()

    def follow(self, calls: AutoLoader | None) -> None:
        """Sets the AutoLoader that loads units and knows their order of use; None removes it."""
        self._calls = calls

    def look(self) -> None:
        """Ends failed backward uses, and updates the byte counts."""
        self._end_failed()
        self._count_others()

    def clear(self) -> None:
        """Forgets all units, after their eviction."""
        every: tuple[Any, ...] = self._there, self._wanted, self._awaited, self._going
        for known in (*every, self._left, self._others, self._last_needs, self._turns):
            known.clear()

    def _count_others(self) -> None:
        """Updates the bytes allocated for units on the device, and frees dropped gradients."""
        needs = self._needs()
        for unit in self._there:
            unit.free_gradients(self.end_of_use(unit))
            self._others[unit] = self._other_bytes(unit, needs.get(unit))

    def _other_bytes(self, unit: OffloadedModule, need: Need | None) -> int:
        """Bytes allocated in a unit on the device, and bytes that its current uses may add."""
        count = unit.other_bytes()
        if need is None or self._budget is None:
            return count
        if need.gradients:
            count += unit.missing_gradients()
        if need.state:
            count += self._new_state(unit)
        return count

    def _new_state(self, unit: OffloadedModule) -> int:
        """Bytes of state that a first step of a unit creates."""
        return sum(self._first_state[by](each) for by, each in unit.without_state())

    def bytes_of(self, unit: OffloadedModule) -> int:
        """Bytes of a unit's device memory, with the tensors that were assigned to it there."""
        return unit.device_bytes + self._others.get(unit, 0)

    def taken(self) -> int:
        """Bytes of device memory of all units."""
        return sum(map(self.bytes_of, self._there))
