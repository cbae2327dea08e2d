"""Training steps that follow each other, as in a loop, and their times."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from torch import nn, optim

import speedtorch
from benchmarks.harness import WARM_UPS, Figure, event, figure_of, synchronize, take_turn
from speedtorch.nn.row_module import RowModule
from speedtorch.step.hot_rows import BYTES_OF_SLOT

Loader: TypeAlias = Callable[[Sequence[Any]], Iterable[Any]]
Loop: TypeAlias = Callable[[Sequence[Any]], Iterable[object]]
"""Trains batch after batch and yields after each step."""


def prefetched(module: nn.Module, ids: Callable[[Any], Any] = lambda batch: batch) -> Loader:
    """A loader of batches whose rows come before them."""
    return lambda batches: speedtorch.prefetch(batches, module, ids=ids)


def cache_share(model: nn.Module, share: float) -> None:
    """Gives the rows of a model a cache that has room for a share of them."""
    tables = [each.table for each in model.modules() if isinstance(each, RowModule)]
    nbytes = sum(int(share * each.rows) * (each.record_bytes + BYTES_OF_SLOT) for each in tables)
    speedtorch.cache(model, nbytes)


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


def graph_loop(graph: Any, ids: Callable[[Any], Any] | None = None) -> Loop:
    """Trains on batch after batch with a graphed step; `ids` names the next batch's rows to it."""

    def loop(batches: Sequence[Any]) -> Iterator[object]:
        for batch, following in zip(batches, [*batches[1:], batches[0]], strict=True):
            yield graph(batch) if ids is None else graph(batch, next_ids=ids(following))

    return loop


def step_figure(
    section: str, name: str, loop: Loop, batches: Sequence[Any], **parameters: Any
) -> Figure:
    """Times a step from the end of the one before; batches are used once, the first warm up.

    Whatever a loop prepares for a later step counts as well.
    """
    take_turn()
    ends = []
    for _ in loop(batches):
        ends.append(event())
        ends[-1].record()
    synchronize()
    times = [before.elapsed_time(after) for before, after in itertools.pairwise(ends)]
    return figure_of(section, name, times[WARM_UPS:], **parameters)
