"""Residency: copies units to the device within a budget, and evicts others for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtorch.layers.device_units import DeviceUnits
from speedtorch.layers.eviction_order import Eviction, EvictionOrder
from speedtorch.layers.transfers import Memory, TransferStats
from speedtorch.layers.unit import Unit
from speedtorch.layers.unit_calls import Caller
from speedtorch.layers.uses import Need, Use, Uses
from speedtorch.memory.byte_count import text_of
from speedtorch.memory.side_stream import end_of_current
from speedtorch.torch_internals import current_stream

__all__ = ["Residency"]


class Residency:
    """Loads units within a budget, for which units that are not in use are evicted.

    Attributes:
        hits: uses that found their unit on the device; `misses`: those that did not.
        seconds_waited: by the host, for evictions.
    """

    def __init__(
        self,
        device: torch.device,
        budget: int | None,
        traffic: TransferStats,
        first_state: Mapping[Optimizer, Callable[[Tensor], int]],
    ) -> None:
        self._device, self._budget, self._traffic = device, budget, traffic
        self.uses = Uses()
        self.units = DeviceUnits(budget, first_state, self.uses)
        self._order = EvictionOrder(self.units, self.uses)
        self._to_prefetch: dict[Unit, bool] = {}
        """Units that wait for room, and whether their state is prefetched, too."""
        self._evicting: list[Eviction] = []
        """What is written back before its eviction, in this order."""
        self._left: dict[Unit, tuple[torch.cuda.Event | None, torch.cuda.Stream | None, int]] = {}
        """The last use of units that are not in use: its end, its stream, their changes then."""
        self.hits = self.misses = 0
        self.seconds_waited = 0.0

    @contextmanager
    def using(self, units: Iterable[Unit], *, state: bool) -> Iterator[None]:
        """Loads units, which remain on the device within."""
        use = self.uses.begin(units, state=state)
        try:
            self.fill_use(use)
            yield
        finally:
            self.end_use(use)

    def fill_use(self, use: Use) -> None:
        """Loads the units of a use."""
        for unit in use.units:
            self._enter(unit, state=use.state)

    def end_use(self, use: Use) -> None:
        """Ends a use: its units may be evicted."""
        self.uses.end(use)
        for unit in use.units:
            self._leave(unit)
        self._make_room(None, 0, waits=False)
        self.advance()

    def expect_gradients(self, unit: Unit) -> None:
        """Makes room for gradients that a backward is about to make; RuntimeError if it cannot."""
        if self._budget is None:
            return
        for use in self.uses.of(unit):
            use.trained.add(unit)
        need = self.uses.needs().get(unit, Need(state=False, gradients=True))
        self.units.count(unit, need)
        self._make_room(unit, 0, waits=True)

    def plan(self, wanted: dict[Unit, bool]) -> None:
        """Prefetches these units, with state or without, and no others."""
        self._to_prefetch = wanted
        self._order.prefetched.intersection_update(wanted)
        self.advance()

    def request(self, unit: Unit, *, state: bool) -> None:
        """Lets advance() prefetch a unit, with its state or without."""
        self._to_prefetch[unit] = state

    def each_to_step(self, units: Collection[Unit]) -> Generator[Unit, None, None]:
        """Loads units with their state one after another, and prefetches the next one.

        A unit is in use until the next one is asked for, or this is closed.
        """
        order = sorted(units, key=lambda unit: not unit.packs.device_bytes)
        turns = self._order.turns
        try:
            turns.update({unit: turn for turn, unit in enumerate(order)})
            for turn, unit in enumerate(order):
                with self.using([unit], state=True):
                    for later in order[turn + 1 : turn + 2]:
                        self.request(later, state=True)
                    self.advance()
                    yield unit
                    turns.pop(unit, None)
        finally:
            turns.clear()

    def _enter(self, unit: Unit, *, state: bool) -> None:
        self._end_failed()
        # From here on the program may queue work on the unit without being seen.
        end, stream, _ = self._left.pop(unit, (None, None, 0))
        if end is not None and stream is not self._stream():
            # The last use, and the copy to the device before it, were on another stream.
            current_stream(self._device).wait_event(end)
        unit.begin_use()
        if unit.packs.has_new_tensors and len(self.uses.of(unit)) == 1:
            self.evict(Eviction(unit))
        self._note_loaded(unit, state=state)
        is_there = not unit.packs.missing_bytes(state=state)
        self.hits += is_there
        self.misses += not is_there
        if self._budget is not None:
            self.units.by_last_use.setdefault(unit)
            self.units.count(unit, self.uses.needs().get(unit))
        self._load(unit, state=state, waits=True)
        self._order.prefetched.discard(unit)

    def _leave(self, unit: Unit) -> None:
        if self.uses.of(unit):
            return
        self.units.count(unit)
        self.units.use_last(unit)
        unit.end_use()
        self._left[unit] = end_of_current(self._device), self._stream(), unit.use.count

    def _stream(self) -> torch.cuda.Stream | None:
        return current_stream(self._device) if self._device.type == "cuda" else None

    def advance(self) -> None:
        """Prefetches the requested units for which there is room without waiting."""
        missing = {}
        for unit, state in list(self._to_prefetch.items()):
            if count := unit.packs.missing_bytes(state=state):
                missing[unit] = count
            else:
                self._note_loaded(unit, state=state)
                self._order.prefetched.add(unit)
        if not missing:
            return
        spare = 0
        if self._budget is not None:
            # What is prefetched now would be evicted, unused, for what units in use need later.
            # A caller of all units knows these needs.
            spare = self.units.expected_bytes() if self._order.caller is None else 0
            free = self._budget - self.units.total_bytes() - spare
            order = self._order.candidates()
            missing = {
                unit: count
                for unit, count in missing.items()
                if count <= free or count <= free + sum(self._order.evictable(order, unit).values())
            }
            if missing:
                over = sum(missing.values()) - free
                self._write_back(over, self._order.evictable(order, next(reversed(missing))))
        for unit in missing:
            state = self._to_prefetch[unit]
            if not self._load(unit, state=state, waits=False, spare=spare):
                return
            self._note_loaded(unit, state=state)
            self._order.prefetched.add(unit)

    def _note_loaded(self, unit: Unit, *, state: bool) -> None:
        """Cancels the prefetch of a unit, and evictions of what it is about to use."""
        self._to_prefetch.pop(unit, None)
        self._evicting = [
            each
            for each in self._evicting
            if each.unit is not unit or (each.state_only and not state)
        ]

    def _load(self, unit: Unit, *, state: bool, waits: bool, spare: int = 0) -> bool:
        """Loads a unit; without waiting prefetches it, or returns False if there is no room now."""
        self.units.by_last_use.setdefault(unit)
        while self._make_room(unit, unit.packs.missing_bytes(state=state) + spare, waits=waits):
            try:
                (unit.load if waits else unit.bring)(state=state)
            except torch.OutOfMemoryError:  # of a GPU that other programs use, too
                if not waits:
                    return False
                victim = next(iter(self._evictable(unit, by_force=True)), None)
                if victim is None:
                    raise
                self.evict(victim)
            else:
                return True
        return False

    def _evictable(self, unit: Unit | None, *, by_force: bool) -> dict[Eviction, int]:
        return self._order.evictable(self._order.candidates(), unit, by_force=by_force)

    def _make_room(self, unit: Unit | None, missing: int, *, waits: bool) -> bool:
        """Evicts others until there is room for so many bytes; returns whether there is."""
        if self._budget is None:
            return True
        if self.units.total_bytes() + missing > self._budget:
            self._count_all()
        evicted = set()
        while (over := self.units.total_bytes() + missing - self._budget) > 0:
            self._write_back(over, self._evictable(unit, by_force=waits))
            written = (
                e for e in self._evicting if e.unit.packs.is_written_back(state_only=e.state_only)
            )
            victim = next(written, self._evicting[0] if waits and self._evicting else None)
            if victim is None:
                if not waits:
                    return False
                needs = self.uses.needs()
                used = [each.name for each in self.units.by_last_use if each in needs]
                raise RuntimeError(
                    f"budget: {text_of(self._budget)} are {text_of(over)} too little for the units"
                    f" that are used at once, {used}, with their gradients; give more, or use fewer"
                    " at once"
                )
            if victim in evicted:
                raise RuntimeError(f"unit {victim.unit.name!r} could not leave the device")
            evicted.add(victim)
            self.evict(victim)
        return True

    def _write_back(self, over: int, evictable: dict[Eviction, int]) -> None:
        """Begins to write back as much as must be evicted for so many bytes."""
        if over <= 0:
            return
        self._evicting = [each for each in self._evicting if each in evictable]
        over -= sum(evictable[each] for each in self._evicting)
        for each, nbytes in evictable.items():
            if over <= 0:
                return
            if each not in self._evicting:
                end = self.end_of_use(each.unit)
                each.unit.packs.write_back(end, state_only=each.state_only)
                self._evicting.append(each)
                over -= nbytes

    def evict(self, eviction: Eviction, *, search: bool = False) -> int:
        """Evicts a unit, or its state alone; returns the bytes that are free then.

        search: look for views of the unit; without it only if there may be some.
        """
        begin, unit, end = time.perf_counter(), eviction.unit, self.end_of_use(eviction.unit)
        is_written = unit.packs.is_written_back(state_only=eviction.state_only)
        before = self._traffic.copied[Memory.HOST]
        try:
            if eviction.state_only:
                freed = unit.evict_state(end)
                need = self.uses.needs().get(unit)
                self.units.count(unit, need)  # without state made by a step
                if need is None:
                    unit.track()
            else:
                # Views other than a graph's keep the memory. To look for them takes long, and a
                # graph that needs the unit is usual where units are loaded for a caller.
                may_be_kept = (
                    unit.calls.gives_views or unit.calls.has_views or not unit.calls.has_graph
                )
                search = search or self._order.caller is None or may_be_kept
                freed = unit.evict(end, search=search)
                self._order.prefetched.discard(unit)
                freed += self.units.forget_others(unit)
        except BaseException:
            self._left.pop(unit, None)  # it may be on the device, and no longer tracked
            raise
        if not is_written or self._traffic.copied[Memory.HOST] > before:
            self.seconds_waited += time.perf_counter() - begin
        if not self.units.bytes_of(unit):
            self.units.by_last_use.pop(unit, None)
        return freed

    def end_of_use(self, unit: Unit) -> torch.cuda.Event | None:
        """The end of its last use; None: it is in use, or was used since outside of any use."""
        end, _, changes = self._left.get(unit, (None, None, 0))
        return end if end is not None and changes == unit.use.count else None

    def _end_failed(self) -> None:
        if self._order.caller is not None:
            self._order.caller.end_failed()

    def follow(self, caller: Caller[Unit] | None) -> None:
        """The caller's calls use units, and predict which is used next; None: no longer."""
        self._order.follow(caller)

    def look(self) -> None:
        """Ends uses that have failed, and counts the bytes of all units anew."""
        self._end_failed()
        self._count_all()

    def clear(self) -> None:
        """Forgets all units, which have been evicted."""
        self.units.clear()
        for known in (self._to_prefetch, self._order.prefetched, self._evicting, self._left):
            known.clear()

    def _count_all(self) -> None:
        """Counts the bytes of units on the device anew, and frees those of dropped gradients."""
        needs = self.uses.needs()
        for unit in self.units.by_last_use:
            unit.packs.free_gradients(self.end_of_use(unit))
            self.units.count(unit, needs.get(unit))
