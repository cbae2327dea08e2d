"""AutoOffload: loads units when forward and backward reach them, and prefetches the next units.

**Operations.** An operation on a unit's tensors outside its forward also counts as a call.

**Order.** The predicted order of calls decides evictions: the unit that is used last is evicted
first, and optimizer state before its unit.

**Backward.** Autograd runs the last computed operation first. When the backward reaches the result
of another unit, the previous unit's gradients are therefore complete, unless that unit was called
more than once. At the end of the backward the gradients of all units are complete. A unit called
within another unit's forward is loaded in addition to that unit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle

from speedtorch.layers.access_predictor import AccessPredictor
from speedtorch.layers.access_tracker import on_device
from speedtorch.layers.module_hook import ModuleHook
from speedtorch.layers.module_steps import ModuleSteps
from speedtorch.layers.offloaded_module import OffloadedModule
from speedtorch.layers.partial_step import PartialStep
from speedtorch.layers.residency import Residency, Use
from speedtorch.torch_internals import (
    call_after_backward,
    calls_under_way,
    current_backward,
    is_transformed,
)

__all__ = ["AutoOffload"]


class _Reached(NamedTuple):
    """A forward or backward call of a unit."""

    unit: OffloadedModule
    backward: bool


class _Call(NamedTuple):
    """A forward of a unit in progress.

    `depth`: the number of the module's calls on the thread's stack, including this call. 0 if
    Python shows no call, such as for a compiled module.
    """

    use: Use
    thread: int
    depth: int


class AutoOffload:
    """Loads a Swapper's units when they are called, until `remove()`."""

    def __init__(
        self,
        residency: Residency,
        units: list[OffloadedModule],
        steps: Sequence[ModuleSteps],
        *,
        ahead: int,
    ) -> None:
        self._residency, self._units = residency, units
        self._steps = steps
        """Step each unit in the backward once its gradients are complete, and drop these."""
        self._ahead = min(ahead, len(units) - 1)
        self._parts: list[PartialStep] = []
        """The steps of the current backward, one per optimizer."""
        self._forward: dict[OffloadedModule, list[_Call]] = {}
        """Forwards in progress, by unit."""
        self._backward: dict[OffloadedModule, Use] = {}
        """Units that the backward has reached: a unit, then units called within its forward."""
        self._graphs: list[int] = []
        """Graph ids of the nested backwards in progress."""
        self._order: AccessPredictor[_Reached, tuple[OffloadedModule, bool]] = AccessPredictor(
            self._parts_of
        )
        self._hooks: list[RemovableHandle] = []
        for unit in units:  # the hooks keep this object alive as long as the model
            module: nn.Module = unit.module
            begins, ends = (ModuleHook(partial(each, unit)) for each in (self._begins, self._ends))
            self._hooks += [
                module.register_forward_pre_hook(begins, prepend=True, with_kwargs=True),
                module.register_forward_hook(ends, always_call=True),
            ]
            unit.set_auto_loader(self)
        for each in steps:
            each.note_backward(steps=True)
        residency.follow(self)

    def remove(self) -> None:
        """Stops loading units."""
        if not self._hooks:  # removed before: the units may follow another AutoOffload by now
            return
        self._residency.follow(None)
        for steps in self._steps:
            steps.note_backward(steps=False)
        for each in self._hooks:
            each.remove()
        for unit in self._units:
            unit.set_auto_loader(None)
        self._forward.clear()
        self._backward.clear()
        self._hooks.clear()  # last, so that an interrupted call can be repeated

    def __enter__(self) -> AutoOffload:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    # --------------------------------------------------------------------------------------------
    # Hooks

    def _begins(
        self, unit: OffloadedModule, _: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        """Loads a unit before its forward, or its recomputation in a backward; copies inputs."""
        self._enter(unit)
        depth, thread = calls_under_way()[unit.module], threading.get_ident()
        self._end_calls(unit, thread, depth - 1)
        use = self._residency.begin_use([unit])
        self._forward.setdefault(unit, []).append(_Call(use, thread, depth))
        self._residency.fill_use(use)
        self._note(_Reached(unit, backward=False))
        if unit.device.type == "cpu":
            return None
        given: tuple[Any, Any] = on_device((args, kwargs), unit.device)
        return given

    @contextmanager
    def using(self, unit: OffloadedModule) -> Iterator[None]:
        """See AutoLoader."""
        self._enter(unit)
        with self._residency.using([unit], state=False):
            self._note(_Reached(unit, backward=False))
            yield

    def is_nested(self, unit: OffloadedModule) -> bool:
        """See AutoLoader."""
        thread, begun = threading.get_ident(), self._forward.items()
        return any(calls[-1].thread == thread for other, calls in begun if other is not unit)

    def _enter(self, unit: OffloadedModule) -> None:
        """Checks a call of a unit, or an operation on its tensors, before the unit is loaded."""
        self.end_failed()
        # The backward within a transform runs no hook that could load an evicted unit.
        if is_transformed() and not self._residency.is_used(unit):
            raise NotImplementedError(
                f"{unit.name}: under auto() a unit leaves between the forward and the backward of "
                "a transform of torch.func; call the transform within swapper.use() of all units "
                "that it runs"
            )
        unit.averaging.check(steps=bool(self._steps))
        self._enter_backward()

    def _ends(self, unit: OffloadedModule, *_: object) -> None:
        if calls := self._forward.get(unit):
            use = calls.pop().use
            if not calls:
                del self._forward[unit]
            self._residency.end_use(use)

    def _end_calls(self, unit: OffloadedModule, thread: int, depth: int) -> None:
        """Ends a unit's forwards in this thread that are deeper than `depth`."""
        while calls := self._forward.get(unit):
            if calls[-1].thread != thread or not calls[-1].depth or calls[-1].depth <= depth:
                return
            self._ends(unit)

    def _enter_backward(self) -> None:
        """Records the current backward, if any, and registers a callback for its end."""
        graph = current_backward()
        if graph != -1 and graph not in self._graphs:
            for steps in self._steps if not self._graphs else ():
                steps.note_begun_backward()
            self._graphs.append(graph)
            call_after_backward(self._through)

    def end_failed(self) -> None:
        """Ends the uses of forwards and backwards that have failed."""
        if self._forward:  # torch calls no forward hook after Ctrl-C
            under_way, thread = calls_under_way(), threading.get_ident()
            for unit in list(self._forward):
                self._end_calls(unit, thread, under_way[unit.module])
        if current_backward() == -1 and (self._graphs or self._backward):
            self._parts.clear()
            while self._backward:
                unit, use = self._backward.popitem()
                unit.touch()  # the failed backward has not checked the unit for changes
                self._residency.end_use(use)
            self._graphs.clear()
            for unit in self._units:
                unit.forget_results()

    def reaches(self, unit: OffloadedModule, *, nested: bool) -> None:
        """See AutoLoader."""
        self._enter_backward()
        if unit in self._backward:
            return
        if not nested:
            self._leave_backward()
        use = self._residency.begin_use([unit], gradients=True)
        self._backward[unit] = use
        self._residency.fill_use(use)
        self._note(_Reached(unit, backward=True))

    def _leave_backward(self) -> None:
        """Ends the uses of units that the backward has reached; steps units that are complete."""
        while self._backward:
            unit, use = self._backward.popitem()
            # A nested backward does not know which units the outer backward has yet to reach.
            if len(self._graphs) == 1 and unit.open_results <= 0:
                self._step(unit)
            self._residency.end_use(use)

    def _through(self) -> None:
        """Ends a backward: steps units that are not yet stepped."""
        self._leave_backward()
        del self._graphs[-1:]
        if self._graphs:
            return
        for unit in self._units:
            unit.forget_results()
        for unit in self._units:
            self._step(unit)
        counted = [each.settle() for each in self._parts] or [[] for _ in self._steps]
        self._parts.clear()
        for steps, its in zip(self._steps, counted, strict=True):
            steps.note_ended_backward(its)

    def _step(self, unit: OffloadedModule) -> None:
        if not self._steps or not unit.has_gradients:
            return
        if not self._parts:
            self._parts = [PartialStep(each.optimizer) for each in self._steps]
        for steps, part in zip(self._steps, self._parts, strict=True):
            steps.step_unit(unit, part)
        for each in unit.module.parameters():
            each.grad = None

    # --------------------------------------------------------------------------------------------
    # Order

    def _note(self, reached: _Reached) -> None:
        """Records a call, and plans the units of the calls predicted next."""
        self._order.note(reached)
        wanted: dict[OffloadedModule, bool] = {}
        for each in self._order.ahead():
            if len(wanted) == self._ahead:
                break
            if each.unit is not reached.unit:
                wanted.setdefault(each.unit, self._takes_state(each))
        if self._takes_state(reached):  # first: the step at this call's end needs the state
            wanted = {reached.unit: True, **wanted}
        self._residency.plan(wanted)

    def next_use(self, unit: OffloadedModule, *, state: bool) -> float:
        """Number of calls until a unit, or its state, is used next; inf if unknown."""
        if unit in self._backward and (not state or self._steps):  # stepped at the use's end
            return 0
        return self._order.next_use((unit, state))

    def _takes_state(self, reached: _Reached) -> bool:
        return reached.backward and bool(self._steps)

    def _parts_of(self, reached: _Reached) -> Iterator[tuple[OffloadedModule, bool]]:
        """Yields what a call uses: a unit, and its state if the call steps the unit."""
        yield reached.unit, False
        if self._takes_state(reached):
            yield reached.unit, True
