"""Auto: units come as forward and backward reach them, and the next one in the order seen before.

**Order.** As it is known what comes next, it is known as well what is used last: that leaves first,
and the optimizer's state before its unit.

**Backward.** Autograd runs what was computed last first. So where it reaches the result of another
unit, it is through with the one before, whose gradients are complete, unless that was called more
than once; and it is through with all where it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from speedtorch.layers.call_order import CallOrder
from speedtorch.layers.data_parallel import check_data_parallel
from speedtorch.layers.partial_step import PartialStep
from speedtorch.layers.room import Room, Use
from speedtorch.layers.unit import Unit
from speedtorch.layers.unit_steps import UnitSteps
from speedtorch.torch_internals import calls_under_way, current_backward, never_compiled

__all__ = ["Auto"]


class _Reached(NamedTuple):
    """A call of a unit, forward or backward."""

    unit: Unit
    backward: bool


class _Call(NamedTuple):
    """A forward of a unit that has begun.

    Attributes:
        use: lets its unit stay.
        thread: which runs it.
        depth: how many calls of the module were on that thread's stack, with this one; 0: none that
            Python shows, as of a compiled module.
    """

    use: Use
    thread: int
    depth: int


class _Hook:
    """A module's hook; in copies of the module, and files of it, it does nothing."""

    def __init__(self, call: Callable[[], None] | None = None) -> None:
        self._call = call

    @partial(never_compiled, reason="units come and go")
    def __call__(self, *_: Any) -> None:
        if self._call is not None:
            self._call()

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


class Auto:
    """Brings a Swapper's units as they are called; `remove()` ends that.

    Args:
        room: brings them.
        units: of it.
        steps: steps each unit in backward, once its gradients are complete, which are dropped then;
            None: nobody does.
        ahead: units that are brought ahead.
    """

    def __init__(
        self,
        room: Room,
        units: list[Unit],
        steps: UnitSteps | None,
        *,
        ahead: int,
    ) -> None:
        self._room, self._units, self._steps = room, units, steps
        self._ahead = min(ahead, len(units) - 1)
        self._part: PartialStep | None = None
        """The step of the backward of now."""
        self._forward: dict[Unit, list[_Call]] = {}
        """Forwards that have begun and not ended, by units."""
        self._backward: tuple[Unit, Use] | None = None
        self._graphs: list[int] = []
        """Backwards that are under way, one within another."""
        self._order: CallOrder[_Reached, tuple[Unit, bool]] = CallOrder(self._parts_of)
        self._hooks: list[RemovableHandle] = []
        for unit in units:  # whose hooks keep this alive for as long as the model
            begins, ends = partial(self._begins, unit), partial(self._ends, unit)
            module: nn.Module = unit.module
            self._hooks += [
                module.register_forward_pre_hook(_Hook(begins), prepend=True),
                module.register_forward_hook(_Hook(ends), always_call=True),
            ]
            unit.call_in_backward(partial(self._reaches, unit))
        if steps is not None:
            steps.note_backward(steps=True)
        room.follow(self)

    def remove(self) -> None:
        """Brings units no longer by itself."""
        if self._hooks:  # and no other has come since
            self._room.follow(None)
            if self._steps is not None:
                self._steps.note_backward(steps=False)
        for each in self._hooks:
            each.remove()
        self._hooks.clear()
        for unit in self._units:
            unit.call_in_backward(None)
        self._forward.clear()
        self._backward = None

    def __enter__(self) -> Auto:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    # --------------------------------------------------------------------------------------------
    # Hooks

    def _begins(self, unit: Unit) -> None:
        """The forward of a unit begins, within a backward if that computes it again."""
        self.end_failed()
        if self._steps is not None:
            check_data_parallel(unit.name, unit.module, steps=True)
        self._enter_backward()
        depth, thread = calls_under_way()[unit.module], threading.get_ident()
        self._end_calls(unit, thread, depth - 1)
        use = self._room.begin_use([unit])
        self._forward.setdefault(unit, []).append(_Call(use, thread, depth))
        self._room.fill_use(use)
        self._note(_Reached(unit, backward=False))

    def _ends(self, unit: Unit) -> None:
        if calls := self._forward.get(unit):
            use = calls.pop().use
            if not calls:
                del self._forward[unit]
            self._room.end_use(use)

    def _end_interrupted(self) -> None:
        """Ends forwards that are on the stack no longer: torch calls no hook after Ctrl-C."""
        if not self._forward:
            return
        under_way, thread = calls_under_way(), threading.get_ident()
        for unit in list(self._forward):
            self._end_calls(unit, thread, under_way[unit.module])

    def _end_calls(self, unit: Unit, thread: int, depth: int) -> None:
        """Ends forwards of a unit in this thread but for so many."""
        while calls := self._forward.get(unit):
            if calls[-1].thread != thread or not calls[-1].depth or calls[-1].depth <= depth:
                return
            self._ends(unit)

    def _enter_backward(self) -> None:
        """Notes the backward of now, if there is one, and that it is to end."""
        graph = current_backward()
        if graph != -1 and graph not in self._graphs:
            if self._steps is not None and not self._graphs:
                self._steps.note_begun_backward()
            self._graphs.append(graph)
            torch.autograd.Variable._execution_engine.queue_callback(self._through)

    def end_failed(self) -> None:
        """Forgets a backward, and forwards, that have failed."""
        self._end_interrupted()
        if current_backward() == -1 and (self._graphs or self._backward is not None):
            self._backward, self._part = None, None
            self._graphs.clear()
            self._forget_results()

    def _reaches(self, unit: Unit) -> None:
        """Backward reaches a result of a unit."""
        self._enter_backward()
        if self._backward is not None and self._backward[0] is unit:
            return
        self._leave_backward()
        use = self._room.begin_use([unit], gradients=True)
        self._backward = unit, use
        self._room.fill_use(use)
        self._note(_Reached(unit, backward=True))

    def _leave_backward(self) -> None:
        """Backward is through with the unit that it has reached last."""
        if self._backward is None:
            return
        (unit, use), self._backward = self._backward, None
        # A backward within another knows nothing of what that will reach.
        if len(self._graphs) == 1 and unit.open_results <= 0:
            self._step(unit)
        self._room.end_use(use)

    def _through(self) -> None:
        """A backward has ended."""
        self._leave_backward()
        del self._graphs[-1:]
        if self._graphs:
            return
        self._forget_results()
        for unit in self._units:
            if self._steps is not None and unit.has_gradients:
                self._step(unit)
        if self._part is not None:
            self._part.settle()
            self._part = None
        if self._steps is not None:
            self._steps.note_ended_backward()

    def _step(self, unit: Unit) -> None:
        if self._steps is None or not unit.has_gradients:
            return
        if self._part is None:
            self._part = PartialStep(self._steps.optimizer)
        self._steps.step_unit(unit, self._part)
        for each in unit.module.parameters():
            each.grad = None

    def _forget_results(self) -> None:
        for unit in self._units:
            unit.forget_results()

    # --------------------------------------------------------------------------------------------
    # Order

    def _note(self, reached: _Reached) -> None:
        """Remembers what came after what, and asks for what is to come."""
        self._order.note(reached)
        wanted: dict[Unit, bool] = {}
        for each in self._order.ahead():
            if len(wanted) == self._ahead:
                break
            if each.unit is not reached.unit:
                wanted.setdefault(each.unit, self._takes_state(each))
        if self._takes_state(reached):  # at its end, before the others are used
            wanted = {reached.unit: True, **wanted}
        self._room.plan(wanted)

    def next_use(self, unit: Unit, *, state: bool) -> float:
        """In how many calls a unit is used next, or its state; inf: nobody knows."""
        is_now = self._backward is not None and self._backward[0] is unit
        if is_now and (not state or self._steps is not None):  # which steps it at its end
            return 0
        return self._order.next_use((unit, state))

    def _takes_state(self, reached: _Reached) -> bool:
        return reached.backward and self._steps is not None

    def _parts_of(self, reached: _Reached) -> Iterator[tuple[Unit, bool]]:
        """What a call uses: a unit, and perhaps its state."""
        yield reached.unit, False
        if self._takes_state(reached):
            yield reached.unit, True
