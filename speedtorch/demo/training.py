"""The loop that trains a skip-gram model, whichever embeddings it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speedtorch.demo import loop
from speedtorch.demo.pairs import Batch, PairStream
from speedtorch.demo.plain import RowOptimizer
from speedtorch.demo.skipgram import SkipGram
from speedtorch.nn.prefetch import prefetch

__all__ = ["Outcome", "train"]

# The learning rate falls in a straight line to this share of its start, as in word2vec.
_LAST_RATE = 0.01


@dataclass
class Outcome(loop.Outcome):
    """What a training run did.

    Attributes:
        pairs: pairs of words in its batches.
        words: words of the text gone through, before dropping.
    """

    pairs: int = 0
    words: int = 0


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
    part = (lambda trained, _: trained / steps) if steps else (lambda _, read: read / (epochs or 1))
    trained = _Steps(model, optimizer, stream.words, part)
    loop.run_steps(
        trained,
        loader,
        trained.outcome,
        device=device,
        rate=trained.rates[0],
        total=1.0,
        stop=stop,
        label=label,
    )
    return trained.outcome


class _Steps:
    """Steps with a falling rate; `part` of the whole is done after so many steps and passes."""

    def __init__(
        self,
        model: SkipGram,
        optimizer: torch.optim.Optimizer | RowOptimizer,
        words: int,
        part: Callable[[int, float], float],
    ) -> None:
        self._model, self._optimizer, self._words, self._part = model, optimizer, words, part
        self._progress = 0.0
        self.rates: list[Any] = [group["lr"] for group in optimizer.param_groups]
        self.outcome = Outcome()

    def step(self, batch: Batch) -> tuple[Tensor, int]:
        share = max(_LAST_RATE, 1 - self.done())
        for group, rate in zip(self._optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * share
        loss = loop.take_step(self._optimizer, lambda: self._model(batch))
        self._progress = batch.progress
        self.outcome.pairs += len(batch)
        self.outcome.words = round(batch.progress * self._words)
        return loss, len(batch)

    def done(self) -> float:
        return self._part(self.outcome.steps, self._progress)

    def speed(self, seconds: float) -> str:
        return f"{self.outcome.words / seconds:,.0f} words/s"
