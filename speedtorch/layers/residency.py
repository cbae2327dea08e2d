"""Residency: which modules have device memory, within a budget, and which are evicted for them."""

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

from speedtorch.layers.access_tracker import untracked
from speedtorch.layers.offloaded_module import AutoLoader, OffloadedModule
from speedtorch.layers.transfer_stats import Memory, TransferStats
from speedtorch.memory.byte_count import text_of

__all__ = ["Evictable", "Residency", "Use"]


@dataclass(eq=False)
class Use:
    """Modules that remain on the device while a caller holds this object; `state`: for a step."""

    modules: tuple[OffloadedModule, ...]
    state: bool
    trained: set[OffloadedModule]
    """Modules for which a backward is expected to create gradients."""
    stepped: set[OffloadedModule]
    """Modules that are stepped during this use."""


class Need(NamedTuple):
    """Whether uses of a module need optimizer state for a step, and gradients of a backward."""

    state: bool
    gradients: bool


class DeviceModules:
    """Counts the device memory of modules, and the memory that their uses will need.

    `first_state` returns, per optimizer, the bytes of state that a first step creates for a
    parameter. `by_last_use` has the modules that may have device memory, least recently used first.
    """

    def __init__(
        self, budget: int | None, first_state: Mapping[Optimizer, Callable[[Tensor], int]]
    ) -> None:
        self._budget, self._first_state = budget, first_state
        self.by_last_use: OrderedDict[OffloadedModule, None] = OrderedDict()
        self._uses: weakref.WeakSet[Use] = weakref.WeakSet()
        """Current uses; their callers hold the references."""
        self._extra_bytes: dict[OffloadedModule, int] = {}
        """Bytes allocated for a module on the device since its load, and expected in its uses."""
        self._last_needs = weakref.WeakKeyDictionary[OffloadedModule, Need]()
        """Needs of each module's last ended use, which the next use is expected to have."""

    @property
    def loaded(self) -> list[OffloadedModule]:
        """Modules with device memory, least recently used first."""
        return [module for module in self.by_last_use if self.bytes_of(module)]

    def begin_use(
        self, modules: Iterable[OffloadedModule], *, state: bool = False, gradients: bool = False
    ) -> Use:
        """Prevents eviction of modules until end_use() or the deletion of the returned Use."""
        modules = tuple(modules)
        use = Use(modules, state, set(modules if gradients else ()), set(modules if state else ()))
        for other in self._uses if state else ():
            other.stepped.update(module for module in use.modules if module in other.modules)
        self._uses.add(use)
        return use

    def end_use(self, use: Use) -> None:
        """Ends a use, and expects the same needs in the next use of its modules."""
        self._uses.discard(use)
        for module in () if use.state else use.modules:
            self._last_needs[module] = Need(module in use.stepped, module in use.trained)

    def uses_of(self, module: OffloadedModule) -> list[Use]:
        """Current uses of a module."""
        return [use for use in self._uses if module in use.modules]

    def needs(self) -> dict[OffloadedModule, Need]:
        """Needs of the modules in use."""
        found: dict[OffloadedModule, Need] = {}
        for use in self._uses:
            for module in use.modules:
                state, gradients = found.get(module, (False, False))
                found[module] = Need(state or use.state, gradients or module in use.trained)
        return found

    def expected_bytes(self) -> int:
        """Bytes that modules in use will need beyond the counted ones, as in their last uses."""
        count = 0
        for module, need in self.needs().items():
            last = self._last_needs.get(module, need)
            if last.gradients and not need.gradients:
                count += module.tensors.missing_gradients()
            if last.state and not need.state:
                count += module.groups.missing_bytes(state=True)
        return count

    def check_budget_for_step(self, modules: Iterable[OffloadedModule]) -> None:
        """Raises RuntimeError if the budget is too small to step one of the modules."""
        if self._budget is None:
            return
        needs = self.needs()
        for module in modules:
            used = [other for other in self.by_last_use if other in needs and other is not module]
            needed = module.groups.device_bytes + module.groups.missing_bytes(state=True)
            needed += module.groups.other_bytes() + self._first_state_bytes(module)
            needed += sum(self.bytes_of(other) for other in used)
            if needed > self._budget:
                raise RuntimeError(
                    f"budget: {text_of(self._budget)} is {text_of(needed - self._budget)} too small"
                    f" to step module {module.name!r} with its gradients and optimizer state. Other"
                    f" modules in use: {', '.join(other.name for other in used) or 'none'}. No"
                    " module has been stepped. Increase the budget."
                )

    def count_extra_bytes(self, module: OffloadedModule) -> None:
        """Counts the bytes of a module's tensors that are on the device outside its buffers.

        If a budget is set, gradients and state that current uses may create count too.
        """
        count, need = module.groups.other_bytes(), self.needs().get(module)
        if need is not None and self._budget is not None:
            if need.gradients:
                count += module.tensors.missing_gradients()
            if need.state:
                count += self._first_state_bytes(module)
        self._extra_bytes[module] = count

    def note_eviction(self, module: OffloadedModule) -> int:
        """Returns the extra bytes that an evicted module no longer has."""
        count = self._extra_bytes.pop(module, 0)
        if not module.groups.device_bytes:
            self.by_last_use.pop(module, None)
        return count

    @untracked
    def _first_state_bytes(self, module: OffloadedModule) -> int:
        """Bytes of state that a first step of a module creates."""
        return sum(
            self._first_state[optimizer](param)
            for optimizer in module.tensors.optimizers
            for param in module.tensors.parameters.values()
            if param.requires_grad and param not in optimizer.state
        )

    def bytes_of(self, module: OffloadedModule) -> int:
        """Bytes of a module's device memory, with the tensors that were assigned to it there."""
        return module.groups.device_bytes + self._extra_bytes.get(module, 0)

    def used_bytes(self) -> int:
        """Bytes of device memory of all modules."""
        return sum(map(self.bytes_of, self.by_last_use))

    def clear(self) -> None:
        """Forgets all modules, after their eviction."""
        for by_module in (self.by_last_use, self._extra_bytes, self._last_needs):
            by_module.clear()


class Evictable(NamedTuple):
    """A module that may be evicted, or only its optimizer state."""

    module: OffloadedModule
    only_state: bool = False


class EvictionPriority(IntEnum):
    """Order of eviction: idle modules, then prefetched modules, then state of modules in use."""

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
    module is the least recently used one. Modules in use are not evicted, and prefetched modules
    only if no idle module is left. The optimizer state of a module in use may be evicted, unless
    one of its uses is for a step.

    Attributes:
        modules: the modules that may have device memory, and their uses.
        hits: uses whose module was loaded or prefetched; `misses`: all other uses.
        seconds_waited: duration of evictions whose copies to the host were not complete yet.
    """

    def __init__(
        self,
        budget: int | None,
        traffic: TransferStats,
        first_state: Mapping[Optimizer, Callable[[Tensor], int]],
    ) -> None:
        self._budget, self._traffic = budget, traffic
        self.modules = DeviceModules(budget, first_state)
        self._requested: dict[OffloadedModule, bool] = {}
        """Modules to prefetch, and whether with their state."""
        self._prefetched: set[OffloadedModule] = set()
        """Prefetched modules that were not used yet."""
        self._writing: list[Evictable] = []
        """Modules and state in write-back before their eviction, oldest first."""
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
        uses = self.modules.uses_of(module) or [self.modules.begin_use([module])]
        for use in uses:
            use.trained.add(module)
        self.modules.count_extra_bytes(module)
        self._free_budget(module, 0, waits=True)

    def end_use(self, use: Use) -> None:
        """Ends a use, so that its modules may be evicted."""
        self.modules.end_use(use)
        for module in use.modules:
            if not self.modules.uses_of(module):
                self.modules.count_extra_bytes(module)
                self.modules.by_last_use[module] = None
                self.modules.by_last_use.move_to_end(module)
                module.end_use()
        self._free_budget(None, 0, waits=False)
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
        module.begin_use()
        if module.groups.has_new_tensors and len(self.modules.uses_of(module)) == 1:
            self.evict(Evictable(module))
        self._keep(module, state=state)
        is_there = not module.groups.missing_bytes(state=state)
        self.hits += is_there
        self.misses += not is_there
        if self._budget is not None:
            self.modules.by_last_use.setdefault(module)
            self.modules.count_extra_bytes(module)
        self._load(module, state=state, waits=True)
        self._prefetched.discard(module)

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
        while self._free_budget(
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

    def _free_budget(self, module: OffloadedModule | None, missing: int, *, waits: bool) -> bool:
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
                raise RuntimeError(
                    f"budget: {text_of(self._budget)} is too small, because module"
                    f" {victim.module.name!r} keeps its device memory. Increase the budget."
                )
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
                victim.module.groups.write_back(only_state=victim.only_state)
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
            # State that a step created is outside the buffer until its eviction. If the module is
            # idle, this state counts with the module.
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

        Only the state of `loading` may be included, and only if `loading` is in use. `by_force`
        also includes candidates with an earlier next use than `loading`, prefetched modules, and
        the state of modules in use that may be stepped.
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

        search: search for views of the module in any case; otherwise only if some are likely.
        """
        begin, module = time.perf_counter(), victim.module
        was_written_back = module.groups.is_written_back(only_state=victim.only_state)
        before = self._traffic.copied[Memory.HOST]
        try:
            if victim.only_state:
                freed = module.evict_state()
                self.modules.count_extra_bytes(module)  # without state that a step created
                if not self.modules.uses_of(module):
                    module.track()
            else:
                # Tensors saved by autograd lose their memory; other views keep it. The search for
                # views is slow, and with an AutoLoader a graph that needs the module is usual.
                may_be_kept = module.has_views or not module.has_graph
                search = search or self._auto_loader is None or may_be_kept
                freed = module.evict(search=search)
                self._prefetched.discard(module)
                freed += self.modules.note_eviction(module)
        except BaseException:
            module.changes.touch()  # a module on the device may no longer be tracked
            raise
        if not was_written_back or self._traffic.copied[Memory.HOST] > before:
            self.seconds_waited += time.perf_counter() - begin
        return freed

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
        for collection in (*queues, self._positions):
            collection.clear()

    def _update_extra_bytes(self) -> None:
        """Updates the bytes allocated for modules on the device, and frees dropped gradients."""
        for module in self.modules.by_last_use:
            module.groups.free_gradients()
            self.modules.count_extra_bytes(module)
