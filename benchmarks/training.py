"""Training steps that follow each other, as in a loop, and their times."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn, optim

import speedtorch
from benchmarks.harness import WARM_UPS, Figure, figure_of, synchronize
from benchmarks.sizes import DEVICE

__all__ = ["Loader", "Loop", "loop_of", "prefetched", "step_figure"]

Loader: TypeAlias = Callable[[Sequence[Any]], Iterable[Any]]
Loop: TypeAlias = Callable[[Sequence[Any]], Iterable[object]]
"""Trains batch after batch and yields after each step."""


def prefetched(module: nn.Module, ids: Callable[[Any], Any] = lambda batch: batch) -> Loader:
    """A loader of batches whose rows come before them."""
    return lambda batches: speedtorch.prefetch(batches, module, ids=ids)


def loop_of(
    optimizer: optim.Optimizer,
    backward: Callable[[Any], object],
    *,
    loader: Loader = iter,
    before: Callable[[Any], object] = lambda batch: None,
    after: Callable[[Any], object] = lambda batch: None,
) -> Loop:
    """Trains on batch after batch of a loader, with calls before and after each step."""

    def loop(batches: Sequence[Any]) -> Iterator[None]:
        for batch in loader(batches):
            before(batch)
            optimizer.zero_grad()
            backward(batch)
            optimizer.step()
            after(batch)
            yield

    return loop


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
    section: str, name: str, loop: Loop, batches: Sequence[Any], **parameters: Any
) -> Figure:
    """Times a step of a loop: the median over its batches, none used twice; the first warm up.

    Whatever a loop prepares for a later step counts as well.
    """
    return figure_of(section, name, list(_intervals_ms(loop, batches))[WARM_UPS:], **parameters)
