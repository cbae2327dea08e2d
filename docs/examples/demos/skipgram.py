"""The skip-gram model with two speedtorch.Embedding or two torch.nn.Embedding modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from demos import loop
from demos.pairs import Batch
from speedtorch.nn.embedding import Embedding

__all__ = ["SIDES", "SkipGram"]

SIDES = ("u_embeddings", "v_embeddings")


class SkipGram(loop.Model):
    """Skip-gram with negative sampling: each word has one vector as a centre, one as a context.

    The two embeddings `[V, D]` are those of the centres and of the contexts.

    Example:
        >>> model = SkipGram(Embedding(1000, 8), Embedding(1000, 8))
        >>> model.draw_rows(seed=3)
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

    def draw_rows(self, seed: int) -> None:
        """Draws the centres' rows uniformly within `1 / (2 D)` and sets the contexts' rows to 0."""
        u, v = (embedding.table for embedding in self.embeddings())
        bound = 0.5 / self.u_embeddings.embedding_dim
        u.uniform_(-bound, bound, seed=seed)
        v.zeros_()

    @torch.no_grad()
    def rows(self, side: str, ids: Tensor) -> Tensor:
        """Returns rows `[N, D]` of one of SIDES on the CPU, for ids `[N]` on the CPU."""
        found: Tensor = getattr(self, side)(ids.to(self.device))
        return found.cpu()

    def vectors(self, ids: Tensor) -> Tensor:
        """Words' vectors `[N, D]` on the CPU: those of the centres."""
        return self.rows(SIDES[0], ids)
