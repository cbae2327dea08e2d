"""AutoOffload: loads modules when forward and backward reach them, and prefetches the next modules.

**Operations.** An operation outside a module's forward that loads the module counts as a call, too.

**Order.** The predicted order of calls decides evictions: the module whose next use is farthest is
evicted first. Optimizer state that is needed later than its module is evicted before the module.

**Backward.** Autograd runs the last computed operation first. Suppose that the backward has reached
module B, and then reaches the result of module A. The gradients of B are then complete, unless a
result of another call of B is still to come. At the end of the backward the gradients of all
modules are complete.

**Nested calls.** A module that is called within another module's forward is loaded in addition to
the outer module, in the forward and in the backward.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from speedtorch.layers.access_tracker import on_device
from speedtorch.layers.module_hook import ModuleHook
from speedtorch.layers.module_steps import ModuleSteps
from speedtorch.layers.offloaded_module import OffloadedModule
from speedtorch.layers.residency import Residency, Use
from speedtorch.torch_internals import (
    call_after_backward,
    current_backward,
    is_transformed,
    running_calls,
)

__all__ = ["AccessPredictor", "AutoOffload"]

Call = TypeVar("Call", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)

HORIZON = 256  # the most calls predicted ahead


class AccessPredictor(Generic[Call, Key]):
    """Predicts the next call from the last two: the call that followed them the last time.

    A predicted call costs a few operations. Any other call rebuilds up to `HORIZON` predictions.
    `keys` returns the objects that a call uses.
    """

    def __init__(self, keys: Callable[[Call], Iterable[Key]]) -> None:
        self._keys = keys
        self._next: dict[tuple[Call | None, Call], Call] = {}
        self._before: Call | None = None
        self._last: Call | None = None
        self._calls = 0
        self.expected: deque[Call] = deque()
        """The next calls."""
        self._end: tuple[Call | None, Call] | None = None
        """The last two expected calls."""
        self._uses: dict[Key, deque[int]] = {}
        """The numbers of the expected calls that use each key."""

    def note(self, call: Call) -> None:
        """Records a call, and extends the expected calls."""
        if self._last is not None:
            self._next[self._before, self._last] = call
        self._before, self._last = self._last, call
        self._calls += 1
        if self.expected and self.expected[0] == call:
            self.expected.popleft()
            for key in self._keys(call):
                self._uses[key].popleft()
        else:
            self.expected.clear()
            self._uses.clear()
            self._end = self._before, call
        while len(self.expected) < HORIZON and self._end is not None:
            if (found := self._next.get(self._end)) is None:
                return
            # Uses first: an error before the append then leaves extra uses, never missing ones.
            for key in self._keys(found):
                self._uses.setdefault(key, deque()).append(self._calls + len(self.expected) + 1)
            self.expected.append(found)
            self._end = self._end[1], found

    def next_use(self, key: Key) -> float:
        """Number of calls until a key is used next; inf if no expected call uses the key."""
        uses = self._uses.get(key)
        return uses[0] - self._calls if uses else inf


class _ModuleCall(NamedTuple):
    """A forward or backward call of a module."""

    offloaded: OffloadedModule
    backward: bool


class _RunningForward(NamedTuple):
    """A forward of a module in progress.

    `depth`: the number of the module's calls on the thread's stack, including this call; 0 if the
    stack shows none, such as for a compiled module.
    """

    use: Use
    thread: int
    depth: int


class AutoOffload:
    """Loads a Swapper's modules when they are called, until `remove()`."""

    def __init__(
        self,
        residency: Residency,
        modules: list[OffloadedModule],
        steps: Sequence[ModuleSteps],
        *,
        ahead: int,
    ) -> None:
        self._residency, self._modules = residency, modules
        self._steps = steps
        """One object per optimizer, which steps a module once its gradients are complete."""
        self._ahead = min(ahead, len(modules) - 1)
        self._forward: dict[OffloadedModule, list[_RunningForward]] = {}
        """Forwards in progress, by module."""
        self._backward: dict[OffloadedModule, Use] = {}
        """Modules that the backward has reached, each before the modules called in its forward."""
        self._graphs: list[int] = []
        """Graph ids of the nested backwards in progress."""
        self._predictor = AccessPredictor[_ModuleCall, tuple[OffloadedModule, bool]](self._keys_of)
        self._hooks: list[RemovableHandle] = []
        for offloaded in modules:  # the hooks keep this object alive as long as the model
            module: nn.Module = offloaded.module
            before = ModuleHook(partial(self._before_forward, offloaded))
            after = ModuleHook(partial(self._after_forward, offloaded))
            self._hooks += [
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                module.register_forward_hook(after, always_call=True),
            ]
            offloaded.set_auto_loader(self)
        for module_steps in steps:
            module_steps.note_backward(steps=True)
        residency.set_auto_loader(self)

    def remove(self) -> None:
        """Stops loading modules."""
        if not self._hooks:  # removed before: the modules may follow another AutoOffload by now
            return
        self._residency.set_auto_loader(None)
        for steps in self._steps:
            steps.note_backward(steps=False)
        for hook in self._hooks:
            hook.remove()
        for offloaded in self._modules:
            offloaded.set_auto_loader(None)
        self._forward.clear()
        self._backward.clear()
        self._hooks.clear()  # last, so that an interrupted call can be repeated

    def __enter__(self) -> AutoOffload:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    # ---- Hooks

    def _before_forward(self, offloaded: OffloadedModule, _: Any, args: Any, kwargs: Any) -> Any:
        """Loads a module before its forward, or its recomputation in a backward; copies inputs."""
        self._check_call(offloaded)
        depth, thread = running_calls()[offloaded.module], threading.get_ident()
        self._end_calls(offloaded, thread, depth - 1)
        use = self._residency.modules.begin_use([offloaded])
        self._forward.setdefault(offloaded, []).append(_RunningForward(use, thread, depth))
        self._residency.fill_use(use)
        self._record_call(_ModuleCall(offloaded, backward=False))
        if offloaded.device.type == "cpu":
            return None
        return on_device((args, kwargs), offloaded.device)

    @contextmanager
    def using(self, offloaded: OffloadedModule) -> Iterator[None]:
        """See AutoLoader."""
        self._check_call(offloaded)
        with self._residency.using([offloaded], state=False):
            self._record_call(_ModuleCall(offloaded, backward=False))
            yield

    def is_nested(self, offloaded: OffloadedModule) -> bool:
        """See AutoLoader."""
        thread, begun = threading.get_ident(), self._forward.items()
        return any(calls[-1].thread == thread for other, calls in begun if other is not offloaded)

    def _check_call(self, offloaded: OffloadedModule) -> None:
        """Checks a call of a module, or an operation on its tensors, before it is loaded."""
        self.end_failed()
        # The backward within a transform runs no hook that could load an evicted module.
        if is_transformed() and not self._residency.modules.uses_of(offloaded):
            raise NotImplementedError(
                f"module {offloaded.name!r}: under auto() it may be evicted between the forward and"
                " the backward of a torch.func transform. Call the transform within swapper.use()"
                " of all modules that it runs."
            )
        offloaded.averaging.check(steps=bool(self._steps))
        self._enter_backward()

    def _after_forward(self, offloaded: OffloadedModule, *_: object) -> None:
        if calls := self._forward.get(offloaded):
            use = calls.pop().use
            if not calls:
                del self._forward[offloaded]
            self._residency.end_use(use)

    def _end_calls(self, offloaded: OffloadedModule, thread: int, depth: int) -> None:
        """Ends a module's forwards in this thread that are deeper than `depth`."""
        while calls := self._forward.get(offloaded):
            if calls[-1].thread != thread or not calls[-1].depth or calls[-1].depth <= depth:
                return
            self._after_forward(offloaded)

    def _enter_backward(self) -> None:
        """Records the current backward, if any, and registers a callback for its end."""
        graph = current_backward()
        if graph != -1 and graph not in self._graphs:
            for steps in self._steps if not self._graphs else ():
                steps.begin_backward()
            self._graphs.append(graph)
            call_after_backward(self._end_backward)

    def end_failed(self) -> None:
        """Ends the uses of forwards and backwards that have failed."""
        if self._forward:  # torch calls no forward hook after Ctrl-C
            under_way, thread = running_calls(), threading.get_ident()
            for offloaded in list(self._forward):
                self._end_calls(offloaded, thread, under_way[offloaded.module])
        if current_backward() == -1 and (self._graphs or self._backward):
            while self._backward:
                offloaded, use = self._backward.popitem()
                # The failed backward has not checked the module for changes.
                offloaded.changes.touch()
                self._residency.end_use(use)
            self._graphs.clear()
            for offloaded in self._modules:
                offloaded.forget_results()

    def reaches(self, offloaded: OffloadedModule, *, nested: bool) -> None:
        """See AutoLoader."""
        self._enter_backward()
        if offloaded in self._backward:
            return
        if not nested:
            self._end_backward_uses()
        use = self._residency.modules.begin_use([offloaded], gradients=True)
        self._backward[offloaded] = use
        self._residency.fill_use(use)
        self._record_call(_ModuleCall(offloaded, backward=True))

    def _end_backward_uses(self) -> None:
        """Ends the uses of modules that the backward has reached, and steps complete modules."""
        while self._backward:
            offloaded, use = self._backward.popitem()
            # A nested backward does not know which modules the outer backward has yet to reach.
            # The count is negative if a graph runs a second backward (retain_graph=True).
            if len(self._graphs) == 1 and offloaded.open_results <= 0:
                self._step(offloaded)
            self._residency.end_use(use)

    def _end_backward(self) -> None:
        """Ends a backward: steps modules that are not yet stepped."""
        self._end_backward_uses()
        del self._graphs[-1:]
        if self._graphs:
            return
        for offloaded in self._modules:
            offloaded.forget_results()
        for offloaded in self._modules:
            self._step(offloaded)
        for steps in self._steps:
            steps.end_backward()

    def _step(self, offloaded: OffloadedModule) -> None:
        if not self._steps or not offloaded.tensors.has_gradients:
            return
        for steps in self._steps:
            steps.step_module(offloaded)
        for param in offloaded.module.parameters():
            param.grad = None

    # ---- Order

    def _record_call(self, call: _ModuleCall) -> None:
        """Records a call, and plans the modules of the calls predicted next."""
        self._predictor.note(call)
        requested: dict[OffloadedModule, bool] = {}
        for expected in self._predictor.expected:
            if len(requested) == self._ahead:
                break
            if expected.offloaded is not call.offloaded:
                requested.setdefault(expected.offloaded, self._needs_state(expected))
        if self._needs_state(call):  # first: the step at this call's end needs the state
            requested = {call.offloaded: True, **requested}
        self._residency.plan(requested)

    def next_use(self, offloaded: OffloadedModule, *, state: bool) -> float:
        """Number of calls until a module, or its state, is used next; inf if unknown."""
        if offloaded in self._backward and (not state or self._steps):  # stepped at the use's end
            return 0
        return self._predictor.next_use((offloaded, state))

    def _needs_state(self, call: _ModuleCall) -> bool:
        return call.backward and bool(self._steps)

    def _keys_of(self, call: _ModuleCall) -> Iterator[tuple[OffloadedModule, bool]]:
        """Yields what a call uses: a module, and its state if the call steps the module."""
        yield call.offloaded, False
        if self._needs_state(call):
            yield call.offloaded, True
