"""Whether a loop plans its batches ahead: where that does not pay, it hands them through."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch

from speedtorch.nn.row_module import RowModule

__all__ = ["AHEAD", "AT_ONCE", "Constant", "MeasuredPace", "Pace", "pace_of"]

_SETTLE = 4  # steps after a change, in which batches that were read before it are trained
_WINDOW = 8  # steps whose median counts
_GAIN = 0.98  # of the other way's time
_FIRST_WAIT, _MOST_WAIT = 128, 4096  # steps until the other way is tried again


Agree: TypeAlias = Callable[[float, bool], tuple[float, bool]]


class Pace(Protocol):
    """Decides whether the batches that a loop reads next are planned ahead."""

    @property
    def is_ahead(self) -> bool:
        """Whether they are."""

    @property
    def checks(self) -> bool:
        """Whether ids of batches that are handed through are to be checked."""

    def begin(self) -> None:
        """Called when a loop begins."""

    def note_step(self) -> None:
        """Called when the host is about to hand a batch over."""


class Constant(NamedTuple):
    """Always the same."""

    is_ahead: bool
    checks: bool = True

    def begin(self) -> None:
        """Nothing depends on it."""

    def note_step(self) -> None:
        """Nothing depends on it."""


AHEAD, AT_ONCE = Constant(is_ahead=True), Constant(is_ahead=False)


class MeasuredPace:
    """The faster of both ways on a GPU, by the host's time from step to step.

    Planning ahead hides the link behind the GPU's other work, for more of the host's. The other way
    is tried only if the GPU says that it may be faster: with batches ahead, if the GPU has nothing
    left to do when the host hands the next batch over; at once, if it has. (Before the host plans
    the next batch, the GPU always has the end of the step to do, also where it waits for the host.)
    After a trial in vain the next one waits twice as long.

    Args:
        device: The GPU.
        agree: Gives what counts for all ranks that share the rows, of the seconds of a step and
            whether the GPU was idle here; each of them calls it after as many steps.
    """

    checks = False  # on a GPU the lookups do that

    def __init__(self, device: torch.device, agree: Agree = lambda seconds, idle: (seconds, idle)):
        self.is_ahead = True
        self._device, self._agree = device, agree
        self._last = 0.0
        self._times: list[float] = []
        self._idle = 0
        self._left_out = 0
        """Steps that are not measured."""
        self._before: float | None = None
        """Within a trial, what a step takes in the other way."""
        self._steps = self._next_trial = 0
        self._wait = _FIRST_WAIT

    def begin(self) -> None:
        """See Pace; the decision of the loop before stays."""
        self._times.clear()
        self._idle, self._left_out = 0, _SETTLE
        if self._before is not None:  # that loop ended within a trial
            self._end_trial(is_better=False)

    def note_step(self) -> None:
        """See Pace."""
        now = time.perf_counter()
        self._last, seconds = now, now - self._last
        self._steps += 1
        if self._left_out:
            self._left_out -= 1
            return
        if self._before is None and self._steps + _WINDOW <= self._next_trial:
            return  # no trial may begin with this window
        self._times.append(seconds)
        self._idle += torch.cuda.current_stream(self._device).query()
        if len(self._times) == _WINDOW:
            median, is_idle = statistics.median(self._times), 2 * self._idle > _WINDOW
            self._times.clear()
            self._idle = 0
            median, is_idle = self._agree(median, is_idle)
            self._decide(median, is_idle=is_idle)

    def _decide(self, median: float, *, is_idle: bool) -> None:
        if self._before is not None:
            self._end_trial(is_better=median < _GAIN * self._before)
        elif is_idle == self.is_ahead and self._steps >= self._next_trial:
            self._before = median
            self._turn()

    def _end_trial(self, *, is_better: bool) -> None:
        self._before = None
        if not is_better:
            self._turn()
        self._wait = _FIRST_WAIT if is_better else min(2 * self._wait, _MOST_WAIT)
        self._next_trial = self._steps + self._wait

    def _turn(self) -> None:
        self.is_ahead, self._left_out = not self.is_ahead, _SETTLE


_measured: weakref.WeakKeyDictionary[RowModule, MeasuredPace] = weakref.WeakKeyDictionary()
"""By the first module of a loop, so that the next epoch goes on as the last one ended."""


def pace_of(modules: Sequence[RowModule]) -> Pace:
    """How a loop over batches of these modules goes; the same for all ranks that share rows out."""
    devices = {each.trained_rows.exchange.held.device for each in modules}
    if all(device.type == "cpu" for device in devices):  # there is no link to hide
        return AT_ONCE
    shared = [each.lookups for each in modules if each.lookups is not each.trained_rows]
    lookups = (shared or [modules[0].lookups])[0]
    if len(devices) > 1 or not lookups.can_agree:
        return AHEAD
    if (first := modules[0]) not in _measured:
        agree = weakref.WeakMethod(lookups.agree_on_pace)
        (device,) = devices
        _measured[first] = MeasuredPace(device, lambda *given: _called(agree)(*given))
    return _measured[first]


def _called(agree: Callable[[], Agree | None]) -> Agree:
    found = agree()
    assert found is not None  # the loop's module has it
    return found
