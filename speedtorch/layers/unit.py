"""Unit: a module with gradients and optimizer state, in host memory or on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from speedtorch.layers.access_tracker import AccessTracker, untracked
from speedtorch.layers.data_parallel import Averaging
from speedtorch.layers.module_hook import ModuleHook, weak_call
from speedtorch.layers.pack import Pack
from speedtorch.layers.transfers import Memory, TransferStats
from speedtorch.layers.unit_calls import Caller, UnitCalls
from speedtorch.layers.unit_packs import UnitPacks, shown_on_host
from speedtorch.layers.unit_tensors import UnitTensors
from speedtorch.layers.unit_use import UnitUse
from speedtorch.optim.wrappers import optimizers_within

__all__ = ["Unit", "exact_device"]


class Unit:
    """A module and its optimizer state: in host memory, or on the device.

    The unit is evicted at first: ordinary CPU tensors. Parameter objects, their hooks,
    requires_grad and an optimizer's param_groups stay as they are; gradients and the tensors of
    `optimizer.state` move along, and tied tensors stay tied. Tensors without dimensions that torch
    keeps on the CPU (`step`) stay there.

    Gradients are written back, buffers of called modules, what a step has changed, and all changes
    that torch counts. Torch counts no change of `parameter.data`: call `use.touch()` after it.

    On a GPU copies are beside the current stream. All moves raise TypeError or ValueError for a
    tensor that cannot be moved, MemoryError if the host has too little memory, and
    torch.OutOfMemoryError if the device has; the unit is where it was then. A tensor belongs to one
    unit: make one (nn.ModuleList) of modules that share a parameter.

    A view of a loaded unit's tensor that you keep (`parameter.detach()`) keeps the device memory of
    the whole unit; `packs.held_by()` names it. A backward raises RuntimeError while the unit is
    evicted.

    Attributes:
        tensors: all that belong to it, by name.
        use: what may have changed since it was copied.
        packs: the memory of its tensors.
        calls: its module's forwards, and graphs of their results.
    """

    def __init__(
        self,
        module: nn.Module,
        *optimizers: Optimizer,
        device: torch.device | str,
        name: str = "unit",
        traffic: TransferStats | None = None,
        before_gradients: Callable[[Unit], object] = lambda _: None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"module: expected an nn.Module, got {type(module).__name__}")
        self.device = exact_device(device)
        if self.device.type == "meta":
            raise ValueError("device: expected one with memory, as 'cuda' or 'cpu', got 'meta'")
        self.module, self.name = module, name
        given = optimizers_within(optimizers)
        own, gradients, state = (Pack(self.device, traffic) for _ in range(3))
        replaced = weak_call(self._note_replaced)
        self.tensors = UnitTensors(module, given, name, state, replaced)
        self.use = UnitUse(self.device, self.tensors)
        self.packs = UnitPacks(own, gradients, state, self.tensors, self.use)
        self.averaging = Averaging(name, module, self.device)
        self.calls = UnitCalls(self, module, self.packs, self.use, self.averaging, before_gradients)
        self._tracker = AccessTracker(self.calls)
        self._hooks: list[RemovableHandle] = []
        self.tensors.check_alone()
        try:
            self.evict()
        except BaseException:
            self.tensors.disown()
            raise
        self.calls.register()
        saved = ModuleHook(weak_call(self._save))
        self._hooks.append(module.register_state_dict_post_hook(saved))  # type: ignore[no-untyped-call]
        after_step = weak_call(self.use.note_step)
        self._step_hooks = [each.register_step_post_hook(after_step) for each in given]

    def _note_replaced(self) -> None:
        self.calls.watch()
        self.averaging.forget_replaced()

    def bring(self, *, state: bool = True) -> None:
        """Begins to copy the unit to the device; tensors may change on the host until load()."""
        try:
            self._come(Pack.bring, state=state)
        finally:
            self.track()

    def load(self, *, state: bool = True) -> None:
        """Moves the unit to the device, with the optimizer state that a step needs."""
        self._come(Pack.load, state=state)
        self.packs.join(state=state)

    def _come(self, call: Callable[..., None], *, state: bool) -> None:
        self._tracker.stop()
        self.averaging.note()
        try:
            self.packs.come(call, state=state)
        except BaseException:
            self.track()
            raise

    def evict(self, after: torch.cuda.Event | None = None, *, search: bool = True) -> int:
        """Moves the unit to the host; returns the bytes of device memory that are free then.

        See UnitPacks.write_back() for `after`, and Pack.evict() for `search`.
        """
        self._tracker.stop()
        self.averaging.note()
        freed = self.packs.evict(after, search=search)
        self.calls.note_evicted()
        self.track()
        return freed

    def evict_state(self, after: torch.cuda.Event | None = None) -> int:
        """Moves optimizer state only to the host; the unit can be used, and not be stepped."""
        self._tracker.stop()
        return self.packs.evict_state(after)

    def begin_use(self) -> None:
        """From now on its tensors are used without being tracked."""
        self._tracker.stop()
        self.use.join_streams()

    def end_use(self) -> None:
        """Tracks its tensors; the current stream is behind all work on the unit from now on."""
        self.use.join_streams()
        self.track()

    @untracked
    def track(self) -> None:
        """Finds operations on its tensors until it is used: they are changes, or load it."""
        if self.packs.device_bytes:
            self._tracker.start(self.tensors.found.all_tensors())
        elif self.calls.comes_by_itself:
            self._tracker.start(self.tensors.found.own.values())
        else:
            self._tracker.stop()

    def follow(self, caller: Caller[Unit] | None) -> None:
        """The caller loads the unit as the program reaches it; None ends that."""
        self.calls.follow(caller)
        if not self.packs.device_bytes:  # on the device tensors are tracked unless they are in use
            self.track()

    def tell_steps(self) -> None:
        """Promises use.note_step(); else each step of an optimizer may have changed the unit."""
        for each in self._step_hooks:
            each.remove()

    def _save(self, module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        """Gives state_dict() the tensors on the host, which stay readable after an eviction."""
        if self.packs.memory is Memory.HOST:
            return
        on_host = self.packs.on_host()
        # Which are given if variables are kept.
        own = {id(each) for each in (*module.parameters(), *module.buffers())}
        for name, each in state.items():
            if name.startswith(prefix) and isinstance(each, Tensor) and id(each) not in own:
                state[name] = shown_on_host(each, on_host)

    def close(self) -> None:
        """Evicts the unit; another unit may have its tensors then."""
        self.calls.follow(None)
        self.evict()
        for each in (*self._hooks, *self._step_hooks):
            each.remove()
        self.calls.remove()
        self.tensors.disown()


def exact_device(device: torch.device | str) -> torch.device:
    """As tensors there name it: "cuda" is the current GPU.

    Raises RuntimeError if it is a GPU and there is none.
    """
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"device={str(device)!r} needs a GPU, and torch finds none here")
    is_current = found.type == "cuda" and found.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_current else found
