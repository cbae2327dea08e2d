"""Pace: decides whether a loop over prefetch() plans batches ahead, or yields them without a plan.

A batch that is planned ahead has its unique rows computed, and loaded, before its step begins.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch

from speedtorch.nn.row_module import RowModule

__all__ = ["AHEAD", "AT_ONCE", "Constant", "MeasuredPace", "Pace", "pace_of"]

_SETTLE = 4  # steps after a change, which still train batches that were read before
_WINDOW = 8  # steps of a median
_GAIN = 0.98  # the largest ratio of step times that makes a trial succeed
_QUIET = 64  # steps from a window without a trial to the end of the next window
_FIRST_WAIT, _MOST_WAIT = 128, 4096  # steps until the next trial
_SHORT = 3 * (_SETTLE + _WINDOW)  # steps of a loop that is too short for a whole trial
_OTHER_WORK = 2.0  # the ratio of step times at which a wait ends, because the steps are others


Agree: TypeAlias = Callable[[float, bool], tuple[float, bool]]


class Pace(Protocol):
    """Decides whether a loop plans the next batches ahead."""

    @property
    def is_ahead(self) -> bool:
        """Whether the next batches are planned ahead."""

    @property
    def checks(self) -> bool:
        """Whether the loop checks the ids of batches that it yields without a plan."""

    def begin(self) -> None:
        """Called when a loop begins."""

    def note_step(self) -> None:
        """Called before the loop yields a batch."""


class Constant(NamedTuple):
    """A pace that never changes."""

    is_ahead: bool
    checks: bool = True

    def begin(self) -> None:
        """Does nothing."""

    def note_step(self) -> None:
        """Does nothing."""


AHEAD, AT_ONCE = Constant(is_ahead=True), Constant(is_ahead=False)
"""AHEAD plans all batches ahead. AT_ONCE plans none: each lookup plans its own ids at once."""


class MeasuredPace:
    """Chooses the faster way on a GPU: to plan batches ahead, or not to plan.

    Planning ahead hides transfers over the link behind the GPU's other work, but costs host time. A
    loop that plans tries the other way only if the GPU is idle in most steps, at the time when the
    loop yields a batch. A loop that does not plan tries planning only if the GPU is busy then. A
    trial succeeds if the host's median time per step is more than 2 % below the medians before and
    after the trial. The second comparison excludes a loop's slow first steps. After a failed trial,
    the wait until the next trial doubles, up to 4,096 steps. A wait ends early if the time per step
    has doubled or halved. If a window of steps leads to no trial, the next window ends 64 steps
    later, because queries of the GPU take host time. A trial fails if its loop ends, except that
    the trial of a loop of fewer than 36 steps continues in the next loop.

    The loop queries the GPU after it has planned the next batch. Before, the GPU would always be
    busy with the last kernels of the step, even if the host is slower than the GPU.

    Args:
        device: The GPU.
        agree: Receives this rank's median seconds per step, and whether its GPU was mostly idle.
            Returns the seconds of the slowest rank, and whether the GPUs of all ranks that share
            the rows were idle. All ranks call this function after the same number of steps.
    """

    checks = False  # lookups on a GPU check ids

    def __init__(self, device: torch.device, agree: Agree = lambda seconds, idle: (seconds, idle)):
        self.is_ahead = True
        self._device, self._agree = device, agree
        self._last = 0.0
        self._times: list[float] = []
        self._idle = 0
        self._left_out = 0
        """The number of next steps that are not measured."""
        self._before: float | None = None
        """The median seconds before a trial, or None without a trial."""
        self._tried: float | None = None
        """The median seconds of a trial while the way before it is measured again."""
        self._usual: float | None = None
        """The median seconds after the last trial; None before the first."""
        self._waits = False
        """Whether no trial can begin at the end of the current window."""
        self._steps = self._next_trial = self._in_loop = 0
        self._wait = _FIRST_WAIT

    def begin(self) -> None:
        """See Pace. The decision of the previous loop remains."""
        is_short, self._in_loop = self._in_loop < _SHORT, 0
        self._times.clear()
        self._idle, self._left_out = 0, _SETTLE
        if self._before is not None and not is_short:  # the previous loop ended during a trial
            self._end_trial(self._before, switches=self._tried is None, succeeds=False)

    def note_step(self) -> None:
        """See Pace."""
        now = time.perf_counter()
        self._last, seconds = now, now - self._last
        self._steps += 1
        self._in_loop += 1
        if self._left_out:
            self._left_out -= 1
            return
        if not self._times:  # a window begins
            self._waits = self._before is None and self._steps + _WINDOW <= self._next_trial
        if self._waits and self._usual is None:
            return
        self._times.append(seconds)
        if not self._waits:
            self._idle += torch.cuda.current_stream(self._device).query()
        if len(self._times) == _WINDOW:
            median, is_idle = statistics.median(self._times), 2 * self._idle > _WINDOW
            self._times.clear()
            self._idle = 0
            median, is_idle = self._agree(median, is_idle)
            if self._waits:
                self._notice_other_work(median)
            else:
                self._decide(median, is_idle=is_idle)

    def _notice_other_work(self, median: float) -> None:
        """Ends the wait for the next trial if the steps take much more or less time."""
        usual = self._usual
        if usual is not None and not usual / _OTHER_WORK < median < usual * _OTHER_WORK:
            self._next_trial, self._wait, self._usual = self._steps, _FIRST_WAIT, median

    def _decide(self, median: float, *, is_idle: bool) -> None:
        if self._before is None:
            if is_idle == self.is_ahead:
                self._before = median
                self._switch()
            else:
                self._next_trial = self._steps + _QUIET
        elif self._tried is not None:
            is_better = self._tried < _GAIN * median
            usual = self._tried if is_better else median
            self._end_trial(usual, switches=is_better, succeeds=is_better)
        elif median < _GAIN * self._before:
            self._tried = median
            self._switch()
        else:
            self._end_trial(self._before, switches=True, succeeds=False)

    def _end_trial(self, usual: float, *, switches: bool, succeeds: bool) -> None:
        """Ends a trial; `usual` is the median of the way that the loop continues with."""
        self._before, self._tried, self._usual = None, None, usual
        if switches:
            self._switch()
        self._wait = _FIRST_WAIT if succeeds else min(2 * self._wait, _MOST_WAIT)
        self._next_trial = self._steps + self._wait

    def _switch(self) -> None:
        self.is_ahead, self._left_out = not self.is_ahead, _SETTLE


_measured: weakref.WeakKeyDictionary[RowModule, MeasuredPace] = weakref.WeakKeyDictionary()
"""The pace by the first module of a loop, so that the next epoch continues with it."""


def pace_of(modules: Sequence[RowModule]) -> Pace:
    """Returns the pace of a loop over these modules, equal on all ranks that share the rows."""
    devices = {module.trained_rows.exchange.held.device for module in modules}
    if all(device.type == "cpu" for device in devices):  # no transfer to hide
        return AT_ONCE
    shared = [module.lookups for module in modules if module.lookups is not module.trained_rows]
    lookups = (shared or [modules[0].lookups])[0]
    if len(devices) > 1 or not lookups.can_agree:
        return AHEAD
    if (first := modules[0]) not in _measured:
        agree = weakref.WeakMethod(lookups.agree_on_pace)
        (device,) = devices
        _measured[first] = MeasuredPace(device, lambda *given: _alive(agree)(*given))
    return _measured[first]


def _alive(agree: Callable[[], Agree | None]) -> Agree:
    found = agree()
    assert found is not None  # the loop's module has it
    return found
