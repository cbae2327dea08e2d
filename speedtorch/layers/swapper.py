"""Swapper: loads offloaded modules to the device for use, and evicts unused modules."""

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
from speedtorch.layers.residency import Evictable, Residency
from speedtorch.layers.split_steps import FirstState, check_can_be_split, check_when_given
from speedtorch.layers.transfer_stats import Freed, SwapReport, TransferStats
from speedtorch.memory.byte_count import bytes_of, text_of
from speedtorch.optim.wrappers import given_optimizers, optimizers_within

__all__ = ["Swapper"]


class Swapper:
    """Keeps modules in host memory, and loads them to the device while they are used.

    A module is loaded as a whole, with its parameters, buffers and gradients. The optimizer state
    is loaded for a step. If a module does not fit, the least recently used module that is not in
    use is evicted, and its changes are written back. Under `auto`, the evicted module is the one
    whose next use is farthest in the recorded order. Parameter objects, hooks, param_groups and
    schedulers remain the same, and results equal a model that remains on the device. An evicted
    module consists of ordinary CPU tensors.

    `optimizer.step()` loads and steps offloaded modules with gradients one by one. Other parameters
    are stepped as usual. Without `auto`, use a module's tensors only within `use`, because later
    calls of the swapper may evict a module that is not in use.

    Args:
        modules: the modules to offload, or one module whose children are offloaded. Modules that
            share a parameter must form one module (nn.ModuleList).
        optimizer: a torch optimizer that keeps separate tensors for each parameter, or several
            optimizers (Muon and AdamW), which may share parameters. Wrappers from accelerate,
            Lightning and Fabric are accepted. None: no optimizer steps these modules.
        device: the device that uses the modules. Default: the GPU, if there is one.
        budget: the most device memory for modules, including gradients and state, in bytes or as
            text such as "12GiB". None: no limit. Modules in use must fit together.

    Raises:
        TypeError: an argument has the wrong type. An optimizer steps all parameters at once
            (LBFGS), wraps another optimizer (Lookahead), or keeps tensors within lists or dicts. A
            module contains a speedtorch Embedding. A tensor has a custom class that is not a frozen
            wrapper with `__tensor_flatten__`.
        ValueError: there is no module, modules share a tensor, or a module contains another. An
            optimizer is given twice, or does not step each parameter separately (checked with small
            copies). The budget is no number of bytes. A tensor is sparse, quantized, on the meta
            device or made in inference mode.
        NotImplementedError: a module contains a module of torch.jit.script or torch.jit.trace.
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
        named = _name_modules(modules)
        self._given = given_optimizers(optimizer)
        self.optimizer = self._given if len(self._given) > 1 else next(iter(self._given), None)
        stepped = optimizers_within(self._given)
        for stepped_optimizer in stepped:
            check_can_be_split(stepped_optimizer)
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = exact_device(device)
        for stepped_optimizer in stepped:
            check_when_given(stepped_optimizer, self.device)
        self.budget = None if budget is None else bytes_of("budget", budget)
        self._traffic = TransferStats()
        self._offloaded: dict[nn.Module, OffloadedModule] = {}
        first_state = {optimizer: FirstState(optimizer).nbytes for optimizer in stepped}
        self._residency = Residency(self.budget, self._traffic, first_state)
        self._steps: list[ModuleSteps] = []
        self._auto: AutoOffload | None = None
        try:
            for name, module in named:
                self._offloaded[module] = OffloadedModule(
                    module,
                    *stepped,
                    device=self.device,
                    name=name,
                    traffic=self._traffic,
                    before_gradients=weak_call(self._residency.expect_gradients),
                )
            for optimizer in stepped:
                self._steps.append(ModuleSteps(optimizer, self._offloaded, self._residency))
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        if not self._offloaded:
            return f"{type(self).__name__}(closed)"
        named = [f"{module.name}: {type(key).__name__}" for key, module in self._offloaded.items()]
        shown = named[:3] + [f"{len(named) - 3} more"] * (len(named) > 3)
        budget = None if self.budget is None else text_of(self.budget)
        text = f"{', '.join(shown)}; device={self.device}, budget={budget}"
        return f"{type(self).__name__}({text})"

    @contextmanager
    def use(self, *modules: nn.Module) -> Iterator[None]:
        """Context manager that loads modules to the device and keeps them there until exit.

        Args:
            *modules: offloaded modules, or modules that contain offloaded ones.

        Raises:
            TypeError, ValueError: an argument neither is nor contains an offloaded module.
            RuntimeError: the Swapper is closed. Or the budget or the device memory
                (torch.OutOfMemoryError) is too small for all modules in use. Other modules may have
                been moved; values are unchanged.
        """
        with self._residency.using(self._find_offloaded(modules), state=False):
            yield

    @property
    def modules(self) -> list[nn.Module]:
        """The offloaded modules."""
        return list(self._offloaded)

    def prefetch(self, *modules: nn.Module, state: bool | None = None) -> None:
        """Starts copying modules to the device on a side stream, and does not wait for the copies.

        Their tensors remain on the host until first use. Least recently used modules are evicted
        for them, or under `auto` the modules with the farthest next use. Modules that are in use or
        prefetched are not evicted. A module that does not fit yet is copied in a later call of the
        swapper.

        Args:
            *modules: modules as in `use`.
            state: whether to copy the optimizer state too. None: only if the module was stepped the
                last time it was on the device.
        """
        for module in self._find_offloaded(modules):
            self._residency.request(
                module, state=module.changes.was_stepped if state is None else state
            )
        self._residency.advance()

    def evict(self, *modules: nn.Module) -> Freed:
        """Writes modules back to the host, frees their device memory, and waits for the copies.

        Args:
            *modules: modules as in `use`. Without arguments: all modules that are not in use.

        Returns:
            The freed device bytes. The attribute `held_by` names views of modules' tensors that the
            program holds; such a view keeps the module's device memory and the values there.

        Raises:
            TypeError, ValueError: see `use`.
            RuntimeError: a given module is in use. Nothing has changed.
        """
        self._residency.refresh()
        selected = self._find_offloaded(modules) if modules else list(self._offloaded.values())
        in_use = [module for module in selected if self._residency.modules.uses_of(module)]
        if modules and (names := [module.name for module in in_use]):
            raise RuntimeError(
                f"evict: modules {names} are in use. Call evict() after use() ends, or under auto()"
                " after their forward and backward."
            )
        freed, held = 0, []
        for module in [module for module in selected if module not in in_use]:
            freed += self._residency.evict(Evictable(module), search=True)
            held += [f"{module.name}: {view}" for view in module.groups.held_by()]
        return Freed(freed, held)

    def flush(self) -> None:
        """Writes changes back to host memory and waits; modules remain on the device.

        Gradients, and optimizer state that a step has created since the module was loaded, are
        written back only by an eviction of their module.
        """
        for offloaded in self._residency.modules.loaded:
            offloaded.groups.write_back()
        for offloaded in self._residency.modules.loaded:
            offloaded.groups.wait()

    def touch(self, *modules: nn.Module) -> None:
        """Marks tensors of modules as changed, after changes that torch's versions do not count.

        Call this after changes such as `parameter.data.mul_(0.9)` within `use`, before the module
        is evicted. These changes are otherwise not written back. Steps of the Swapper's optimizers
        are detected without this call.

        Args:
            *modules: modules as in `use`. Without arguments: all modules.
        """
        for offloaded in self._find_offloaded(modules or self._offloaded):
            offloaded.changes.touch()

    def close(self) -> None:
        """Evicts all modules and removes all hooks; modules and state remain on the CPU."""
        if self._auto is not None:
            self._auto.remove()
        for steps in self._steps:
            steps.close()
        for offloaded in self._offloaded.values():
            offloaded.close()
        self._offloaded.clear()
        self._residency.clear()

    def _check_open(self) -> None:
        if not self._offloaded:
            raise RuntimeError("The Swapper is closed. Create another Swapper.")

    def _find_offloaded(self, modules: Iterable[nn.Module]) -> list[OffloadedModule]:
        self._check_open()
        found: dict[OffloadedModule, None] = {}
        for module in modules:
            if not isinstance(module, nn.Module):
                raise TypeError(f"modules: expected an nn.Module, got {type(module).__name__}")
            own = [self._offloaded[part] for part in module.modules() if part in self._offloaded]
            if not own:
                names = ", ".join(offloaded.name for offloaded in self._offloaded.values())
                raise ValueError(
                    f"modules: {type(module).__name__} neither is nor contains an offloaded module"
                    f" of this Swapper. The offloaded modules are {names}."
                )
            found |= dict.fromkeys(own)
        return list(found)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Calls `step()` of each optimizer, which steps module by module.

        Raises:
            TypeError: there are a closure and several optimizers.
            RuntimeError: there is no optimizer, or a module and its state do not fit on the device.
                Or, after a backward under auto(step=True), a gradient of a parameter outside the
                modules has changed.
        """
        if not self._given:
            raise RuntimeError("step: the Swapper has no optimizer. Pass one to Swapper().")
        if closure is None:
            results = [optimizer.step() for optimizer in self._given]
            return results[0] if len(results) == 1 else None
        if len(self._given) > 1:
            raise TypeError(
                f"closure: {len(self._given)} optimizers would call it {len(self._given)} times."
                " Call the closure yourself, and then step() without it."
            )
        return self._given[0].step(closure)

    def auto(self, *, step: bool = False, ahead: int = 3) -> AutoOffload:
        """Loads modules when forward or backward reaches them, and prefetches the next modules.

        The order of prefetches is recorded from earlier calls. Inputs on another device are copied
        to the modules' device. A module may be evicted between its forward and backward; the
        backward loads it again. A second derivative (create_graph=True) does not load an evicted
        module, and raises RuntimeError. The effect lasts until remove(), close() or another auto(),
        or as long as the model, even without references to the Swapper.

        An operation that computes with a module's tensors outside its forward loads the module too.
        Exceptions are in-place writes to its tensors and, without gradients, operations on several
        modules, unless another operand is on the modules' GPU. Printing and saving load no module.

        Args:
            step: whether to step each module in the backward pass once its gradients are complete,
                and then drop the gradients (`grad = None`). Each backward() is then a step, and
                needs its own graph (no retain_graph=True). A later optimizer.step() steps only
                parameters outside these modules. Gradients must not be scaled, or changed between
                backward() and that step. The step raises RuntimeError if the gradient of a
                parameter outside has changed. A change is not detected if all parameters belong to
                offloaded modules. Within DistributedDataParallel, the forward raises
                NotImplementedError.
            ahead: how many of the next modules to prefetch if they fit.

        Returns:
            A handle and context manager; remove() or the end of the block ends the effect.

        Raises:
            RuntimeError: `step` is True without an optimizer, or the Swapper is closed.
            ValueError: `ahead` is not an int of at least 0.
        """
        self._check_open()
        if step and not self._steps:
            raise RuntimeError("auto(step=True): the Swapper has no optimizer. Pass one to it.")
        if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
            raise ValueError(f"auto: ahead must be an int of at least 0, got {ahead!r}")
        if self._auto is not None:
            self._auto.remove()
        steps = self._steps if step else []
        modules = list(self._offloaded.values())
        self._auto = AutoOffload(self._residency, modules, steps, ahead=ahead)
        return self._auto

    def report(self) -> SwapReport:
        """Reports where modules are and what has been copied so far; waits for queued copies."""
        residency, modules = self._residency, self._offloaded.values()
        residency.refresh()
        resident = residency.modules.loaded
        return SwapReport(
            num_modules=len(modules),
            resident=tuple(module.name for module in resident),
            in_use=tuple(module.name for module in resident if residency.modules.uses_of(module)),
            resident_bytes=residency.modules.used_bytes(),
            budget_bytes=self.budget,
            host_bytes=sum(module.groups.nbytes for module in modules),
            new_bytes=sum(module.groups.new_bytes() for module in resident),
            hits=residency.hits,
            misses=residency.misses,
            seconds_waited=residency.seconds_waited,
            **self._traffic.figures(),
            held_by=tuple(f"{m.name}: {view}" for m in modules for view in m.groups.held_by()),
        )


def _name_modules(modules: object) -> list[tuple[str, nn.Module]]:
    """Returns the modules to offload with their names."""
    if isinstance(modules, nn.Module):
        named = list(modules.named_children())
        empty = f"{type(modules).__name__} has no child modules. Pass [module] to offload it whole."
    elif isinstance(modules, Iterable):
        named = [(str(number), module) for number, module in enumerate(modules)]
        empty = "expected at least one nn.Module, got none."
    else:
        raise TypeError(f"modules: expected an nn.Module or a list, got {type(modules).__name__}")
    if not named:
        raise ValueError(f"modules: {empty}")
    for name, module in named:
        if not isinstance(module, nn.Module):
            raise TypeError(f"modules: expected nn.Module, got {type(module).__name__} as {name}")
    names: dict[nn.Module, str] = {}
    for name, module in named:
        for part in module.modules():
            if isinstance(part, torch.jit.ScriptModule):
                raise NotImplementedError(
                    f"modules: {name} has a {type(part).__name__}, and torch.jit modules have no"
                    " hooks that load their tensors. Offload the original module."
                )
            if part in names:
                raise ValueError(
                    f"modules: {name} and {names[part]} share a submodule. Offload both as one"
                    " module (nn.ModuleList)."
                )
        names |= dict.fromkeys(module.modules(), name)
    return named
