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

from speedtorch.layers.transfer_stats import Memory, TransferStats
from speedtorch.layers.unit import Caller, Unit
from speedtorch.memory.byte_count import text_of
from speedtorch.memory.side_stream import end_of_current
from speedtorch.torch_internals import current_stream

__all__ = ["Leaver", "Residency", "Use"]


@dataclass(eq=False)
class Use:
    """Units that stay on the device for as long as a caller holds this, with state for a step."""

    units: tuple[Unit, ...]
    state: bool
    trained: set[Unit]
    """Those of which a backward is to make gradients."""
    stepped: set[Unit]
    """Those that are stepped while this lets them stay."""


class Need(NamedTuple):
    """Whether a unit's uses take a step's state, and gradients that a backward is to make."""

    state: bool
    gradients: bool


class Leaver(NamedTuple):
    """A unit that may leave the device, or what the optimizer keeps of it alone."""

    unit: Unit
    of_state: bool = False


class EvictionPriority(IntEnum):
    """What leaves at last: what has come for a use to come, and then what a step may need."""

    IDLE, PREFETCHED, STATE_IN_USE = range(3)


class Candidate(NamedTuple):
    """What may leave, and how soon it is needed.

    Attributes:
        use: in how many calls it is used next.
        turn: the lower leaves first of those that are used at once.
        nbytes: of device memory.
        is_used: whether its unit is.
    """

    priority: EvictionPriority
    use: float
    turn: int
    leaver: Leaver
    nbytes: int
    is_used: bool


class Residency:
    """Brings units to the device, within a budget, for which others leave.

    What leaves is what is used last in the order seen before, and where that is unknown, what was
    used longest ago; never what is in use.

    `first_state` are the bytes of state that a first step makes of a parameter, by optimizers.

    Attributes:
        calls: by which units come by themselves, and what leaves is known; None: they do not.
        hits: uses that found their unit on the device; `misses`: those that did not.
        seconds_waited: by the host, for units to leave.
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
        self._there: OrderedDict[Unit, None] = OrderedDict()
        """Those that may have device memory, the one that was used longest ago first."""
        self._uses: weakref.WeakSet[Use] = weakref.WeakSet()
        """Those of now, which their callers hold."""
        self._wanted: dict[Unit, bool] = {}
        """What is to come, and whether with its state."""
        self._awaited: set[Unit] = set()
        """What has come and was not used yet."""
        self._going: list[Leaver] = []
        """What is being written back to leave then, the first first."""
        self._left: dict[Unit, tuple[torch.cuda.Event | None, torch.cuda.Stream | None, int]] = {}
        """The last use of units that are not in use: its end, its stream, their changes then."""
        self._others: dict[Unit, int] = {}
        """Bytes that came to a unit on the device, and in a use those that are to come."""
        self._last_needs: weakref.WeakKeyDictionary[Unit, Need] = weakref.WeakKeyDictionary()
        """Of the last uses that ended, which uses to come are expected to have."""
        self._calls: Caller | None = None
        self._turns: dict[Unit, int] = {}
        """Units that are used next, one after another, with their turns."""
        self.hits = self.misses = 0
        self.seconds_waited = 0.0

    @property
    def there(self) -> list[Unit]:
        """Units with device memory, the one that was used longest ago first."""
        return [each for each in self._there if self.bytes_of(each)]

    @contextmanager
    def using(self, units: Iterable[Unit], *, state: bool) -> Iterator[None]:
        """Brings units, which do not leave within."""
        use = self.begin_use(units, state=state)
        try:
            self.fill_use(use)
            yield
        finally:
            self.end_use(use)

    def begin_use(
        self, units: Iterable[Unit], *, state: bool = False, gradients: bool = False
    ) -> Use:
        """Units do not leave, unless end_use() is called or what this returns is dropped."""
        units = tuple(units)
        use = Use(units, state, set(units if gradients else ()), set(units if state else ()))
        for other in self._uses if state else ():
            other.stepped.update(unit for unit in use.units if unit in other.units)
        self._uses.add(use)
        return use

    def fill_use(self, use: Use) -> None:
        """Brings its units."""
        for unit in use.units:
            self._enter(unit, state=use.state)

    def _to_come(self, unit: Unit, need: Need) -> int:
        """Bytes that a unit in use will need, as in its last use, beside those that are counted."""
        last = self._last_needs.get(unit)
        if last is None or self._calls is not None:  # where units come by themselves they are known
            return 0
        count = unit.missing_gradients() if last.gradients and not need.gradients else 0
        return count + (unit.missing_bytes(state=True) if last.state and not need.state else 0)

    def expect_gradients(self, unit: Unit) -> None:
        """Makes room for the gradients that a backward is about to make of a unit.

        Raises RuntimeError if there is not enough.
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
        """Units may leave."""
        self._uses.discard(use)
        for unit in use.units:
            if not use.state:
                self._last_needs[unit] = Need(unit in use.stepped, unit in use.trained)
            self._leave(unit)
        self._makes_room(None, 0, waits=False)
        self.advance()

    def plan(self, wanted: dict[Unit, bool]) -> None:
        """Lets these come as by prefetch(), with state or without, and no others."""
        self._wanted = wanted
        self._awaited &= wanted.keys()
        self.advance()

    def ask(self, unit: Unit, *, state: bool) -> None:
        """Lets a unit come, with its state or without, when there is room; see advance()."""
        self._wanted[unit] = state

    def each(
        self, units: Collection[Unit], *, state: bool, ahead: int
    ) -> Generator[Unit, None, None]:
        """Brings units one after another, those first that are there, and the next ones meanwhile.

        A unit is in use until the next one is asked for, or this is closed.
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

    def is_used(self, unit: Unit) -> bool:
        """Whether a unit is in use."""
        return any(unit in use.units for use in self._uses)

    def _needs(self) -> dict[Unit, Need]:
        """Of the units in use."""
        found: dict[Unit, Need] = {}
        for use in self._uses:
            for unit in use.units:
                state, gradients = found.get(unit, (False, False))
                found[unit] = Need(state or use.state, gradients or unit in use.trained)
        return found

    def check_room_to_step(self, units: Iterable[Unit]) -> None:
        """Raises RuntimeError if there is no room for one of them, as large as it is in a step."""
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

    def _enter(self, unit: Unit, *, state: bool) -> None:
        self._end_failed()
        # From here on the program may queue work on the unit without being seen.
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

    def _leave(self, unit: Unit) -> None:
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
        """Lets come what is wanted, as far as there is room without waiting."""
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
            # What comes now would leave again, unused, for what units in use need later.
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

    def _keep(self, unit: Unit, *, state: bool) -> None:
        """Notes that a unit is there, to be used."""
        self._wanted.pop(unit, None)
        self._going = [
            each for each in self._going if each.unit is not unit or each.of_state > state
        ]

    def _bring(self, unit: Unit, *, state: bool, waits: bool, spare: int = 0) -> bool:
        """Loads a unit; without waiting lets it come, or gives False if there is no room now.

        So many bytes stay free beside it.
        """
        self._there.setdefault(unit)
        while self._makes_room(unit, unit.missing_bytes(state=state) + spare, waits=waits):
            try:
                (unit.load if waits else unit.bring)(state=state)
            except torch.OutOfMemoryError:  # of a GPU that other programs use, too
                if not waits:
                    return False
                victim = next(iter(self._leaving(self._candidates(), unit, by_force=True)), None)
                if victim is None:
                    raise
                self.send_home(victim)
            else:
                return True
        return False

    def _makes_room(self, unit: Unit | None, missing: int, *, waits: bool) -> bool:
        """Lets others leave until there is room for so many bytes; whether there is."""
        if self._budget is None:
            return True
        if self.taken() + missing > self._budget:
            self._count_others()
        left = set()
        while (over := self.taken() + missing - self._budget) > 0:
            self._write_back(over, self._leaving(self._candidates(), unit, by_force=waits))
            home = (e for e in self._going if e.unit.is_home(state_alone=e.of_state))
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
        """Begins to write back what leaves first, as much as is needed for so many bytes."""
        if over <= 0:
            return
        self._going = [each for each in self._going if each in leaving]
        over -= sum(leaving[each] for each in self._going)
        for each, nbytes in leaving.items():
            if over <= 0:
                return
            if each not in self._going:
                end = self.end_of_use(each.unit)
                each.unit.write_back(end, state_alone=each.of_state)
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
            # What a step has made waits to be copied: it goes with its unit if that may leave, too.
            of_state = unit.state_bytes + (unit.made_state_bytes if is_used else 0)
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
        self, order: Iterable[Candidate], besides: Unit | None, *, by_force: bool = False
    ) -> dict[Leaver, int]:
        """What may leave, and its bytes; the state of `besides` may if that is in use.

        by_force: also what is used before the unit `besides`, which needs the room; at the end also
        what has come for a use to come, and then the state of units in use that may be stepped.
        """
        soonest = inf if besides is None else self._next_use(besides, state=False)
        return {
            each.leaver: each.nbytes
            for each in order
            if (each.is_used or each.leaver.unit is not besides)
            and (by_force or (not each.priority and (soonest == inf or each.use > soonest)))
        }

    def _next_use(self, unit: Unit, *, state: bool) -> float:
        """As Caller.next_use, after those whose turn comes before."""
        if unit in self._turns:
            return self._turns[unit] - next(iter(self._turns.values()))
        later = inf if self._calls is None else self._calls.next_use(unit, state=state)
        return later + len(self._turns)

    def send_home(self, leaver: Leaver, *, search: bool = False) -> int:
        """Evicts a unit, or its state alone; returns the bytes that are free then.

        search: look for views of the unit; without it they are looked for if there may be some.
        """
        begin, unit, end = time.perf_counter(), leaver.unit, self.end_of_use(leaver.unit)
        is_home = unit.is_home(state_alone=leaver.of_state)
        before = self._traffic.copied[Memory.HOST]
        try:
            if leaver.of_state:
                freed = unit.evict_state(end)
                need = self._needs().get(unit)
                self._others[unit] = self._other_bytes(unit, need)  # without state made by a step
                if need is None:
                    unit.track()
            else:
                # What a graph needs has no memory meanwhile; other views keep it. To look for these
                # takes long, and a graph that needs the unit is usual where units come by
                # themselves.
                may_be_kept = unit.gives_views or unit.has_views or not unit.has_graph
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

    def end_of_use(self, unit: Unit) -> torch.cuda.Event | None:
        """The end of its last use; None: it is in use, or was used since outside of any use."""
        end, _, changes = self._left.get(unit, (None, None, 0))
        return end if end is not None and changes == unit.changes else None

    def _end_failed(self) -> None:
        if self._calls is not None:
            self._calls.end_failed()

    def follow(self, calls: Caller | None) -> None:
        """Units come by themselves, and which leaves is known from their calls; None: no longer."""
        self._calls = calls

    def look(self) -> None:
        """Notes what has ended, and counts anew what is there."""
        self._end_failed()
        self._count_others()

    def clear(self) -> None:
        """Forgets all units, which have left."""
        every: tuple[Any, ...] = self._there, self._wanted, self._awaited, self._going
        for known in (*every, self._left, self._others, self._last_needs, self._turns):
            known.clear()

    def _count_others(self) -> None:
        """Counts anew what came to units on the device, and frees what has gone since."""
        needs = self._needs()
        for unit in self._there:
            unit.free_gradients(self.end_of_use(unit))
            self._others[unit] = self._other_bytes(unit, needs.get(unit))

    def _other_bytes(self, unit: Unit, need: Need | None) -> int:
        """Bytes allocated in a unit on the device, and bytes that its current uses may add."""
        count = unit.other_bytes()
        if need is None or self._budget is None:
            return count
        if need.gradients:
            count += unit.missing_gradients()
        if need.state:
            count += self._new_state(unit)
        return count

    def _new_state(self, unit: Unit) -> int:
        """Bytes of state that a first step of a unit makes."""
        return sum(self._first_state[by](each) for by, each in unit.without_state())

    def bytes_of(self, unit: Unit) -> int:
        """Bytes of a unit's device memory, with the tensors that were assigned to it there."""
        return unit.device_bytes + self._others.get(unit, 0)

    def taken(self) -> int:
        """Bytes of the device memory of all."""
        return sum(map(self.bytes_of, self._there))
