"""Times of training steps that follow each other, as in a loop."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.harness import WARM_UPS, Figure, synchronize
from benchmarks.sizes import DEVICE

__all__ = ["Loop", "step_figure"]

Loop = Callable[[Sequence[Any]], Iterable[object]]
"""Trains batch after batch and yields after each step."""


def _intervals_ms(loop: Loop, batches: Sequence[Any]) -> Iterator[float]:
    """From the end of each step to that of the next, on the GPU's clock where there is one."""
    synchronize()
    if DEVICE == "cpu":
        ends = [time.perf_counter() * 1e3]
        ends += [time.perf_counter() * 1e3 for _ in loop(batches)]
        yield from (after - before for before, after in itertools.pairwise(ends))
        return
    events = []
    for _ in loop(batches):
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
    torch.cuda.synchronize()
    for before, after in itertools.pairwise(events):
        yield float(before.elapsed_time(after))


def step_figure(
    section: str,
    name: str,
    loop: Loop,
    batches: Sequence[Any],
    *,
    nbytes: float = 0,
    **parameters: Any,
) -> Figure:
    """Times a step of a loop: the median over its batches, the first of which warm up.

    Args:
        section: which part of a benchmark this belongs to.
        name: what is measured.
        loop: trains the batches; whatever it prepares for a later step counts as well.
        batches: none used twice.
        nbytes: bytes that cross the link in a step.
        **parameters: what plots and tables look for.
    """
    times = list(_intervals_ms(loop, batches))[WARM_UPS:]
    median = statistics.median(times)
    rate = nbytes / median / 1e6
    return Figure(section, name, median, min(times), max(times), rate, None, parameters)
