"""Pace: decides whether a loop over prefetch() plans batches ahead, or yields them without a plan.

A batch that is planned ahead has its unique rows computed, and loaded, before its step begins.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from speedtorch.layers.module_hook import weak_call
from speedtorch.nn.row_module import RowModule

__all__ = ["AHEAD", "AT_ONCE", "Constant", "MeasuredPace", "Pace", "pace_of"]

_SETTLE = 4  # steps after a change, which still train batches that were read before
_WINDOW = 8  # steps of a median
_GAIN = 0.98  # the largest ratio of step times that makes a trial succeed
_CLEAR = 1.1  # the ratio of step times from which on a trial is not repeated soon
_CLEAR_WAIT = 1024  # steps until it is repeated
_FIRST_WAIT, _MOST_WAIT = 128, 4096  # steps until the next trial
_SHORT = 3 * (_SETTLE + _WINDOW)  # steps of a loop that is too short for a whole trial
_OTHER_WORK = 2.0  # the ratio of step times at which a wait ends, because the steps are others


Agree: TypeAlias = Callable[[float], float]


class Constant(NamedTuple):
    """A pace that never changes."""

    is_ahead: bool
    """Whether the next batches are planned ahead."""
    checks: bool = True
    """Whether the loop checks the ids of batches that it yields without a plan."""

    def begin(self) -> None:
        """Called when a loop begins."""

    def note_step(self) -> None:
        """Called before the loop yields a batch."""


AHEAD, AT_ONCE = Constant(is_ahead=True), Constant(is_ahead=False)
"""AHEAD plans all batches ahead. AT_ONCE plans none: each lookup plans its own ids at once."""


class MeasuredPace:
    """Chooses the faster way on a GPU: to plan batches ahead, or not to plan.

    Planning ahead hides transfers over the link behind the GPU's other work, but costs host time.
    The loop tries the other way for some steps. The trial succeeds if the median time per step is
    more than 2 % below the medians before and after the trial. The second comparison excludes a
    loop's slow first steps. The next trial follows after 128 steps, or after 1,024 if the times
    differ by more than 10 %. After a failed trial the wait doubles, up to 4,096 steps. A wait ends
    early if the time per step has doubled or halved. A trial fails if its loop ends, except that
    the trial of a loop of fewer than 36 steps continues in the next loop.

    Args:
        agree: Receives this rank's median seconds per step, and returns those of the slowest rank
            that shares the rows. All ranks call this function after the same number of steps.
    """

    checks = False  # lookups on a GPU check ids

    def __init__(self, agree: Agree = lambda seconds: seconds):
        self.is_ahead = True
        self._agree = agree
        self._last = 0.0
        self._times: list[float] = []
        self._left_out = 0
        """The number of next steps that are not measured."""
        self._before: float | None = None
        """The median seconds before a trial, or None without a trial."""
        self._tried: float | None = None
        """The median seconds of a trial while the way before it is measured again."""
        self._usual = 0.0
        """The median seconds after the last trial."""
        self._waits = False
        """Whether no trial can begin at the end of the current window."""
        self._steps = self._next_trial = self._in_loop = 0
        self._wait = _FIRST_WAIT

    def begin(self) -> None:
        """See Constant. The decision of the previous loop remains."""
        is_short, self._in_loop = self._in_loop < _SHORT, 0
        self._times.clear()
        self._left_out = _SETTLE
        if self._before is not None and not is_short:  # the previous loop ended during a trial
            self._end_trial(self._before, switches=self._tried is None, wait=2 * self._wait)

    def note_step(self) -> None:
        """See Constant."""
        now = time.perf_counter()
        self._last, seconds = now, now - self._last
        self._steps += 1
        self._in_loop += 1
        if self._left_out:
            self._left_out -= 1
            return
        if not self._times:  # a window begins
            self._waits = self._before is None and self._steps + _WINDOW <= self._next_trial
        self._times.append(seconds)
        if len(self._times) == _WINDOW:
            median = self._agree(statistics.median(self._times))
            self._times.clear()
            if self._waits:
                self._notice_other_work(median)
            else:
                self._decide(median)

    def _notice_other_work(self, median: float) -> None:
        """Ends the wait for the next trial if the steps take much more or less time."""
        if not self._usual / _OTHER_WORK < median < self._usual * _OTHER_WORK:
            self._next_trial, self._wait, self._usual = self._steps, _FIRST_WAIT, median

    def _decide(self, median: float) -> None:
        if self._before is None:
            self._before = median
            self._switch()
        elif self._tried is not None:
            if self._tried < _GAIN * median:
                wait = _CLEAR_WAIT if self._tried * _CLEAR < median else _FIRST_WAIT
                self._end_trial(self._tried, switches=True, wait=wait)
            else:
                self._end_trial(median, switches=False, wait=2 * self._wait)
        elif median < _GAIN * self._before:
            self._tried = median
            self._switch()
        else:
            least = _CLEAR_WAIT if self._before * _CLEAR < median else 0
            self._end_trial(self._before, switches=True, wait=max(least, 2 * self._wait))

    def _end_trial(self, usual: float, *, switches: bool, wait: int) -> None:
        """Ends a trial; `usual` is the median of the way that the loop continues with."""
        self._before, self._tried, self._usual = None, None, usual
        if switches:
            self._switch()
        self._wait = min(wait, _MOST_WAIT)
        self._next_trial = self._steps + self._wait

    def _switch(self) -> None:
        self.is_ahead, self._left_out = not self.is_ahead, _SETTLE


Pace: TypeAlias = Constant | MeasuredPace
"""Decides whether a loop plans the next batches ahead."""

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
        _measured[first] = MeasuredPace(weak_call(lookups.agree_on_pace))
    return _measured[first]
