"""Hooks that make an optimizer's own step function work on the step's rows.

The own step function of an optimizer is the innermost step() in its chain of super().step() calls.
While this function runs, groups have the parameter with the step's rows instead of the weight, and
the state has the state of these rows. In user hooks, closures and code before or after
super().step(), groups have the weight, and the state has the state of all rows.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, wraps
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from speedtorch.optim.attached_state import AttachedState, state_of
from speedtorch.optim.optimizer_copy import OptimizerCopy, own_steps, settings_of
from speedtorch.optim.probe import kept_random, probe_optimizer
from speedtorch.optim.wrappers import is_wrapper
from speedtorch.step.disagreement import DisagreementError
from speedtorch.step.row_lock import RowLocks
from speedtorch.step.row_weight import RowWeight
from speedtorch.step.stepping import places_of_weights, stepping
from speedtorch.step.timeline import in_timeline
from speedtorch.step.trained_rows import TrainedRows, rows_of_optimizer
from speedtorch.torch_internals import (
    FOUND_INF,
    as_plain,
    can_skip,
    never_compiled,
    not_compiled,
    replace_step,
    step_functions,
)

__all__ = ["find_own_step", "watch_steps"]


@cache
def watch_steps() -> None:
    """Registers the hooks for all optimizers of this process; later calls do nothing."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


class _Found(NamedTuple):
    """The Embedding weights that an optimizer holds, as an immutable value."""

    weights: Sequence[RowWeight] = ()
    places: Sequence[tuple[list[Any], int]] = ()
    """The place of each weight: the group's parameter list, and the index."""
    groups: Sequence[int] = ()
    """The group number of each weight."""
    references: Sequence[object] = ()
    """For each weight, the reference with which its rows refer to it."""
    lists: Sequence[tuple[list[Any], int]] = ()
    """The parameter list of each group, and its length."""


class _OptimizerCache:
    """Cached facts of an optimizer, so that a step need not search all its parameters.

    Attributes:
        running: The last call of the own step function, in any thread, until the call ends.
        stateless: Settings with which the optimizer keeps no per-row state, by id() of the weight.
        found: The weights, as of the last search.
        probed: The weights of `found`, by id(), that were checked before the rows were locked.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.running: OptimizerStep | None = None
        self.stateless: dict[int, dict[str, Any]] = {}
        self.found = _Found()
        self.probed: set[int] = set()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Becomes None in copies and pickles of an optimizer, which then need no speedtorch."""
        return type(None), ()

    @property
    def weights(self) -> Sequence[RowWeight]:
        """The Embedding weights that the optimizer holds."""
        return self.found.weights

    def find_weights(self, optimizer: Optimizer) -> bool:
        """Finds the weights again if the parameter lists changed. Returns whether any exist."""
        if not self._is_as_before(optimizer):
            places = places_of_weights(optimizer)
            weights = [held[place] for held, place in places]
            # A step in another thread may have replaced some weights.
            for at, weight in zip(self.found.places, self.found.weights, strict=True):
                if _is_replaced(at, weight):
                    places.append(at)
                    weights.append(weight)
            lists = [group["params"] for group in optimizer.param_groups]
            numbers = {id(params): number for number, params in enumerate(lists)}
            self.probed = set()
            self.found = _Found(
                weights,
                places,
                [numbers[id(held)] for held, _ in places],
                [weight._rows._weight for weight in weights],
                [(params, len(params)) for params in lists],
            )
        return bool(self.found.places)

    def _is_as_before(self, optimizer: Optimizer) -> bool:
        groups, found = optimizer.param_groups, self.found
        if len(groups) != len(found.lists):
            return False
        for group, (held, count) in zip(groups, found.lists, strict=True):
            if group["params"] is not held or len(held) != count:
                return False
        for at, weight, known in zip(found.places, found.weights, found.references, strict=True):
            is_there = at[0][at[1]] is weight or _is_replaced(at, weight)
            if not is_there or weight._rows._weight is not known:
                return False
        return True

    def forget(self) -> None:
        """Makes the next step search all parameters again."""
        self.found = self.found._replace(lists=())


def _is_replaced(at: tuple[list[Any], int], weight: RowWeight) -> bool:
    """Whether a weight is replaced with the step's rows, as within an optimizer's step."""
    held, place = at
    return place < len(held) and held[place] is weight._rows.parameter


_CACHE = "_speedtorch"
"""The optimizer's attribute that holds its _OptimizerCache. A weak-key dictionary would never
release the optimizer, because an OptimizerStep that an exception left refers to it."""


def _cache_of(optimizer: Optimizer) -> _OptimizerCache:
    cache: _OptimizerCache = vars(optimizer).get(_CACHE) or _OptimizerCache(optimizer)
    if (other := cache.optimizer()) is not optimizer:  # copied with the other's attributes
        stateless = cache.stateless if type(other) is type(optimizer) else {}
        cache = _OptimizerCache(optimizer)
        cache.stateless = dict(stateless)
    vars(optimizer)[_CACHE] = cache
    return cache


class OptimizerStep:
    """A call of an optimizer's own step function in this thread.

    `frame` is the function's frame. `is_traced` is True if a compiler traces the call.
    """

    def __init__(
        self, optimizer: Optimizer, cache: _OptimizerCache, frame: FrameType, *, is_traced: bool
    ) -> None:
        self.done = False  # shared by all tables: one assignment marks all of them as stepped
        self.paused = False
        self.optimizer, self._is_traced = optimizer, is_traced
        self._frame: FrameType | None = frame
        self._found = cache.found
        self._rows: list[TrainedRows] = [weight._rows for weight in cache.found.weights]
        self._stateless, self._probed = cache.stateless, cache.probed
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._lent: Callable[[], object] = lambda: None
        """Restores the optimizer's found_inf after this step."""

    @in_timeline("speedtorch::before_step")
    def enter(self, *, looks_up: bool = False) -> None:
        """Replaces the weights with the step's rows, before the optimizer's own code runs.

        `looks_up` is True if the user's closure will still look up rows of this step.
        """
        optimizer = self.optimizer
        were_checked = not looks_up and self._agree()
        if not were_checked and len(self._probed) < len(self._rows):
            self._probe()
        # Locks all tables together: a thread that has one table's lock may wait for this call.
        with as_plain(), RowLocks(*[rows.lock for rows in self._rows]):
            for rows in self._rows:
                rows.exchange.stepping.check_threads()
            if not were_checked:
                self._check(looks_up=looks_up)
            self._lent()
            self._lent = _let_skip(optimizer, self._rows)
            for rows in self._rows:
                rows.exchange.before_optimizer(self)
            self.paused = False
            states = optimizer.state
            for rows, weight, (held, place) in self._tables():
                if isinstance(state := rows.parameter_view.attached.state, AttachedState):
                    state.begin_step(rows, weight)
                if weight in states:  # remains there, so that the order of the state is kept
                    states[rows.parameter] = states[weight]
                    if self._is_traced:  # torch's compiler reads the whole state
                        del states[weight]
                held[place] = rows.parameter

    @property
    def is_idle(self) -> bool:
        """See OptimizerCall. A rate on a GPU counts as not 0, because reading it would wait."""
        for group in self.optimizer.param_groups:
            rate = group.get("lr", 1)
            if (isinstance(rate, torch.Tensor) and not rate.is_cpu) or rate != 0:
                return False
        return True

    def _probe(self) -> None:
        """Checks rows without attached state before their first step; raises errors of _check().

        This thread holds no lock: a probe runs the optimizer's own code, which may wait for a
        thread that uses the rows.
        """
        groups = self.optimizer.param_groups
        for (rows, weight, _), number in zip(self._tables(), self._found.groups, strict=True):
            if not isinstance(rows.state, AttachedState):
                with as_plain():
                    _check(self.optimizer, rows, weight, groups[number], self._stateless)
            self._probed.add(id(weight))

    def _check(self, *, looks_up: bool) -> None:
        """Raises an error if the optimizer cannot step the rows. The caller has their locks."""
        groups = self.optimizer.param_groups
        for (rows, weight, _), number in zip(self._tables(), self._found.groups, strict=True):
            _check(self.optimizer, rows, weight, groups[number], self._stateless)
            if not looks_up:
                rows.exchange.steps.check_lookups()
        _check_capture(self.optimizer, self._rows)

    def _agree(self) -> bool:
        """Agrees with the other ranks to step, before a rank changes a row.

        Returns whether ranks share rows. Raises this rank's own error after the report to the other
        ranks. This rank holds no lock while it waits for other ranks.
        """
        if not (agree := [a for rows in self._rows if (a := rows.exchange.steps.agree_on_step)]):
            return False
        met: set[object] = set()
        try:
            if len(self._probed) < len(self._rows):
                self._probe()
            with as_plain(), RowLocks(*[rows.lock for rows in self._rows]):
                for rows in self._rows:
                    rows.exchange.stepping.check_threads()
                self._check(looks_up=False)
        except Exception:
            with suppress(DisagreementError):  # the caller raises this rank's own error
                for report in agree:
                    report(met, fails=True)
            raise
        for report in agree:
            report(met, fails=False)
        return True

    def by_user(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a closure, so that groups and state have the weights while it runs."""

        def with_weights(*args: Any, **kwargs: Any) -> Any:
            """Runs the closure between two parts of the step."""
            self.paused = True
            self._restore()
            result = closure(*args, **kwargs)
            self.enter()
            return result

        return with_weights

    @in_timeline("speedtorch::after_step")
    def finish(self) -> None:
        """Marks all rows as stepped, after the own step function has returned."""
        self.done = True
        stepped = [*zip(self._rows, self._found.weights, strict=True)]
        self.stop()
        with as_plain():
            for rows, weight in stepped:
                with rows.lock:
                    rows.exchange.stepping.after()
                if isinstance(state := rows.parameter_view.attached.state, AttachedState):
                    state.after_step(self.optimizer.state.get(weight, {}))

    def stop(self) -> None:
        """Restores the weights after the own step function, also after an exception."""
        if self._rows:
            self._lent()
            self._restore()
            # The rows may refer to an interrupted call for a while: drop references to them here.
            self._frame, self._rows, self._found = None, [], _Found()

    def clean_up(self) -> bool:
        """See OptimizerCall."""
        if self._is_within():
            return False
        self.stop()
        return True

    def wait(self) -> None:
        """Waits for the end of a call in another thread; see SteppedRows.await_step()."""
        for rows in list(self._rows):
            rows.exchange.stepping.await_step()

    def runs_elsewhere(self) -> bool:
        """See OptimizerCall."""
        if self.done or self.paused or self._thread == threading.get_ident():
            return False
        return self._is_within()

    def _is_within(self) -> bool:
        """Whether the own step function still runs, in any thread.

        An interrupt may end the function before stop(). The thread's stack is no reliable test: a
        generator on top that yields meanwhile has no reference to its caller. In a forked child,
        only the thread that forked still runs, as the main thread.
        """
        if self._frame is None:
            return False
        if self._process != os.getpid() and self._thread != threading.main_thread().ident:
            return False
        try:
            self._frame.clear()  # raises RuntimeError for a running frame
        except RuntimeError:
            return True
        return False

    def _tables(self) -> Iterable[tuple[TrainedRows, RowWeight, tuple[list[Any], int]]]:
        return zip(self._rows, self._found.weights, self._found.places, strict=True)

    def _restore(self) -> None:
        """Restores the weights in groups and state; can be repeated."""
        states = self.optimizer.state
        for rows, weight, (held, place) in self._tables():
            if isinstance(state := rows.parameter_view.attached.state, AttachedState):
                state.end_step(rows, weight)
            if place < len(held) and held[place] is rows.parameter:
                held[place] = weight
            if (entries := states.get(rows.parameter)) is not None:
                states[weight] = entries
                states.pop(rows.parameter, None)  # another thread may restore it, too


class _Steps(threading.local):
    """The running steps of this thread, and steps that an exception ended before stop()."""

    def __init__(self) -> None:
        self.calls: list[weakref.ref[OptimizerStep]] = []
        self.tried: tuple[Optimizer, list[Callable[..., Any]]] | None = None
        """The step functions that a test run in find_own_step() has called; None outside of it."""


_steps = _Steps()


def _end(call: OptimizerStep) -> None:
    """Stops a call and forgets it."""
    call.stop()
    _forget(call)


def _forget(call: OptimizerStep) -> None:
    """Forgets an ended call, so that the optimizer's next step does not wait for it."""
    _steps.calls[:] = [known for known in _steps.calls if known() not in (None, call)]
    if (cache := _cache_of(call.optimizer)).running is call:
        cache.running = None


@not_compiled
def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for reference in [*_steps.calls]:
        if (call := reference()) is not None and call.clean_up():
            _forget(call)
    cache = _cache_of(optimizer)
    has_weights = cache.find_weights(optimizer)  # hooks may read gradients of the weights
    stepping.begin(optimizer, cache)
    if has_weights and type(optimizer) not in own_steps and not is_wrapper(optimizer):
        find_own_step(optimizer, cache.weights[0]._rows)


@not_compiled
def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    stepping.end()


def find_own_step(optimizer: Optimizer, rows: TrainedRows) -> None:
    """Finds the own step function of an optimizer's class and makes it work on the step's rows."""
    kind = type(optimizer)
    if kind in own_steps:
        return
    own = [replace_step(owner, _entered) for owner in step_functions(kind)]
    if len(own) > 1:  # a test run finds the innermost by super().step()
        # On the rows' device: Adam's capturable=True and a tensor as the lr exclude the CPU.
        values = rows.parameter.new_zeros((19, *rows.parameter.shape[1:]))
        tried: list[Callable[..., Any]] = []
        try:
            copied = OptimizerCopy(optimizer, rows.weight, values, {}, construct=False)
            _steps.tried = copied.optimizer, tried
            with kept_random(values.device):
                copied.step(torch.zeros_like(values), sparse=False)
        except Exception as error:
            if len(tried) < 2:
                raise NotImplementedError(
                    f"{kind.__name__}: a trial of its step() on a small parameter failed ({error})."
                    " Therefore it is unknown whether step() calls super().step(). Derive the class"
                    " directly from torch.optim.Optimizer. Nothing was stepped."
                ) from error
        finally:
            _steps.tried = None
        own = [tried[-1]]
    own_steps[kind] = own[0]


def _entered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a step function to work on the step's rows if it is an optimizer's own one."""

    @wraps(function)
    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Runs the step function, with the step's rows if it is the optimizer's own one."""
        if torch.compiler.is_compiling():
            # torch.compile breaks its graph here, and compiled code has no exception handlers.
            call, args, kwargs = begin_outside(optimizer, args, kwargs, is_traced=True)
            result = function(optimizer, *args, **kwargs)
            end_outside(call)
            return result
        call, args, kwargs = begin(optimizer, args, kwargs)
        if call is None:
            return function(optimizer, *args, **kwargs)
        try:
            result = function(optimizer, *args, **kwargs)
            call.finish()
            return result
        finally:
            _end(call)

    def begin(
        optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], is_traced: bool = False
    ) -> tuple[OptimizerStep | None, tuple[Any, ...], dict[str, Any]]:
        """Enters a call; returns it, or None for another function, and the step's arguments."""
        if _steps.tried is not None and _steps.tried[0] is optimizer:  # it may step another
            _steps.tried[1].append(step)
        cache = _cache_of(optimizer)
        if cache.running is not None:
            cache.running.wait()  # a step in another thread has replaced the weights
        if not cache.find_weights(optimizer) or own_steps.get(type(optimizer)) is not step:
            return None, args, kwargs
        frame = sys._getframe(1)
        while frame.f_code.co_name != "step" or frame.f_code.co_filename != __file__:
            assert frame.f_back is not None  # torch's compiler adds frames
            frame = frame.f_back
        call = cache.running = OptimizerStep(optimizer, cache, frame, is_traced=is_traced)
        _steps.calls.append(weakref.ref(call))
        closures = [arg for arg in (*args[:1], kwargs.get("closure")) if callable(arg)]
        try:
            call.enter(looks_up=bool(closures))
        except BaseException:
            _end(call)
            raise
        if args and callable(args[0]):
            args = (call.by_user(args[0]), *args[1:])
        elif closures:
            kwargs = {**kwargs, "closure": call.by_user(closures[0])}
        return call, args, kwargs

    def finish(call: OptimizerStep | None) -> None:
        """Ends a traced call after its own step function."""
        if call is not None:
            call.finish()
            _end(call)

    reason = "the number of the step's rows changes from step to step"
    begin_outside, end_outside = never_compiled(begin, reason), never_compiled(finish, reason)
    return step


def _check_capture(optimizer: Optimizer, rows: list[TrainedRows]) -> None:
    """Raises RuntimeError in a graph capture unless the optimizer is capturable or is SGD."""
    if not rows[0].parameter.is_cuda or not torch.cuda.is_current_stream_capturing():
        return
    numbers = [group for group in optimizer.param_groups if not group.get("capturable")]
    if numbers and type(optimizer) is not torch.optim.SGD:
        raise RuntimeError(
            f"{type(optimizer).__name__}: a CUDA graph would repeat the numbers that step()"
            " computes on the host, such as the step count. Build the optimizer with"
            " capturable=True (Adam, AdamW, NAdam, RAdam, Adamax, Rprop, RMSprop, ASGD, Adadelta,"
            " speedtorch.optim.RowWiseAdagrad), or use SGD."
        )


def _let_skip(optimizer: Optimizer, rows: list[TrainedRows]) -> Callable[[], object]:
    """Makes a fused optimizer skip its step, by found_inf, if an error of its rows is pending.

    A GradScaler skips steps with infinite gradients in the same way. Returns the undo function.
    """
    halted = [flag for row in rows if (flag := row.exchange.memory.halted) is not None]
    if not halted or not can_skip(optimizer):
        return lambda: None
    before = vars(optimizer).get(FOUND_INF)
    found = (halted[0] if len(halted) == 1 else torch.cat(halted).amax()).float().reshape(())
    if before is not None:
        found = torch.maximum(found, before.reshape(()).to(found.device))
    setattr(optimizer, FOUND_INF, found)

    def undo() -> None:
        """Restores the previous found_inf."""
        if before is not None:
            setattr(optimizer, FOUND_INF, before)
        else:
            vars(optimizer).pop(FOUND_INF, None)

    return undo


def _check(
    optimizer: Optimizer,
    rows: TrainedRows,
    parameter: RowWeight,
    group: Mapping[str, Any],
    stateless: dict[int, dict[str, Any]],
) -> None:
    """Raises an error, before any step, if the optimizer must not step the rows.

    `group` has the parameter. `stateless` maps id() of a weight to the settings with which the
    optimizer keeps no per-row state.
    """
    if (state := state_of(rows)) is not None:
        if state.optimizer() is not optimizer:
            raise ValueError(
                f"{rows.name} is attached to another optimizer than this"
                f" {type(optimizer).__name__}. Call speedtorch.detach(other_optimizer) first."
            )
        state.before_step(optimizer, group)
        return
    if (before := stateless.get(id(parameter))) is not None:  # usually no setting has changed
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
        kept_of = f"{type(optimizer).__name__} keeps {', '.join(kept)} of each row of {rows.name}"
        attached = [state for held in rows_of_optimizer(optimizer) if (state := state_of(held))]
        if any(state.optimizer() is optimizer for state in attached):
            raise RuntimeError(
                f"{kept_of}, but only other tables are attached: attach() had no module with this"
                " table, or the table was added later. Nothing was stepped. Call"
                " speedtorch.attach(optimizer, model) again with a model that has this table. The"
                " state of the other tables does not change."
            )
        raise RuntimeError(
            f"{kept_of}, but is not attached. Call speedtorch.attach(optimizer, model) once, before"
            " step(). Nothing was stepped."
        )
    stateless[id(parameter)] = settings
