"""DeviceModules: offloaded modules with device memory, their current uses, and their bytes."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from speedtorch.layers.access_tracker import untracked
from speedtorch.layers.offloaded_module import OffloadedModule
from speedtorch.memory.byte_count import text_of

__all__ = ["DeviceModules", "Need", "Use"]


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
        """Prevents eviction of modules until end_use(), or until the returned Use is dropped."""
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
            needed = module.groups.needed_bytes + self._first_state_bytes(module)
            needed += sum(self.bytes_of(other) for other in used)
            if needed > self._budget:
                raise RuntimeError(
                    f"budget: {text_of(self._budget)} is {text_of(needed - self._budget)} too small"
                    f" to step module {module.name!r} with its gradients and optimizer state. Other"
                    f" modules in use: {', '.join(other.name for other in used) or 'none'}. No"
                    " module has been stepped. Increase the budget."
                )

    def count_extra_bytes(self, module: OffloadedModule, need: Need | None) -> None:
        """Counts the bytes allocated in a module on the device, and those that `need` may add."""
        count = module.groups.other_bytes()
        if need is not None and self._budget is not None:
            if need.gradients:
                count += module.tensors.missing_gradients()
            if need.state:
                count += self._first_state_bytes(module)
        self._extra_bytes[module] = count

    def forget_extra_bytes(self, module: OffloadedModule) -> int:
        """Returns the counted bytes of an evicted module, which no longer count."""
        return self._extra_bytes.pop(module, 0)

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
