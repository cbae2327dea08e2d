"""Swapper: loads units (offloaded modules) to the device for use, and evicts unused units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from speedtorch.layers.auto import AutoOffload
from speedtorch.layers.module_hook import weak_call
from speedtorch.layers.module_steps import ModuleSteps
from speedtorch.layers.offloaded_module import OffloadedModule, exact_device
from speedtorch.layers.optimizer_trials import FirstState, check_when_given
from speedtorch.layers.residency import Leaver, Residency
from speedtorch.layers.state_swapper import check_can_be_split
from speedtorch.layers.transfer_stats import Freed, SwapReport, TransferStats
from speedtorch.memory.byte_count import bytes_of, text_of
from speedtorch.optim.wrappers import given_optimizers, optimizers_within

__all__ = ["Swapper"]


class Swapper:
    """Keeps modules in host memory, and loads them to the device while they are used.

    A unit is one offloaded module: its parameters, buffers, gradients and optimizer state. Using a
    unit loads it as a whole. If a unit needs memory, the least recently used unit is evicted,
    and its changes are written back. Under `auto`, the evicted unit is the one whose next use is
    farthest in the recorded order. Parameter objects, hooks, param_groups and schedulers remain
    the same, and results equal a model that remains on the device. An evicted unit consists of
    ordinary CPU tensors.

    `optimizer.step()` loads and steps units with gradients one by one. Parameters outside units
    are stepped as usual. Use a unit's tensors only within `use`, because any call of the swapper
    may evict a unit that is not in use.

    Args:
        modules: the units' modules, or one module whose children are the units. Modules that share
            a parameter must form one unit (nn.ModuleList).
        optimizer: a torch optimizer that keeps separate tensors for each parameter, or several
            optimizers (Muon and AdamW), which may share parameters. Wrappers from accelerate,
            Lightning and Fabric are accepted. None: no training.
        device: the device that uses the units. Default: the GPU, if there is one.
        budget: the most device memory for units, including gradients and state, in bytes or as text
            such as "12GiB". None: all device memory. Units in use must fit together.

    Raises:
        TypeError: an argument has the wrong type. An optimizer steps all parameters at once
            (LBFGS), wraps another optimizer (Lookahead), or keeps tensors within lists or dicts. A
            tensor has a custom class that is not a frozen wrapper with `__tensor_flatten__`.
        ValueError: there is no unit, units share a tensor, or a unit contains another. An optimizer
            is given twice, or does not step each parameter separately (checked with small copies).
            The budget is no number of bytes. A tensor is sparse, quantized, on the meta device or
            made in inference mode.
        RuntimeError: the device is a GPU, and torch finds none.
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
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        device: torch.device | str | None = None,
        budget: int | str | None = None,
    ) -> None:
        named = _named(modules)
        self._given = given_optimizers(optimizer)
        self.optimizer = self._given if len(self._given) > 1 else next(iter(self._given), None)
        stepped = optimizers_within(self._given)
        for each in stepped:
            check_can_be_split(each)
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = exact_device(device)
        for each in stepped:
            check_when_given(each, self.device)
        self.budget = None if budget is None else bytes_of("budget", budget)
        self._traffic = TransferStats()
        self._units: dict[nn.Module, OffloadedModule] = {}
        first_state = {each: FirstState(each).nbytes for each in stepped}
        self._residency = Residency(self.device, self.budget, self._traffic, first_state)
        self._steps: list[ModuleSteps] = []
        self._auto: AutoOffload | None = None
        try:
            for name, module in named:
                self._units[module] = OffloadedModule(
                    module,
                    *stepped,
                    device=self.device,
                    name=name,
                    traffic=self._traffic,
                    before_gradients=weak_call(self._residency.expect_gradients),
                )
            for each in stepped:
                self._steps.append(ModuleSteps(each, self._units, self._residency))
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        if not self._units:
            return f"{type(self).__name__}(closed)"
        units = [f"{unit.name}: {type(module).__name__}" for module, unit in self._units.items()]
        shown = units[:3] + [f"{len(units) - 3} more"] * (len(units) > 3)
        budget = None if self.budget is None else text_of(self.budget)
        said = f"{', '.join(shown)}; device={self.device}, budget={budget}"
        return f"{type(self).__name__}({said})"

    @contextmanager
    def use(self, *modules: nn.Module) -> Iterator[None]:
        """Context manager that loads units to the device and keeps them there until exit.

        Args:
            *modules: modules of units, or modules that contain units.

        Raises:
            TypeError, ValueError: an argument is no module, or neither is nor contains a unit.
            RuntimeError: the budget or the device memory (torch.OutOfMemoryError) is too small for
                all units in use. Other units may have been loaded or evicted; values are unchanged.
        """
        with self._residency.using(self._named_units(modules), state=False):
            yield

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of the units."""
        return list(self._units)

    def prefetch(self, *modules: nn.Module, state: bool | None = None) -> None:
        """Copies units to the device on a side stream, and returns at once.

        Their tensors remain on the host until first use. Least recently used units are evicted for
        them, or under `auto` the units with the farthest next use. Units that are in use or
        prefetched are not evicted. A unit that does not fit yet is copied in a later call of the
        swapper.

        Args:
            *modules: modules as in `use`.
            state: whether to copy the optimizer state too. None: only if the unit was stepped the
                last time it was on the device.
        """
        for unit in self._named_units(modules):
            self._residency.ask(unit, state=unit.was_stepped if state is None else state)
        self._residency.advance()

    def evict(self, *modules: nn.Module) -> Freed:
        """Writes units back to the host, frees their device memory, and waits for the copies.

        Args:
            *modules: modules as in `use`. Without arguments: all units that are not in use.

        Returns:
            The freed device bytes. Their `held_by` names views of units' tensors that the program
            holds; such a view keeps the unit's device memory and the values there.

        Raises:
            TypeError, ValueError: see `use`.
            RuntimeError: a given unit is in use. Nothing has changed.
        """
        self._residency.look()
        units = self._named_units(modules) if modules else list(self._units.values())
        if modules and (used := [each.name for each in units if self._residency.is_used(each)]):
            raise RuntimeError(f"units {used} are in use; evict them after `use`")
        freed, held = 0, []
        for unit in [each for each in units if not self._residency.is_used(each)]:
            freed += self._residency.send_home(Leaver(unit), search=True)
            held += [f"{unit.name}: {each}" for each in unit.held_by()]
        return Freed(freed, held)

    def flush(self) -> None:
        """Writes changes back to host memory and waits; units remain on the device.

        Gradients are written back only by an eviction of their unit.
        """
        for unit in self._residency.there:
            unit.write_back(self._residency.end_of_use(unit))
        for unit in self._residency.there:
            unit.wait()

    def touch(self, *modules: nn.Module) -> None:
        """Marks tensors of units as changed, after changes that torch's versions do not count.

        Call this after changes such as `parameter.data.mul_(0.9)` on the device, which are
        otherwise not written back. Optimizer steps are detected without this call.

        Args:
            *modules: modules as in `use`.
        """
        for unit in self._named_units(modules):
            unit.touch()

    def close(self) -> None:
        """Evicts all units and removes all hooks; modules and state remain on the CPU."""
        if self._auto is not None:
            self._auto.remove()
        for steps in self._steps:
            steps.close()
        for unit in self._units.values():
            unit.close()
        self._units.clear()
        self._residency.clear()

    def _check_open(self) -> None:
        if not self._units:
            raise RuntimeError("the Swapper is closed: make another")

    def _named_units(self, modules: Iterable[nn.Module]) -> list[OffloadedModule]:
        self._check_open()
        found: dict[OffloadedModule, None] = {}
        for module in modules:
            if not isinstance(module, nn.Module):
                raise TypeError(f"expected a module of the units, got {type(module).__name__}")
            own = [self._units[each] for each in module.modules() if each in self._units]
            if not own:
                names = ", ".join(each.name for each in self._units.values())
                raise ValueError(
                    f"{type(module).__name__} is no unit and has none; the units are {names}"
                )
            found |= dict.fromkeys(own)
        return list(found)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Calls `step()` of each optimizer, which steps unit by unit.

        Raises:
            TypeError: there are a closure and several optimizers.
            RuntimeError: there is no optimizer, a unit and its state do not fit on the device, or a
                GradScaler has not unscaled gradients correctly.
        """
        if not self._given:
            raise RuntimeError("step: the swapper was made without an optimizer")
        if closure is None:
            results = [each.step() for each in self._given]
            return results[0] if len(results) == 1 else None
        if len(self._given) > 1:
            raise TypeError(
                f"closure: {len(self._given)} optimizers would call it {len(self._given)} times;"
                " call it yourself, and then step()"
            )
        return self._given[0].step(closure)

    def auto(self, *, step: bool = False, ahead: int = 3) -> AutoOffload:
        """Loads units when forward or backward reaches them, and prefetches the next units.

        The order of prefetches is recorded from earlier calls. An operation on a unit's tensors
        outside its module loads the unit too. Inputs on another device are copied to the units'
        device. A unit may be evicted between its forward and backward; the backward loads it again.
        The backward pass ends when backward() returns; each graph supports one backward. The effect
        lasts until remove() or another auto(), or as long as the model, even without references to
        the Swapper.

        Args:
            step: whether to step each unit in the backward pass once its gradients are complete,
                and then drop the gradients (`grad = None`). Each backward() is then a step, and a
                later optimizer.step() steps only parameters outside units. Gradients must not be
                scaled, or changed between backward() and that step. The step raises RuntimeError if
                the gradient of a parameter outside units has changed. A change is not detected if
                all parameters belong to units. DistributedDataParallel raises NotImplementedError
                in the forward.
            ahead: how many of the next units to prefetch if they fit.

        Returns:
            A handle whose remove() ends the effect. The handle is also a context manager.

        Raises:
            RuntimeError: `step` is True without an optimizer, or the Swapper is closed.
            ValueError: `ahead` is not an int of at least 0.
        """
        self._check_open()
        if step and not self._steps:
            raise RuntimeError("auto: the swapper was made without an optimizer, and cannot step")
        if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
            raise ValueError(f"auto: ahead: expected 0 units or more, got {ahead!r}")
        if self._auto is not None:
            self._auto.remove()
        steps = self._steps if step else []
        self._auto = AutoOffload(self._residency, list(self._units.values()), steps, ahead=ahead)
        return self._auto

    def report(self) -> SwapReport:
        """Reports where units are and what has been copied so far; waits for queued copies."""
        residency, units = self._residency, self._units.values()
        residency.look()
        return SwapReport(
            units=len(units),
            resident=tuple(unit.name for unit in residency.there),
            in_use=tuple(unit.name for unit in residency.there if residency.is_used(unit)),
            resident_bytes=residency.taken(),
            budget_bytes=self.budget,
            host_bytes=sum(unit.nbytes for unit in units),
            new_bytes=sum(unit.new_bytes() for unit in residency.there),
            hits=residency.hits,
            misses=residency.misses,
            seconds_waited=residency.seconds_waited,
            **self._traffic.figures(),
            held_by=tuple(f"{unit.name}: {each}" for unit in units for each in unit.held_by()),
        )


def _named(modules: object) -> list[tuple[str, nn.Module]]:
    """Returns the modules of the units with their names."""
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
