"""The training loop of the demonstrations: steps, losses and a progress bar."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from demos.batches import Batches, Outcome
from demos.plain import RowOptimizer
from demos.processes import SINGLE_PROCESS, Processes
from speedtorch.nn.prefetch import prefetch
from speedtorch.nn.row_module import RowModule
from speedtorch.ops.functions import synchronize

__all__ = ["Model", "Optimizer", "train"]

Optimizer = torch.optim.Optimizer | RowOptimizer

_LAYOUT = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
# Steps between two updates of the bar. An update reads the loss, which waits for the GPU.
_STEPS_PER_REPORT = 25


class Model(nn.Module):
    """The base of models that the loop trains."""

    averages = False
    """Whether the loss is the mean over a batch's examples instead of the sum."""

    def ids(self, batch: Any) -> dict[nn.Module, Any]:
        """The ids that a batch looks up in each Embedding, for speedtorch.prefetch."""
        raise NotImplementedError

    def embeddings(self) -> list[RowModule]:
        """The modules whose rows are in host memory."""
        return [module for module in self.modules() if isinstance(module, RowModule)]

    def prefetched(self, batches: Iterable[Any]) -> Iterable[Any]:
        """The batches; what a batch needs on the device is copied during the previous step."""
        return prefetch(batches, self, ids=self.ids)

    def draw_rows(self, seed: int) -> None:
        """Draws the initial rows in host memory, after an optimizer was attached."""

    def loss(self, batch: Any) -> Tensor:
        """The scalar loss of a batch, or the part of the batch's loss that a process computes."""
        value: Tensor = self(batch)
        return value


def _take_step(
    loss_of: Callable[[Any], Tensor], optimizer: Optimizer, batch: Any, size: int
) -> Tensor:
    """Trains one step and returns the detached loss, so that the graph is freed.

    The batch's loss is the sum over `size` processes, but the processes average gradients. The
    factor `size` in the backward pass compensates for this.
    """
    optimizer.zero_grad()
    loss = loss_of(batch)
    loss.backward(torch.full_like(loss, size))  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


def train(
    model: Model,
    optimizer: Optimizer,
    batches: Batches,
    *,
    unit: str = "examples",
    last_rate: float = 1.0,
    ahead: bool = True,
    loss_of: Callable[[Any], Tensor] | None = None,
    processes: Processes = SINGLE_PROCESS,
    stop: Callable[[], bool] = lambda: False,
    label: str | None = None,
) -> Outcome:
    """Trains on all batches, or until `stop()` returns True; the current step is completed first.

    Args:
        model: The model, on the device that trains.
        optimizer: The optimizer of the model's parameters, attached to the model if it has state.
        batches: The batches; `len(batch)` is the number of examples.
        unit: The unit of the speed: "steps", "words" or a name of the examples.
        last_rate: The learning rate falls linearly to this share of its initial value.
        ahead: Prefetch the rows of the next batch during a step. False for torch's embeddings.
        loss_of: Computes the loss of a batch; by default the model's loss().
        processes: The processes that train together, each on its part of every batch.
        stop: Called after each step. If it returns True in one process, all processes stop.
        label: Shows a progress bar with this name, the loss and the speed in the first process.

    Raises:
        ValueError: The loss is infinite or NaN.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    outcome = Outcome()
    done, recent, recent_examples = 0.0, torch.zeros(()), 0
    begin = time.perf_counter()
    # None: tqdm shows the bar only on a terminal.
    hidden = True if label is None or not processes.is_first else None
    with tqdm(total=1.0, desc=label, disable=hidden, bar_format=_LAYOUT) as bar:

        def report() -> None:
            """Records the mean loss since the last report and updates the bar."""
            nonlocal recent, recent_examples
            loss = processes.sum(recent.cpu().double()).item()
            outcome.losses.append(loss / recent_examples)
            if not math.isfinite(outcome.losses[-1]):
                raise ValueError(
                    f"the loss must be finite, got {outcome.losses[-1]} after {outcome.steps}"
                    f" steps. Choose a learning rate below {rates[0]:g}."
                )
            recent, recent_examples = torch.zeros(()), 0
            speed = getattr(outcome, unit, outcome.examples) / (time.perf_counter() - begin)
            bar.set_postfix_str(f"loss {outcome.losses[-1]:.4f}, {speed:,.0f} {unit}/s", False)
            bar.update(done - bar.n)

        for batch in model.prefetched(batches) if ahead else batches:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * max(last_rate, 1 - done)
            loss = _take_step(loss_of or model.loss, optimizer, batch, processes.size)
            recent = recent + (loss * len(batch) if model.averages else loss)
            recent_examples += len(batch)
            outcome.steps += 1
            outcome.examples += len(batch)
            done = batches.track(outcome, batch)
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
    return outcome
