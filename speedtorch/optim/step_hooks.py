"""Hooks of every optimizer's step: the rows that it changes must go back to their table."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from speedtorch.optim.attached_state import AttachedState, state_of
from speedtorch.optim.optimizer_copy import group_of, settings_of
from speedtorch.optim.probe import probe_optimizer
from speedtorch.optim.wrappers import is_wrapper
from speedtorch.step.row_weight import hide_rows, show_rows
from speedtorch.step.timeline import in_timeline
from speedtorch.step.trained_rows import TrainedRows, rows_held_by
from speedtorch.step.turn import Turns
from speedtorch.torch_internals import FOUND_INF, as_plain, can_skip, not_compiled

__all__ = ["watch_steps"]


@cache
def watch_steps() -> None:
    """Lets rows know of the steps of whichever optimizer holds their parameter."""
    # An interrupt in between leaves a hook that finds no step, and both are registered later.
    register_optimizer_step_post_hook(_after_step)
    register_optimizer_step_pre_hook(_before_step)


class OptimizerStep:
    """One call of an optimizer's step() with rows, which runs in `frame` of this thread."""

    def __init__(self, rows: list[TrainedRows], frame: FrameType) -> None:
        self.done = False  # one assignment for all tables of the call
        self.paused = False
        self.is_idle = False
        self._rows = rows
        # The frame may be the last to keep a weight alive, and is cleared before rows are shown.
        self._weights = [weakref.ref(each.parameter) for each in rows]
        self._frame: FrameType | None = frame
        self._thread = threading.get_ident()
        self._lent: Callable[[], object] = lambda: None
        """Takes back what was lent to the optimizer for this step."""

    def enter(self, optimizer: Optimizer, *, looks_up: bool = False) -> None:
        """From here on the optimizer's own code sees the held rows.

        With `looks_up` a closure of the user, with lookups of the step, is still to come.
        """
        # All at once: a thread that has the turn of some rows may wait for the end of this call.
        with as_plain(), Turns(*[rows.turn for rows in self._rows]):
            for rows in self._rows:
                rows.exchange.check_threads()
                _check(optimizer, rows)
                if not looks_up:
                    rows.exchange.check_lookups()
            _check_capture(optimizer, self._rows)
            self._lent()
            self._lent = _let_skip(optimizer, self._rows)
            self.is_idle = _is_idle(optimizer)
            for rows in self._rows:
                rows.exchange.before_optimizer(self)
            self.paused = False
            for rows in self._rows:
                hide_rows(rows.parameter)
                if isinstance(state := rows.state, AttachedState):
                    state.begin_step()

    def by_user(self, optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        """A closure, which is the user's code within the optimizer's."""

        def called(*args: Any, **kwargs: Any) -> Any:
            self.paused = True
            self.show()
            result = closure(*args, **kwargs)
            self.enter(optimizer)
            return result

        return called

    def finish(self) -> None:
        """The optimizer has stepped all rows."""
        self.done = True
        self._frame = None
        self._lent()
        self.show()
        with as_plain():
            for rows in self._rows:
                with rows.turn:
                    rows.exchange.after_optimizer()
                if isinstance(state := rows.state, AttachedState):
                    state.after_step()

    def leave(self) -> bool:
        """See OptimizerCall."""
        # Where torch's step() has not been left, another hook is the next one in.
        if self._is_within():
            return False
        self._lent()
        self.show()
        self._frame, self._rows = None, []
        return True

    def runs_elsewhere(self) -> bool:
        """See OptimizerCall."""
        if self.done or self.paused or self._thread == threading.get_ident():
            return False
        return self._is_within()

    def _is_within(self) -> bool:
        """Whether step() has not been left, in whichever thread.

        A look at that thread's stack would miss it at times: a generator on its top that yields
        meanwhile refers to no caller.
        """
        if self._frame is None:
            return False
        try:
            self._frame.clear()  # which Python refuses for a frame that runs
        except RuntimeError:
            return True
        return False

    def show(self) -> None:
        """See OptimizerCall."""
        # Of no rows once it has been left.
        for rows, weight in zip(self._rows, self._weights, strict=False):
            if (parameter := weight()) is not None:
                show_rows(parameter, rows)


class _Steps(threading.local):
    """The step that each optimizer is in, or was left in by an exception, in this thread."""

    def __init__(self) -> None:
        self.of: weakref.WeakKeyDictionary[Optimizer, OptimizerStep] = weakref.WeakKeyDictionary()


_steps = _Steps()


@not_compiled
@in_timeline("speedtorch::before_step")
def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if len(_steps.of):  # as a rule there is none, and to list none takes microseconds
        for left in list(_steps.of.values()):
            left.leave()
    if not (rows := rows_held_by(optimizer)) or is_wrapper(optimizer):
        return None
    frame = sys._getframe()
    while frame.f_globals["__name__"] != Optimizer.__module__:
        # Torch's step() called this: functions of its compiler may stand in between.
        assert frame.f_back is not None
        frame = frame.f_back
    step = _steps.of[optimizer] = OptimizerStep(rows, frame)
    has_closure = (len(args) > 1 and callable(args[1])) or callable(kwargs.get("closure"))
    step.enter(optimizer, looks_up=has_closure)
    if len(args) > 1 and callable(args[1]):
        return (args[0], step.by_user(optimizer, args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": step.by_user(optimizer, kwargs["closure"])}
    return None


@not_compiled
@in_timeline("speedtorch::after_step")
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if (step := _steps.of.pop(optimizer, None)) is not None:
        step.finish()


def _check_capture(optimizer: Optimizer, rows: list[TrainedRows]) -> None:
    """Raises RuntimeError for an optimizer whose step a CUDA graph would not repeat."""
    if not rows[0].parameter.is_cuda or not torch.cuda.is_current_stream_capturing():
        return
    numbers = [group for group in optimizer.param_groups if not group.get("capturable")]
    if numbers and type(optimizer) is not torch.optim.SGD:
        raise RuntimeError(
            f"{type(optimizer).__name__}: a CUDA graph would repeat this very step of it: build it"
            " with capturable=True (Adam, AdamW, NAdam, RAdam, Adamax, Rprop, RMSprop, ASGD,"
            " Adadelta, speedtorch.optim.RowWiseAdagrad), or use SGD"
        )


def _is_idle(optimizer: Optimizer) -> bool:
    """Whether every learning rate is 0. A rate on a GPU counts as not 0: reading it would wait."""
    for group in optimizer.param_groups:
        rate = group.get("lr", 1)
        if (isinstance(rate, torch.Tensor) and not rate.is_cpu) or rate != 0:
            return False
    return True


def _let_skip(optimizer: Optimizer, rows: list[TrainedRows]) -> Callable[[], object]:
    """Lets a fused optimizer skip its step if rows of it wait for an error to be raised.

    As a GradScaler lets it skip one with infinite gradients. Gives what undoes it.
    """
    halted = [flag for each in rows if (flag := each.exchange.halted) is not None]
    if not halted or not can_skip(optimizer):
        return lambda: None
    before = vars(optimizer).get(FOUND_INF)
    found = (halted[0] if len(halted) == 1 else torch.cat(halted).amax()).float().reshape(())
    if before is not None:
        found = torch.maximum(found, before.reshape(()).to(found.device))
    setattr(optimizer, FOUND_INF, found)

    def undo() -> None:
        if before is not None:
            setattr(optimizer, FOUND_INF, before)
        else:
            vars(optimizer).pop(FOUND_INF, None)

    return undo


_stateless: weakref.WeakKeyDictionary[Optimizer, dict[int, dict[str, Any]]]
_stateless = weakref.WeakKeyDictionary()
"""The settings with which an optimizer is known to keep nothing, by its parameters' id()."""


def _check(optimizer: Optimizer, rows: TrainedRows) -> None:
    """Raises unless the optimizer may step the rows: nothing has been stepped then."""
    state, parameter = state_of(rows), rows.parameter
    if state is not None:
        if state.optimizer() is not optimizer:
            raise ValueError(
                f"{rows.name} is attached to another optimizer than this"
                f" {type(optimizer).__name__}: detach that first"
            )
        state.before_step(optimizer)
        return
    known = _stateless.setdefault(optimizer, {})
    before, group = known.get(id(parameter)), group_of(optimizer, parameter)
    if before is not None:  # as a rule none has changed
        for name in optimizer.defaults:
            if group.get(name) is not before.get(name) and name != "lr":
                break
        else:
            return
    settings = settings_of(optimizer, parameter)
    settings.pop("lr", None)
    if before == settings:
        return
    if kept := probe_optimizer(optimizer, parameter).row_state:
        raise RuntimeError(
            f"{type(optimizer).__name__} keeps {', '.join(kept)} of each row of {rows.name}, whose"
            " rows come and go: call speedtorch.attach(optimizer, model) once before the first"
            " step; nothing was stepped"
        )
    known[id(parameter)] = settings
