"""The loop that trains a skip-gram model, whichever embeddings it has."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from speedtorch.demo.pairs import Batch, PairStream
from speedtorch.demo.plain import RowOptimizer
from speedtorch.demo.skipgram import SkipGram
from speedtorch.ops import synchronize
from speedtorch.prefetch import prefetch

__all__ = ["Outcome", "train"]

# The loss is read, which waits for the GPU, and the bar moves once in so many steps.
_STEPS_PER_REPORT = 25
# The learning rate falls in a straight line to this share of its start, as in word2vec.
_LAST_RATE = 0.01


@dataclass
class Outcome:
    """What a training run did.

    Attributes:
        steps: batches trained on.
        pairs: pairs of words in them.
        words: words of the text gone through, before dropping.
        seconds: wall-clock time of the loop.
        losses: mean loss per pair over each 25 steps; the last may cover fewer.
        finished: False if it was stopped early.
    """

    steps: int = 0
    pairs: int = 0
    words: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    finished: bool = False


def train(
    model: SkipGram,
    optimizer: torch.optim.Optimizer | RowOptimizer,
    stream: PairStream,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    ahead: bool = True,
    stop: Callable[[], bool] = lambda: False,
    label: str | None = None,
) -> Outcome:
    """Trains until the limit, or until `stop` says so; a step is never left half done.

    Args:
        model: its device does the work.
        optimizer: of the model's parameters, attached to it if it keeps state; its learning rate
            falls as training goes on.
        stream: gives the batches.
        epochs: passes over the text; the limit if `steps` is None.
        steps: batches.
        ahead: bring the next batch's rows during a step; not with torch's embeddings.
        stop: asked after each step.
        label: shows a progress bar of this name, with loss and words per second.

    Returns:
        What was done.

    Raises:
        ValueError: neither limit is given, the text gives no pairs, or the loss grows beyond all
            numbers.
    """
    if epochs is None and steps is None:
        raise ValueError("train needs a limit: epochs or steps")
    device = model.device
    batches = (b.to(device) for b in stream.batches(epochs=None if steps else epochs, steps=steps))
    loader: Iterable[Batch] = prefetch(batches, model, ids=model.ids) if ahead else batches
    rates: list[Any] = [group["lr"] for group in optimizer.param_groups]
    outcome = Outcome()
    recent, recent_pairs = torch.zeros((), device=device), 0
    layout = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
    begin = time.perf_counter()
    with tqdm(total=1.0, desc=label, disable=label is None, bar_format=layout) as bar:

        def report(done: float) -> None:
            nonlocal recent, recent_pairs
            outcome.losses.append(recent.item() / recent_pairs)
            if not math.isfinite(outcome.losses[-1]):
                raise ValueError(
                    f"the loss is {outcome.losses[-1]} after {outcome.steps} steps: choose a "
                    f"learning rate below {rates[0]:g}"
                )
            recent, recent_pairs = torch.zeros_like(recent), 0
            speed = outcome.words / (time.perf_counter() - begin)
            bar.set_postfix_str(f"loss {outcome.losses[-1]:.3f}, {speed:,.0f} words/s", False)
            bar.update(done - bar.n)

        done = 0.0
        for batch in loader:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * max(_LAST_RATE, 1 - done)
            recent += _step(model, optimizer, batch)
            recent_pairs += len(batch)
            outcome.steps += 1
            outcome.pairs += len(batch)
            outcome.words = round(batch.progress * stream.words)
            done = outcome.steps / steps if steps else batch.progress / (epochs or 1)
            if outcome.steps % _STEPS_PER_REPORT == 0:
                report(done)
            if stop():
                break
        else:
            outcome.finished = True
        if recent_pairs:
            report(done)
    synchronize(device)
    outcome.seconds = time.perf_counter() - begin
    return outcome


def _step(model: SkipGram, optimizer: torch.optim.Optimizer | RowOptimizer, batch: Batch) -> Tensor:
    """One training step; returns the detached loss."""
    optimizer.zero_grad()
    loss: Tensor = model(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()
