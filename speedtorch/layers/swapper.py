"""Swapper: units of a model come to the device when they are used, and leave when others do."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from math import inf
from operator import itemgetter
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from speedtorch.layers.auto import Auto
from speedtorch.layers.partial_step import PartialStep
from speedtorch.layers.swap_report import Freed, SwapReport
from speedtorch.layers.traffic import Traffic
from speedtorch.layers.unit import Unit
from speedtorch.memory.byte_count import bytes_of, text_of

__all__ = ["Swapper"]


class Use:
    """Units that stay on the device for as long as somebody holds this."""

    def __init__(self, units: Iterable[Unit], *, state: bool) -> None:
        self.units = tuple(units)
        self.state = state


class Leaver(NamedTuple):
    """A unit that may leave the device, or what the optimizer keeps of it alone."""

    unit: Unit
    of_state: bool = False

    @property
    def is_home(self) -> bool:
        """Whether it would wait for no copy that write_back() has begun."""
        return self.unit.is_state_home if self.of_state else self.unit.is_home

    def write_back(self, after: torch.cuda.Event | None) -> None:
        """Begins to copy what is new to the host."""
        if self.of_state:
            self.unit.write_state_back(after)
        else:
            self.unit.write_back(after)


class Swapper:
    """Keeps units of a model in host memory, and on the device while they are used.

    A unit is a module with its parameters, buffers and gradients, and what the optimizer keeps of
    them. It comes to the device in one piece each, and what has changed of it goes back when its
    memory is needed for another: the one that was used longest ago leaves, and under `auto` the one
    that is used last in the order seen before. Parameter objects,
    hooks, param_groups and schedulers stay as they are, and numbers are those of a model that stays
    on the device. An evicted unit is ordinary CPU tensors.

    `optimizer.step()` steps unit by unit those that have gradients, and brings them for it; what
    belongs to no unit is stepped as ever. Use a unit's tensors within `use` alone: outside it may
    leave at any call of the swapper.

    Args:
        modules: a module, whose children are the units, or the units. Modules that share a
            parameter must be one unit (nn.ModuleList).
        optimizer: any of torch's that keeps tensors for each parameter by itself; None: nothing is
            trained.
        device: where units are used.
        budget: the most device memory that units take, in bytes or as "12GiB"; None: as much as
            there is. Units that are used at once need more together: they must fit.

    Raises:
        TypeError: an argument is of the wrong kind, the optimizer keeps tensors within lists or
            dicts, as LBFGS does, or a tensor is of a class of its own.
        ValueError: there is no unit, two of them share a tensor, one of them is in another, the
            budget is no number of bytes, or a tensor is sparse, quantized, on the meta device or
            made in inference mode.
        MemoryError: the host has too little memory.

    Example:
        >>> import torch, speedtorch
        >>> experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(8))
        >>> optimizer = torch.optim.Adam(experts.parameters())
        >>> swapper = speedtorch.Swapper(experts, optimizer, device="cpu", budget="4KiB")
        >>> for number in (3, 5):
        ...     with swapper.use(experts[number]):
        ...         experts[number](torch.ones(4)).sum().backward()
        ...         swapper.step()
        ...         optimizer.zero_grad()
        >>> swapper.report().misses
        2
    """

    def __init__(
        self,
        modules: nn.Module | Iterable[nn.Module],
        optimizer: Optimizer | None = None,
        *,
        device: torch.device | str = "cuda",
        budget: int | str | None = None,
    ) -> None:
        named = _named(modules)
        self.optimizer = optimizer
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.budget = None if budget is None else bytes_of("budget", budget)
        self._traffic = Traffic()
        self._units: dict[nn.Module, Unit] = {}
        self._there: dict[Unit, None] = {}
        """Those that may have device memory, the one that was used longest ago first."""
        self._uses: weakref.WeakSet[Use] = weakref.WeakSet()
        """Those of now, which their callers hold."""
        self._wanted: dict[Unit, bool] = {}
        """What is to come, and whether with its state."""
        self._awaited: set[Unit] = set()
        """What has come and was not used yet."""
        self._going: list[Leaver] = []
        """What is being written back to leave then, the first first."""
        self._left: dict[Unit, tuple[torch.cuda.Event, int]] = {}
        """Where the last use ended, and the unit's count of changes then."""
        self._others: dict[Unit, int] = {}
        """Bytes on the device that came to a unit there, when it was used last."""
        self._auto: Auto[Use] | None = None
        self._undo: list[Callable[[], None]] = []
        self._is_closed = False
        self._hits = self._misses = 0
        self._waited = 0.0
        try:
            for name, module in named:
                unit = Unit(module, optimizer, device=self.device, name=name, traffic=self._traffic)
                self._units[module] = unit
                unit.tell_steps()
        except BaseException:
            self.close()
            raise
        if optimizer is not None:
            self._undo.append(_steps_by(optimizer, self._step_units))
            saved = optimizer.register_state_dict_post_hook(self._saved_state)
            self._undo.append(saved.remove)

    # --------------------------------------------------------------------------------------------
    # Units come and go

    @contextmanager
    def use(self, *modules: nn.Module) -> Iterator[None]:
        """Brings units to the device, where they stay within.

        Args:
            *modules: of the units, or modules that have units within.

        Raises:
            ValueError: one of them is no unit and has none.
            RuntimeError: the budget, or the device's memory (torch.OutOfMemoryError), is too small
                for all that is in use; nothing has changed but which units are there.
        """
        with self._using(self._named_units(modules), state=False):
            yield

    @contextmanager
    def _using(self, units: list[Unit], *, state: bool) -> Iterator[None]:
        use = self.begin_use(units, state=state)
        try:
            self.fill_use(use)
            yield
        finally:
            self.end_use(use)

    def begin_use(self, units: Iterable[Unit], *, state: bool = False) -> Use:
        """Units do not leave, unless end_use() is called or nobody holds what this returns."""
        use = Use(units, state=state)
        self._uses.add(use)
        return use

    def fill_use(self, use: Use) -> None:
        """Brings its units."""
        for unit in use.units:
            self._enter(unit, state=use.state)

    def end_use(self, use: Use) -> None:
        """Units may leave."""
        self._uses.discard(use)
        for unit in use.units:
            self._leave(unit)
        self._makes_room(None, 0, waits=False)
        self._advance()

    def plan(self, wanted: dict[Unit, bool]) -> None:
        """Lets these come as by prefetch(), with state or without, and no others."""
        self._wanted = wanted
        self._awaited &= wanted.keys()
        self._advance()

    def _is_used(self, unit: Unit, *, state: bool = False) -> bool:
        return any(unit in use.units and use.state >= state for use in self._uses)

    @property
    def modules(self) -> list[nn.Module]:
        """The units' modules."""
        return list(self._units)

    def prefetch(self, *modules: nn.Module, state: bool | None = None) -> None:
        """Lets units come while others are used; it does not wait.

        Until they are used their tensors are on the host.

        Those that were used longest ago leave for them, under `auto` those that are used last, and
        none that is in use or was prefetched.
        What finds no room yet comes at a later call of the swapper.

        Args:
            *modules: as of `use`.
            state: bring the optimizer's state as well; None: if the unit was stepped when it was
                there last.
        """
        for unit in self._named_units(modules):
            self._wanted[unit] = unit.was_stepped if state is None else state
        self._advance()

    def evict(self, *modules: nn.Module) -> Freed:
        """Lets units leave the device, and waits until they have.

        Args:
            *modules: as of `use`; none: all units that are not in use.

        Returns:
            The bytes of device memory that are free now, with `held_by`: views of units' tensors
            that somebody keeps, and that keep a unit's device memory and the values there.

        Raises:
            ValueError: one of them is no unit and has none.
            RuntimeError: one of them is in use; nothing has changed.
        """
        self._end_failed()
        self._count_others()
        units = self._named_units(modules) if modules else list(self._units.values())
        if modules and (used := [each.name for each in units if self._is_used(each)]):
            raise RuntimeError(f"units {used} are in use; evict them after `use`")
        freed, held = 0, []
        for unit in [each for each in units if not self._is_used(each)]:
            freed += self._send_home(Leaver(unit), search=True)
            held += [f"{unit.name}: {each}" for each in unit.held_by()]
        return Freed(freed, held)

    def flush(self) -> None:
        """Writes what has changed on the device to host memory, and waits; units stay there.

        Gradients stay on the device alone until their unit leaves.
        """
        for unit in self._there:
            unit.write_back(self._end_of_use(unit))
        for unit in self._there:
            unit.wait()

    def touch(self, *modules: nn.Module) -> None:
        """Says that tensors of units have been changed in a way that torch does not count.

        Such as by `parameter.data.mul_(0.9)` while the unit is on the device: without it that is
        not written back. Changes that a step of the optimizer makes are known.

        Args:
            *modules: as of `use`.
        """
        for unit in self._named_units(modules):
            unit.touch()

    def close(self) -> None:
        """Lets all units leave for good: modules and optimizer are as before, on the CPU."""
        if self._auto is not None:
            self._auto.remove()
        for undo in self._undo:
            undo()
        for unit in self._units.values():
            unit.close()
        self._going.clear()
        for known in (
            self._units,
            self._there,
            self._wanted,
            self._awaited,
            self._left,
            self._others,
        ):
            known.clear()
        self._is_closed = True

    def _named_units(self, modules: Iterable[nn.Module]) -> list[Unit]:
        if self._is_closed:
            raise RuntimeError("the Swapper is closed: make another")
        found: dict[Unit, None] = {}
        for module in modules:
            own = [self._units[each] for each in module.modules() if each in self._units]
            if not own:
                names = ", ".join(each.name for each in self._units.values())
                raise ValueError(
                    f"{type(module).__name__} is no unit and has none; the units are {names}"
                )
            found |= dict.fromkeys(own)
        return list(found)

    def _enter(self, unit: Unit, *, state: bool) -> None:
        self._end_failed()
        self._keep(unit, state=state)
        is_there = not unit.missing_bytes(state=state)
        self._hits += is_there
        self._misses += not is_there
        self._bring(unit, state=state, waits=True)
        self._awaited.discard(unit)

    def _leave(self, unit: Unit) -> None:
        if self._is_used(unit):
            return
        if self.device.type == "cuda":
            end = torch.cuda.current_stream(self.device).record_event()
            self._left[unit] = end, unit.changes
        self._others[unit] = unit.other_bytes()
        self._there.pop(unit, None)
        self._there[unit] = None

    def _advance(self) -> None:
        """Lets come what is wanted, as far as there is room without waiting."""
        missing = {
            unit: count
            for unit, state in self._wanted.items()
            if self._could_make_room(unit, count := unit.missing_bytes(state=state))
        }
        if self.budget is not None and missing:
            over = self._taken() + sum(missing.values()) - self.budget
            self._write_back(over, next(reversed(missing)))
        for unit in missing:
            state = self._wanted[unit]
            if not self._bring(unit, state=state, waits=False):
                return
            self._keep(unit, state=state)
            self._awaited.add(unit)

    def _keep(self, unit: Unit, *, state: bool) -> None:
        """Notes that a unit is there, to be used."""
        self._wanted.pop(unit, None)
        self._going = [
            each for each in self._going if each.unit is not unit or each.of_state > state
        ]

    def _could_make_room(self, unit: Unit, missing: int) -> bool:
        """Whether there is room for so many bytes of a unit once all have left that may."""
        if self.budget is None:
            return True
        leaving = sum(self._leaving(unit, by_force=False).values())
        return self._taken() - leaving + missing <= self.budget

    def _bring(self, unit: Unit, *, state: bool, waits: bool) -> bool:
        """Loads a unit; without waiting lets it come, or gives False if there is no room now."""
        self._there.setdefault(unit)
        while self._makes_room(unit, unit.missing_bytes(state=state), waits=waits):
            try:
                (unit.load if waits else unit.bring)(state=state)
            except torch.OutOfMemoryError:  # of a GPU that others use, too
                victim = next(iter(self._leaving(unit, by_force=True)), None)
                if victim is None or not waits:
                    if waits:
                        raise
                    return False
                self._send_home(victim)
            else:
                return True
        return False

    def _makes_room(self, unit: Unit | None, missing: int, *, waits: bool) -> bool:
        """Lets others leave until there is room for so many bytes; whether there is."""
        if self.budget is None or (unit is not None and not missing):
            return True
        if self._taken() + missing > self.budget:
            self._count_others()
        left = set()
        while (over := self._taken() + missing - self.budget) > 0:
            self._write_back(over, unit, by_force=waits)
            home = (each for each in self._going if each.is_home)
            victim = next(home, self._going[0] if waits and self._going else None)
            if victim is None:
                if not waits:
                    return False
                used = [each.name for each in self._there if self._is_used(each)]
                raise RuntimeError(
                    f"budget: {text_of(self.budget)} are {text_of(over)} too little for the units"
                    f" that are used at once, {used}; give more, or use fewer at once"
                )
            if victim in left:
                raise RuntimeError(f"unit {victim.unit.name!r} could not leave the device")
            left.add(victim)
            self._send_home(victim)
        return True

    def _write_back(self, over: int, unit: Unit | None = None, *, by_force: bool = False) -> None:
        """Begins to write back what leaves next, as much as is needed for so many bytes."""
        if over <= 0:
            return
        leaving = self._leaving(unit, by_force=by_force)
        self._going = [each for each in self._going if each in leaving]
        over -= sum(leaving.pop(each) for each in self._going)
        for each, nbytes in leaving.items():
            if over <= 0:
                return
            each.write_back(self._end_of_use(each.unit))
            self._going.append(each)
            over -= nbytes

    def _leaving(self, besides: Unit | None, *, by_force: bool) -> dict[Leaver, int]:
        """What may leave, and its bytes, in the order in which it does.

        That is what is used last in the order seen before, and where nobody knows that, what was
        used longest ago.

        Args:
            besides: a unit that stays, for which they leave.
            by_force: also what is used before that unit; at the end also what has come for a use
                to come, and then the state of units in use that may be stepped.
        """
        auto = self._auto if self._auto is not None and self._auto.is_on else None
        found: list[tuple[tuple[int, float, int], Leaver, int]] = []
        for place, unit in enumerate(self._there):
            nbytes, of_state = self._bytes_of(unit), unit.state_bytes
            if not nbytes or unit is besides:
                continue
            use = inf if auto is None else auto.next_use(unit, state=False)
            use_of_state = inf if auto is None else auto.next_use(unit, state=True)
            is_used = self._is_used(unit)
            may_split = of_state and not self._is_used(unit, state=True)
            if may_split and (is_used or use_of_state > use):
                is_needed = not use_of_state or use_of_state == use == inf
                at = 2 if is_used and is_needed else 0
                found.append(((at, -use_of_state, place), Leaver(unit, of_state=True), of_state))
                nbytes -= of_state
            if not is_used:
                at, turn = (1, -place) if unit in self._awaited else (0, place)
                found.append(((at, -use, turn), Leaver(unit), nbytes))
        found.sort(key=itemgetter(0))
        soonest = inf
        if auto is not None and besides is not None:
            soonest = auto.next_use(besides, state=False)
        return {
            leaver: nbytes
            for (at, minus_use, _), leaver, nbytes in found
            if by_force or (not at and (soonest == inf or -minus_use > soonest))
        }

    def _send_home(self, leaver: Leaver, *, search: bool = False) -> int:
        begin, unit, end = time.perf_counter(), leaver.unit, self._end_of_use(leaver.unit)
        is_home, before = leaver.is_home, self._traffic.bytes_out
        freed = unit.evict_state(end) if leaver.of_state else self._evict(unit, end, search=search)
        if not is_home or self._traffic.bytes_out > before:
            self._waited += time.perf_counter() - begin
        if not self._bytes_of(unit):
            self._there.pop(unit, None)
        return freed

    def _evict(self, unit: Unit, end: torch.cuda.Event | None, *, search: bool) -> int:
        # What a graph needs has no memory meanwhile; other views keep it. To look for these takes
        # long, and a graph that needs the unit is usual where units come by themselves.
        by_itself = self._auto is not None and self._auto.is_on
        search = search or not by_itself or unit.gives_views or not unit.has_graph
        freed = unit.evict(end, search=search)
        self._awaited.discard(unit)
        return freed + self._others.pop(unit, 0)

    def _end_failed(self) -> None:
        """Ends uses by a backward that has failed."""
        if self._auto is not None:
            self._auto.end_failed()

    def _end_of_use(self, unit: Unit) -> torch.cuda.Event | None:
        """Where its last use ended on the device; None: nobody knows."""
        end, changes = self._left.get(unit, (None, -1))
        return end if changes == unit.changes else None

    def _count_others(self) -> None:
        """Counts anew what came to units on the device, and what has gone since."""
        for unit in self._there:
            self._others[unit] = unit.other_bytes()

    def _bytes_of(self, unit: Unit) -> int:
        return unit.device_bytes + self._others.get(unit, 0)

    def _taken(self) -> int:
        return sum(map(self._bytes_of, self._there))

    # --------------------------------------------------------------------------------------------
    # Steps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the optimizer, as `optimizer.step()` does: unit by unit.

        Raises:
            RuntimeError: there is no optimizer, or no room for a unit and its state.
        """
        if self.optimizer is None:
            raise RuntimeError("step: the swapper was made without an optimizer")
        return self.optimizer.step(closure) if closure is not None else self.optimizer.step()

    def _step_units(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Steps all units, before the step of what is left; gives what that is called with."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = args[:1], {**kwargs, "closure": lambda: loss}
        asked: Optimizer = args[0]  # the optimizer, or its twin for what another Swapper leaves
        step = PartialStep(asked)
        owners = {id(e): unit for unit in self._units.values() for e in unit.module.parameters()}
        parts: dict[Unit | None, list[nn.Parameter]] = {None: []}
        for group in asked.param_groups:
            for each in group["params"]:
                parts.setdefault(owners.get(id(each)), []).append(each)
        others = parts.pop(None)
        waiting = [
            unit
            for unit, parameters in parts.items()
            if unit is not None and any(each.grad is not None for each in parameters)
        ]
        self._check_steps(waiting)
        waiting.sort(key=lambda unit: not unit.device_bytes)
        for place, unit in enumerate(waiting):
            with self._using([unit], state=True):
                for later in waiting[place + 1 : place + 2]:
                    self._wanted.setdefault(later, True)
                    self._advance()
                self._step(unit, step, parts[unit])
        return (step.twin(others), *args[1:]), kwargs, step.settle

    def _check_steps(self, waiting: list[Unit]) -> None:
        """Raises RuntimeError before any unit is stepped if there is no room for one of them."""
        if self.budget is None:
            return
        for unit in waiting:
            used = [each for each in self._there if self._is_used(each) and each is not unit]
            needed = unit.needed_bytes + sum(self._bytes_of(each) for each in used)
            if needed > self.budget:
                raise RuntimeError(
                    f"budget: {text_of(self.budget)} are {text_of(needed - self.budget)} too little"
                    f" to step unit {unit.name!r}, with its state and gradients, beside the units"
                    f" in use, {[each.name for each in used]}; no unit has been stepped: give more"
                )

    def step_unit(self, unit: Unit, step: PartialStep) -> None:
        """Steps a unit alone, without the hooks of the optimizer's step."""
        with self._using([unit], state=True):
            self._step(unit, step, list(unit.module.parameters()))

    def _step(self, unit: Unit, step: PartialStep, parameters: list[nn.Parameter]) -> None:
        try:
            step.step(parameters)
        finally:
            unit.note_step()

    def auto(self, *, step: bool = False, ahead: int = 1) -> Auto[Use]:
        """Brings units as forward and backward reach them, and the next ones in the order seen.

        A unit may leave between its forward and its backward, which brings it again. The backward
        pass is over once it returns; a graph goes backward once. A unit whose forward Ctrl-C has
        ended stays until auto() ends, or is called anew.

        Args:
            step: step each unit in the backward pass, as soon as its gradients are complete, and
                drop them (`grad = None`): each backward() is a step, and a later optimizer.step()
                is one of what belongs to no unit.
            ahead: calls ahead that units are brought.

        Returns:
            What ends that by remove(), or as a context manager.

        Raises:
            RuntimeError: step is asked for, and there is no optimizer.
            ValueError: ahead is negative.
        """
        if step and self.optimizer is None:
            raise RuntimeError("auto: the swapper was made without an optimizer, and cannot step")
        if ahead < 0:
            raise ValueError(f"auto: ahead: expected 0 calls or more, got {ahead}")
        if self._auto is not None:
            self._auto.remove()
        units = list(self._units.values())
        self._auto = Auto(self, units, self.optimizer, steps=step, ahead=ahead)
        return self._auto

    def _saved_state(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Gives state_dict() what the host has, which stays readable when units leave."""
        on_host: dict[int, torch.Tensor] = {}
        for unit in self._there:
            on_host |= unit.state_on_host()

        def found(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            host = on_host.get(value.data_ptr())
            is_like = host is not None and (host.shape, host.dtype) == (value.shape, value.dtype)
            return host if is_like else value

        of_parameters = {
            number: {key: found(value) for key, value in of_one.items()}
            if isinstance(of_one, dict)
            else of_one
            for number, of_one in saved["state"].items()
        }
        return {**saved, "state": of_parameters}

    # --------------------------------------------------------------------------------------------

    def report(self) -> SwapReport:
        """What is where, and what has travelled so far; waits for copies that are on their way."""
        self._end_failed()
        self._count_others()
        units, there = self._units.values(), [each for each in self._there if self._bytes_of(each)]
        return SwapReport(
            units=len(units),
            resident=tuple(unit.name for unit in there),
            in_use=tuple(unit.name for unit in there if self._is_used(unit)),
            resident_bytes=self._taken(),
            budget_bytes=self.budget,
            host_bytes=sum(unit.nbytes for unit in units),
            new_bytes=sum(unit.new_bytes() for unit in there),
            hits=self._hits,
            misses=self._misses,
            seconds_waited=self._waited,
            bytes_in=self._traffic.bytes_in,
            bytes_out=self._traffic.bytes_out,
            gbps_in=self._traffic.gbps(comes=True),
            gbps_out=self._traffic.gbps(comes=False),
            held_by=tuple(f"{unit.name}: {each}" for unit in units for each in unit.held_by()),
        )


def _named(modules: object) -> list[tuple[str, nn.Module]]:
    """The units and what they are called."""
    if isinstance(modules, nn.Module):
        named = list(modules.named_children())
        what = f"{type(modules).__name__} has no modules within"
    elif isinstance(modules, Iterable):
        named = [(str(number), each) for number, each in enumerate(modules)]
        what = "modules: there are none"
    else:
        raise TypeError(f"modules: expected an nn.Module or several, got {type(modules).__name__}")
    if not named:
        raise ValueError(f"{what}, and so no units")
    for name, each in named:
        if not isinstance(each, nn.Module):
            raise TypeError(f"modules: expected nn.Modules, got {type(each).__name__} as {name}")
    names: dict[nn.Module, str] = {}
    for name, each in named:
        for part in each.modules():
            if part in names:
                raise ValueError(f"modules: {name} and {names[part]} have a module in common")
        names |= dict.fromkeys(each.modules(), name)
    return named


def _steps_by(optimizer: Optimizer, units: Callable[..., Any]) -> Callable[[], None]:
    """Lets an optimizer's step() be one of units first; gives what undoes that.

    Hooks of the step are called once, before and after all of it: ours is the last of those before.
    """
    original = optimizer.step

    closed = False

    @wraps(original)
    def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if closed:  # a scheduler has wrapped it
            return original(*args, **kwargs)
        settle: list[Callable[[], None]] = []

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
            args, kwargs, done = units(optimizer, args, kwargs)
            settle.append(done)
            return args, kwargs

        hook = optimizer.register_step_pre_hook(before)
        try:
            result = original(*args, **kwargs)
            for each in settle:
                each()
            return result
        finally:
            hook.remove()

    ours = MethodType(step, optimizer)  # schedulers look for its function
    optimizer.step = ours  # type: ignore[method-assign]

    def undo() -> None:
        nonlocal closed
        closed = True
        if vars(optimizer).get("step") is ours:
            optimizer.step = original  # type: ignore[method-assign]

    return undo
