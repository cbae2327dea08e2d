"""The training loop of every demonstration: steps, their losses, and a progress bar."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from speedtorch.demo.plain import RowOptimizer
from speedtorch.demo.processes import ALONE, Processes
from speedtorch.nn.prefetch import prefetch
from speedtorch.ops.functions import synchronize

__all__ = ["STEPS_LAYOUT", "Model", "Optimizer", "Outcome", "train"]

Optimizer = torch.optim.Optimizer | RowOptimizer

STEPS_LAYOUT = "{l_bar}{bar}| {n_fmt}/{total_fmt} steps, {elapsed}<{remaining}{postfix}"
"""Of a progress bar that counts steps."""

# The loss is read, which waits for the GPU, and the bar moves once in so many steps.
_STEPS_PER_REPORT = 25


@dataclass
class Outcome:
    """What a training run did."""

    steps: int = 0
    seconds: float = 0.0
    """Wall-clock time of the loop."""
    losses: list[float] = field(default_factory=list)
    """Mean loss per example over each 25 steps; the last may cover fewer."""
    finished: bool = False
    """Whether it was not stopped early."""


class Model(nn.Module, ABC):
    """What the loop trains."""

    averages = False
    """Whether the loss is the mean of a batch's examples, not their sum."""

    @abstractmethod
    def ids(self, batch: Any) -> dict[nn.Module, Any]:
        """The ids that a batch looks up in each Embedding, for prefetch."""

    def loss(self, batch: Any) -> Tensor:
        """Of a batch, a scalar; of a share of one, what it adds to that of the whole."""
        value: Tensor = self(batch)
        return value


def _take_step(
    loss_of: Callable[[Any], Tensor], optimizer: Optimizer, batch: Any, size: int
) -> Tensor:
    """The detached loss; nothing else of a step is left when the next one begins.

    The losses of `size` processes add up to that of the batch; their gradients are averaged.
    """
    optimizer.zero_grad()
    loss = loss_of(batch)
    loss.backward(torch.full_like(loss, size))  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


def train(
    model: Model,
    optimizer: Optimizer,
    batches: Iterable[Any],
    outcome: Outcome,
    track: Callable[[Any], float],
    *,
    total: float,
    unit: str,
    last_rate: float = 1.0,
    ahead: bool = True,
    loss_of: Callable[[Any], Tensor] | None = None,
    processes: Processes = ALONE,
    stop: Callable[[], bool] = lambda: False,
    label: str | None = None,
    layout: str = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}",
) -> None:
    """Trains on all batches, or until `stop` says so; a step is never left half done.

    Args:
        model: its device does the work.
        optimizer: of the model's parameters, attached to it if it keeps state.
        batches: to train on; their `len` is their number of examples.
        outcome: gets what was done.
        track: called after each step with its batch, to count it; how much of `total` is done.
        total: where the progress bar ends.
        unit: what the outcome counts, for the speed.
        last_rate: to this share of its start the learning rate falls, in a straight line.
        ahead: bring the rows of the next batch during a step; not with torch's embeddings.
        loss_of: gives the loss of a batch; by default the model does.
        processes: that train together, each on its share of every batch.
        stop: asked after each step; one process that says so stops all.
        label: shows a progress bar of this name, with loss and speed; the first process does.
        layout: of the bar.

    Raises:
        ValueError: the loss grows beyond all numbers.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    done, recent, recent_examples = 0.0, torch.zeros(()), 0
    begin = time.perf_counter()
    # None: tqdm looks whether stderr is a terminal.
    hidden = True if label is None or not processes.is_first else None
    with tqdm(total=total, desc=label, disable=hidden, bar_format=layout) as bar:

        def report() -> None:
            nonlocal recent, recent_examples
            loss = processes.summed(recent.cpu().double()).item()
            outcome.losses.append(loss / recent_examples)
            if not math.isfinite(outcome.losses[-1]):
                raise ValueError(
                    f"the loss is {outcome.losses[-1]} after {outcome.steps} steps: choose a"
                    f" learning rate below {rates[0]:g}"
                )
            recent, recent_examples = torch.zeros(()), 0
            speed = getattr(outcome, unit) / (time.perf_counter() - begin)
            bar.set_postfix_str(f"loss {outcome.losses[-1]:.4f}, {speed:,.0f} {unit}/s", False)
            bar.update(done - bar.n)

        for batch in prefetch(batches, model, ids=model.ids) if ahead else batches:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * max(last_rate, 1 - done / total)
            loss = _take_step(loss_of or model.loss, optimizer, batch, processes.size)
            recent = recent + (loss * len(batch) if model.averages else loss)
            recent_examples += len(batch)
            outcome.steps += 1
            done = track(batch)
            if outcome.steps % _STEPS_PER_REPORT == 0:
                report()
            if processes.any(stop()):
                break
        else:
            outcome.finished = True
        if recent_examples:
            report()
    synchronize()
    outcome.seconds = time.perf_counter() - begin
