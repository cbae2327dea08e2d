"""Swapper: units of a model come to the device when they are used, and leave when others do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from speedtorch.layers.auto import AutoOffload
from speedtorch.layers.module_hook import weak_call
from speedtorch.layers.optimizer_trials import FirstState, check_when_given
from speedtorch.layers.residency import Leaver, Residency
from speedtorch.layers.state_swapper import check_can_be_split
from speedtorch.layers.transfer_stats import Freed, SwapReport, TransferStats
from speedtorch.layers.unit import Unit, exact_device
from speedtorch.layers.unit_steps import UnitSteps
from speedtorch.memory.byte_count import bytes_of, text_of
from speedtorch.optim.wrappers import given_optimizers, optimizers_within

__all__ = ["Swapper"]


class Swapper:
    """Keeps units of a model in host memory, and on the device while they are used.

    A unit is a module with its parameters, buffers and gradients, and what the optimizer keeps of
    them. It comes to the device in one piece each, and what has changed of it goes back when its
    memory is needed for another: the one that was used longest ago leaves, and under `auto` the one
    that is used last in the order seen before. Parameter objects, hooks, param_groups and
    schedulers stay as they are, and numbers are those of a model that stays on the device. An
    evicted unit is ordinary CPU tensors.

    `optimizer.step()` steps unit by unit those that have gradients, and brings them for it; what
    belongs to no unit is stepped as ever. Use a unit's tensors within `use` alone: outside it may
    leave at any call of the swapper.

    Args:
        modules: a module, whose children are the units, or the units. Modules that share a
            parameter must be one unit (nn.ModuleList).
        optimizer: any of torch's that keeps tensors for each parameter by itself, also as
            accelerate, Lightning or Fabric wrap it, or several of them (Muon and AdamW), which may
            share parameters; None: nothing is trained.
        device: where units are used; by default the GPU, if there is one.
        budget: the most device memory that units take, with gradients and state, in bytes or as
            "12GiB"; None: as much as there is. Units that are used at once must fit together.

    Raises:
        TypeError: an argument is of the wrong kind, an optimizer steps all parameters at once
            (LBFGS) or another optimizer (Lookahead), or keeps tensors within lists or dicts, or a
            tensor is of a class of its own, other than a wrapper with `__tensor_flatten__` that is
            not trained.
        ValueError: there is no unit, two of them share a tensor, one of them is in another, an
            optimizer is given twice, or small copies of it show that it does not step each
            parameter by itself, the budget is no number of bytes, or a tensor is sparse, quantized,
            on the meta device or made in inference mode.
        RuntimeError: the device is a GPU, and torch finds none here.
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
        self._units: dict[nn.Module, Unit] = {}
        first_state = {each: FirstState(each).nbytes for each in stepped}
        self._residency = Residency(self.device, self.budget, self._traffic, first_state)
        self._steps: list[UnitSteps] = []
        self._auto: AutoOffload | None = None
        try:
            for name, module in named:
                self._units[module] = Unit(
                    module,
                    *stepped,
                    device=self.device,
                    name=name,
                    traffic=self._traffic,
                    before_gradients=weak_call(self._residency.expect_gradients),
                )
            for each in stepped:
                self._steps.append(UnitSteps(each, self._units, self._residency))
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
        """Brings units to the device, where they stay within.

        Args:
            *modules: of the units, or modules that have units within.

        Raises:
            TypeError, ValueError: one of them is no module, or is no unit and has none.
            RuntimeError: the budget, or the device's memory (torch.OutOfMemoryError), is too small
                for all that is in use; nothing has changed but which units are there.
        """
        with self._residency.using(self._named_units(modules), state=False):
            yield

    @property
    def modules(self) -> list[nn.Module]:
        """The units' modules."""
        return list(self._units)

    def prefetch(self, *modules: nn.Module, state: bool | None = None) -> None:
        """Lets units come while others are used; it does not wait.

        Until they are used their tensors are on the host. Those that were used longest ago leave
        for them, under `auto` those that are used last, and none that is in use or was prefetched.
        What finds no room yet comes at a later call of the swapper.

        Args:
            *modules: as of `use`.
            state: bring the optimizer's state as well; None: if the unit was stepped when it was
                there last.
        """
        for unit in self._named_units(modules):
            self._residency.ask(unit, state=unit.was_stepped if state is None else state)
        self._residency.advance()

    def evict(self, *modules: nn.Module) -> Freed:
        """Lets units leave the device, and waits until they have.

        Args:
            *modules: as of `use`; none: all units that are not in use.

        Returns:
            The bytes of device memory that are free now, with `held_by`: views of units' tensors
            that the program keeps, and that keep a unit's device memory and the values there.

        Raises:
            TypeError, ValueError: as of `use`.
            RuntimeError: one of them is in use; nothing has changed.
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
        """Writes what has changed on the device to host memory, and waits; units stay there.

        Gradients stay on the device alone until their unit leaves.
        """
        for unit in self._residency.there:
            unit.write_back(self._residency.end_of_use(unit))
        for unit in self._residency.there:
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
        for steps in self._steps:
            steps.close()
        for unit in self._units.values():
            unit.close()
        self._units.clear()
        self._residency.clear()

    def _check_open(self) -> None:
        if not self._units:
            raise RuntimeError("the Swapper is closed: make another")

    def _named_units(self, modules: Iterable[nn.Module]) -> list[Unit]:
        self._check_open()
        found: dict[Unit, None] = {}
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
        """Steps the optimizer, as `optimizer.step()` does: unit by unit; of several one by one.

        Raises:
            TypeError: there is a closure, and there are several optimizers.
            RuntimeError: there is no optimizer, no room for a unit and its state, or a GradScaler
                has not scaled gradients back as it should have.
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
        """Brings units as forward and backward reach them, and the next ones in the order seen.

        So does an operation that computes something of a unit's tensors elsewhere. Inputs that are
        on another device are copied to the units'. A unit may leave between its forward and its
        backward, which brings it again. The backward pass is over once it returns; a graph goes
        backward once. This lasts until remove(), or another auto(), or as long as the model, also
        if nothing else keeps the Swapper.

        Args:
            step: step each unit in the backward pass, as soon as its gradients are complete, and
                drop them (`grad = None`): each backward() is a step, and a later optimizer.step()
                is one of what belongs to no unit. Gradients must not be scaled, and not be changed
                between backward() and that step: it raises RuntimeError if it has a parameter whose
                gradient has been, and cannot know of it if units have all parameters.
                DistributedDataParallel raises NotImplementedError in the forward.
            ahead: how many of the next units are brought meanwhile, where there is room.

        Returns:
            What ends that by remove(), or as a context manager.

        Raises:
            RuntimeError: step is asked for, and there is no optimizer; or the Swapper is closed.
            ValueError: ahead is no number of units.
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
        """What is where, and what has travelled so far; waits for copies that are on their way."""
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
