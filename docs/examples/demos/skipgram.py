"""The skip-gram model with two speedtorch.Embedding or two torch.nn.Embedding modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from demos import loop
from demos.pairs import Batch, PairStream
from speedtorch.nn.embedding import Embedding

__all__ = ["SIDES", "Outcome", "SkipGram", "first_values", "train"]

# The learning rate falls to this share of its initial value, as in word2vec.
_LAST_RATE = 0.01

SIDES = ("u_embeddings", "v_embeddings")


class SkipGram(loop.Model):
    """Skip-gram with negative sampling: each word has one vector as a centre, one as a context.

    The two embeddings `[V, D]` are those of the centres and of the contexts.

    Example:
        >>> model = SkipGram(Embedding(1000, 8), Embedding(1000, 8))
        >>> first_values(model.u_embeddings, model.v_embeddings, seed=3)
        >>> word = torch.tensor([999])
        >>> round(model(Batch(word, word, word.view(1, 1), 1.0)).item(), 4)  # -2 log(1 / 2)
        1.3863
    """

    def __init__(
        self, u_embeddings: Embedding | nn.Embedding, v_embeddings: Embedding | nn.Embedding
    ) -> None:
        super().__init__()
        self.u_embeddings = u_embeddings
        self.v_embeddings = v_embeddings

    @property
    def device(self) -> torch.device:
        """The device that trains the rows of a batch."""
        return self.u_embeddings.weight.device

    def ids(self, batch: Batch) -> dict[nn.Module, Any]:
        """The ids that a batch looks up in each embedding, for speedtorch.prefetch."""
        return {
            self.u_embeddings: batch.centre,
            self.v_embeddings: (batch.context, batch.negative),
        }

    def forward(self, batch: Batch) -> Tensor:
        """Returns the sum of the losses, so that a row's step does not depend on the batch size."""
        word = self.u_embeddings(batch.centre)
        true = (word * self.v_embeddings(batch.context)).sum(1)
        false = torch.bmm(self.v_embeddings(batch.negative), word.unsqueeze(2))
        loss: Tensor = -functional.logsigmoid(true).sum() - functional.logsigmoid(-false).sum()
        return loss

    @torch.no_grad()
    def rows(self, side: str, ids: Tensor) -> Tensor:
        """Returns rows `[N, D]` of one of SIDES on the CPU, for ids `[N]` on the CPU."""
        found: Tensor = getattr(self, side)(ids.to(self.device))
        return found.cpu()


def first_values(u_embeddings: Embedding, v_embeddings: Embedding, *, seed: int) -> None:
    """Draws the centres' rows uniformly within `1 / (2 D)` and sets the contexts' rows to zero.

    Attach an optimizer before this call. Otherwise its new table has to be filled again.
    """
    bound = 0.5 / u_embeddings.embedding_dim
    u_embeddings.table.uniform_(-bound, bound, seed=seed)
    v_embeddings.table.zeros_()


@dataclass
class Outcome(loop.Outcome):
    """The result of a training run."""

    pairs: int = 0
    """Number of trained word pairs."""
    words: int = 0
    """Number of words of the text so far, before frequent words are dropped."""


def train(
    model: SkipGram,
    optimizer: loop.Optimizer,
    stream: PairStream,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    **how: Any,
) -> Outcome:
    """Trains for `steps` batches or `epochs` passes; `how` are options of loop.train."""
    if epochs is None and steps is None:
        raise ValueError("train requires a limit: set epochs or steps")
    device, outcome = model.device, Outcome()
    batches = (b.to(device) for b in stream.batches(epochs=None if steps else epochs, steps=steps))

    def track(batch: Batch) -> float:
        """Counts a batch; returns the progress from 0 to 1."""
        outcome.pairs += len(batch)
        outcome.words = round(batch.progress * stream.words)
        return outcome.steps / steps if steps else batch.progress / (epochs or 1)

    how = {"total": 1.0, "unit": "words", "last_rate": _LAST_RATE, **how}
    loop.train(model, optimizer, batches, outcome, track, **how)
    return outcome
