"""Residency: which modules have device memory, within a budget, and which are evicted for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from math import inf
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtorch.layers.device_modules import DeviceModules, Need, Use
from speedtorch.layers.offloaded_module import AutoLoader, OffloadedModule
from speedtorch.layers.transfer_stats import Memory, TransferStats
from speedtorch.memory.byte_count import text_of
from speedtorch.memory.side_stream import end_of_current
from speedtorch.torch_internals import current_stream

__all__ = ["Evictable", "Residency"]

_LastUse: TypeAlias = tuple[torch.cuda.Event | None, torch.cuda.Stream | None, int]
"""End event, stream, and count of the module's changes at the end of a use."""


class Evictable(NamedTuple):
    """A module that may be evicted, or only its optimizer state."""

    module: OffloadedModule
    only_state: bool = False


class EvictionPriority(IntEnum):
    """Order of eviction: prefetched modules come after idle ones, and state in use comes last."""

    IDLE, PREFETCHED, STATE_IN_USE = range(3)


class Candidate(NamedTuple):
    """A module or state that may be evicted, and how soon a call needs it.

    Attributes:
        use: number of calls until the next use.
        order: order among equal `use`; the lowest is evicted first.
        nbytes: bytes of device memory.
        is_used: whether the module is in use.
    """

    priority: EvictionPriority
    use: float
    order: int
    victim: Evictable
    nbytes: int
    is_used: bool


class Residency:
    """Loads modules to the device within a budget, and evicts other modules for them.

    The evicted module has the farthest next use in the recorded order. If the order is unknown, the
    module is the least recently used one. Modules in use are not evicted. The optimizer state of a
    module in use may be evicted, unless one of its uses is for a step.

    Attributes:
        modules: the modules that may have device memory, and their uses.
        hits: uses that found their module on the device; `misses`: uses that did not.
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
        self.modules = DeviceModules(budget, first_state)
        self._requested: dict[OffloadedModule, bool] = {}
        """Modules to prefetch, and whether with their state."""
        self._prefetched: set[OffloadedModule] = set()
        """Prefetched modules that were not used yet."""
        self._writing: list[Evictable] = []
        """Modules and state in write-back before their eviction, oldest first."""
        self._last_uses: dict[OffloadedModule, _LastUse] = {}
        """Last uses of modules that are not in use."""
        self._auto_loader: AutoLoader | None = None
        self._positions: dict[OffloadedModule, int] = {}
        """Modules that loaded_in_order() uses next, with their positions."""
        self.hits = self.misses = 0
        self.seconds_waited = 0.0

    @contextmanager
    def using(self, modules: Iterable[OffloadedModule], *, state: bool) -> Iterator[None]:
        """Context manager that loads modules and keeps them on the device."""
        use = self.modules.begin_use(modules, state=state)
        try:
            self.fill_use(use)
            yield
        finally:
            self.end_use(use)

    def fill_use(self, use: Use) -> None:
        """Loads the modules of a use."""
        for module in use.modules:
            self._load_for_use(module, state=use.state)

    def expect_gradients(self, module: OffloadedModule) -> None:
        """Frees budget for the gradients that a backward is about to create for a module.

        Raises RuntimeError if the budget is too small.
        """
        if self._budget is None:
            return
        for use in self.modules.uses_of(module):
            use.trained.add(module)
        need = self.modules.needs().get(module, Need(state=False, gradients=True))
        self.modules.count_extra_bytes(module, need)
        self._make_room(module, 0, waits=True)

    def end_use(self, use: Use) -> None:
        """Ends a use, so that its modules may be evicted."""
        self.modules.end_use(use)
        for module in use.modules:
            if not self.modules.uses_of(module):
                self.modules.count_extra_bytes(module, None)
                self.modules.by_last_use[module] = None
                self.modules.by_last_use.move_to_end(module)
                module.end_use()
                end = end_of_current(self._device)
                self._last_uses[module] = end, self._stream(), module.changes.count
        self._make_room(None, 0, waits=False)
        self.advance()

    def plan(self, requested: dict[OffloadedModule, bool]) -> None:
        """Replaces the modules to prefetch; the values say whether with state."""
        self._requested = requested
        self._prefetched &= requested.keys()
        self.advance()

    def request(self, module: OffloadedModule, *, state: bool) -> None:
        """Notes a module to copy to the device ahead of its use; advance() starts the copy.

        `state`: whether its optimizer state is copied too.
        """
        self._requested[module] = state

    def loaded_in_order(
        self, modules: Collection[OffloadedModule]
    ) -> Generator[OffloadedModule, None, None]:
        """Yields modules with state, those on the device first, and prefetches the next one.

        A module is in use until the next one is requested, or the generator is closed.
        """
        order = sorted(modules, key=lambda module: not module.groups.device_bytes)
        try:
            self._positions = {module: position for position, module in enumerate(order)}
            for position, module in enumerate(order):
                with self.using([module], state=True):
                    for following in order[position + 1 : position + 2]:
                        self.request(following, state=True)
                    self.advance()
                    yield module
                    self._positions.pop(module, None)
        finally:
            self._positions = {}

    def _load_for_use(self, module: OffloadedModule, *, state: bool) -> None:
        if self._auto_loader is not None:
            self._auto_loader.end_failed()
        # From here on the program may queue work on the module that is not tracked.
        end, stream, _ = self._last_uses.pop(module, (None, None, 0))
        if end is not None and stream is not self._stream():
            # The last use, and the copy to the device before it, were on another stream.
            current_stream(self._device).wait_event(end)
        module.begin_use()
        if module.groups.has_new_tensors and len(self.modules.uses_of(module)) == 1:
            self.evict(Evictable(module))
        self._keep(module, state=state)
        is_there = not module.groups.missing_bytes(state=state)
        self.hits += is_there
        self.misses += not is_there
        if self._budget is not None:
            self.modules.by_last_use.setdefault(module)
            self.modules.count_extra_bytes(module, self.modules.needs().get(module))
        self._load(module, state=state, waits=True)
        self._prefetched.discard(module)

    def _stream(self) -> torch.cuda.Stream | None:
        return current_stream(self._device) if self._device.type == "cuda" else None

    def advance(self) -> None:
        """Prefetches requested modules as far as they fit without waiting."""
        missing = {}
        for module, state in list(self._requested.items()):
            if count := module.groups.missing_bytes(state=state):
                missing[module] = count
            else:
                self._keep(module, state=state)
                self._prefetched.add(module)
        if not missing:
            return
        spare = 0
        if self._budget is not None:
            # Without `spare`, later needs of modules in use would evict prefetched modules unused.
            # An AutoLoader knows these needs.
            spare = self.modules.expected_bytes() if self._auto_loader is None else 0
            free, order = self._budget - self.modules.used_bytes() - spare, self._candidates()
            missing = {
                module: count
                for module, count in missing.items()
                if count <= free or count <= free + sum(self._evictable(order, module).values())
            }
            if missing:
                over = sum(missing.values()) - free
                self._write_back(over, self._evictable(order, next(reversed(missing))))
        for module in missing:
            state = self._requested[module]
            if not self._load(module, state=state, waits=False, spare=spare):
                return
            self._keep(module, state=state)
            self._prefetched.add(module)

    def _keep(self, module: OffloadedModule, *, state: bool) -> None:
        """Removes a module from the requested prefetches and from pending evictions."""
        self._requested.pop(module, None)
        kept = (v for v in self._writing if v.module is not module or v.only_state > state)
        self._writing = list(kept)

    def _load(self, module: OffloadedModule, *, state: bool, waits: bool, spare: int = 0) -> bool:
        """Loads a module; without `waits` prefetches it, or returns False if it does not fit now.

        `spare` bytes of the budget remain free.
        """
        self.modules.by_last_use.setdefault(module)
        while self._make_room(
            module, module.groups.missing_bytes(state=state) + spare, waits=waits
        ):
            try:
                (module.load if waits else module.prefetch)(state=state)
            except torch.OutOfMemoryError:  # other programs may use the GPU too
                if not waits:
                    return False
                victims = iter(self._evictable(self._candidates(), module, by_force=True))
                if (victim := next(victims, None)) is None:
                    raise
                self.evict(victim)
            else:
                return True
        return False

    def _make_room(self, module: OffloadedModule | None, missing: int, *, waits: bool) -> bool:
        """Evicts other modules until `missing` bytes fit; returns whether they fit."""
        if self._budget is None:
            return True
        if self.modules.used_bytes() + missing > self._budget:
            self._update_extra_bytes()
        evicted = set()
        while (over := self.modules.used_bytes() + missing - self._budget) > 0:
            self._write_back(over, self._evictable(self._candidates(), module, by_force=waits))
            done = (
                v for v in self._writing if v.module.groups.is_written_back(only_state=v.only_state)
            )
            victim = next(done, self._writing[0] if waits and self._writing else None)
            if victim is None:
                if not waits:
                    return False
                needs = self.modules.needs()
                used = [module.name for module in self.modules.by_last_use if module in needs]
                raise RuntimeError(
                    f"budget: {text_of(self._budget)} is {text_of(over)} too small for the modules"
                    f" in use, {used}, with their gradients. Increase the budget, or use fewer"
                    " modules at once."
                )
            if victim in evicted:
                raise RuntimeError(f"module {victim.module.name!r} could not be evicted.")
            evicted.add(victim)
            self.evict(victim)
        return True

    def _write_back(self, over: int, evictable_bytes: dict[Evictable, int]) -> None:
        """Starts write-back of the first candidates, until they free `over` bytes."""
        if over <= 0:
            return
        self._writing = [victim for victim in self._writing if victim in evictable_bytes]
        over -= sum(evictable_bytes[victim] for victim in self._writing)
        for victim, nbytes in evictable_bytes.items():
            if over <= 0:
                return
            if victim not in self._writing:
                end = self.end_of_use(victim.module)
                victim.module.groups.write_back(end, only_state=victim.only_state)
                self._writing.append(victim)
                over -= nbytes

    def _candidates(self) -> list[Candidate]:
        """Modules and state that may be evicted, in the order of eviction."""
        found, needs, idle = [], self.modules.needs(), EvictionPriority.IDLE
        for place, module in enumerate(self.modules.by_last_use):
            nbytes, is_used = self.modules.bytes_of(module), module in needs
            if not nbytes:
                continue
            use = self._next_use(module, state=False)
            use_of_state = self._next_use(module, state=True)
            # State that a step created is not copied yet. An idle module is evicted with its state.
            state_bytes = module.groups.state.buffer.device_bytes + (
                module.groups.created_state_bytes if is_used else 0
            )
            may_split = state_bytes and not (is_used and needs[module].state)
            if may_split and (is_used or use_of_state > use):
                is_first = module in self._positions
                is_needed = not use_of_state or use_of_state == use == inf or is_first
                priority = EvictionPriority.STATE_IN_USE if is_used and is_needed else idle
                state = Evictable(module, only_state=True)
                found.append(Candidate(priority, use_of_state, place, state, state_bytes, is_used))
                nbytes -= state_bytes
            if not is_used:
                is_due = module in self._prefetched or module in self._positions
                priority, order = (EvictionPriority.PREFETCHED, -place) if is_due else (idle, place)
                found.append(Candidate(priority, use, order, Evictable(module), nbytes, is_used))
        found.sort(key=lambda c: (c.priority, -c.use, c.order))
        return found

    def _evictable(
        self, found: Iterable[Candidate], loading: OffloadedModule | None, *, by_force: bool = False
    ) -> dict[Evictable, int]:
        """Candidates that may be evicted for the module `loading`, with their bytes.

        Only the state of `loading` may be included, and only if `loading` is in use. With
        `by_force`, candidates with an earlier next use than `loading` are included, and at the end
        prefetched modules and then the state of modules in use that may be stepped.
        """
        soonest = inf if loading is None else self._next_use(loading, state=False)
        return {
            c.victim: c.nbytes
            for c in found
            if (c.is_used or c.victim.module is not loading)
            and (by_force or (not c.priority and (soonest == inf or c.use > soonest)))
        }

    def _next_use(self, module: OffloadedModule, *, state: bool) -> float:
        """AutoLoader.next_use(), counted after the modules that loaded_in_order() uses next."""
        if module in self._positions:
            return self._positions[module] - next(iter(self._positions.values()))
        loader = self._auto_loader
        return len(self._positions) + (loader.next_use(module, state=state) if loader else inf)

    def evict(self, victim: Evictable, *, search: bool = False) -> int:
        """Evicts a module or only its state, and returns the freed bytes.

        search: whether to search for views of the module. False: only if there may be some.
        """
        begin, module, end = time.perf_counter(), victim.module, self.end_of_use(victim.module)
        was_written_back = module.groups.is_written_back(only_state=victim.only_state)
        before = self._traffic.copied[Memory.HOST]
        try:
            if victim.only_state:
                freed, need = module.evict_state(end), self.modules.needs().get(module)
                self.modules.count_extra_bytes(module, need)  # without state that a step created
                if need is None:
                    module.track()
            else:
                # Tensors saved by autograd lose their memory; other views keep it. The search for
                # views is slow, and with an AutoLoader a graph that needs the module is usual.
                may_be_kept = module.returned_views or module.has_views or not module.has_graph
                search = search or self._auto_loader is None or may_be_kept
                freed = module.evict(end, search=search)
                self._prefetched.discard(module)
                freed += self.modules.forget_extra_bytes(module)
        except BaseException:
            self._last_uses.pop(module, None)  # it may be on the device, and no longer tracked
            raise
        if not was_written_back or self._traffic.copied[Memory.HOST] > before:
            self.seconds_waited += time.perf_counter() - begin
        if not self.modules.bytes_of(module):
            self.modules.by_last_use.pop(module, None)
        return freed

    def end_of_use(self, module: OffloadedModule) -> torch.cuda.Event | None:
        """End event of a module's last use; None: in use, or used since then outside any use."""
        end, _, changes = self._last_uses.get(module, (None, None, 0))
        return end if end is not None and changes == module.changes.count else None

    def set_auto_loader(self, auto_loader: AutoLoader | None) -> None:
        """Sets the AutoLoader that loads modules and knows their order of use; None removes it."""
        self._auto_loader = auto_loader

    def refresh(self) -> None:
        """Ends failed backward uses, and updates the byte counts."""
        if self._auto_loader is not None:
            self._auto_loader.end_failed()
        self._update_extra_bytes()

    def clear(self) -> None:
        """Forgets all modules, after their eviction."""
        queues: tuple[Any, ...] = self.modules, self._requested, self._prefetched, self._writing
        for collection in (*queues, self._last_uses, self._positions):
            collection.clear()

    def _update_extra_bytes(self) -> None:
        """Updates the bytes allocated for modules on the device, and frees dropped gradients."""
        needs = self.modules.needs()
        for module in self.modules.by_last_use:
            module.groups.free_gradients(self.end_of_use(module))
            self.modules.count_extra_bytes(module, needs.get(module))
