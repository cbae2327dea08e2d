"""The skip-gram model on two embeddings: ours, with rows in host memory, or plain torch's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from speedtorch.demo.pairs import Batch
from speedtorch.nn.embedding import Embedding

__all__ = ["SIDES", "SkipGram", "first_values"]

SIDES = ("u_embeddings", "v_embeddings")


class SkipGram(nn.Module):
    """Skip-gram with negative sampling: a word has one vector as a centre, one as a context.

    Args:
        u_embeddings: rows `[V, D]` of the centres.
        v_embeddings: rows `[V, D]` of the contexts.

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
        """Where the rows of a batch are trained."""
        return self.u_embeddings.weight.device

    def ids(self, batch: Batch) -> dict[nn.Module, Tensor | Sequence[Tensor]]:
        """The rows that a batch looks up in each embedding, for speedtorch.prefetch."""
        return {
            self.u_embeddings: batch.centre,
            self.v_embeddings: (batch.context, batch.negative),
        }

    def forward(self, batch: Batch) -> Tensor:
        """Computes the loss, summed over the pairs.

        Returns:
            A scalar. It is a sum, so that the step of a row does not depend on the batch's size.
        """
        word = self.u_embeddings(batch.centre)
        true = (word * self.v_embeddings(batch.context)).sum(1)
        false = torch.bmm(self.v_embeddings(batch.negative), word.unsqueeze(2))
        loss: Tensor = -functional.logsigmoid(true).sum() - functional.logsigmoid(-false).sum()
        return loss

    @torch.no_grad()
    def rows(self, side: str, ids: Tensor) -> Tensor:
        """Rows `[N, D]` of one of SIDES, on the CPU, for `ids` `[N]` on the CPU."""
        found: Tensor = getattr(self, side)(ids.to(self.device))
        return found.cpu()


def first_values(u_embeddings: Embedding, v_embeddings: Embedding, *, seed: int) -> None:
    """Draws the centres' rows, uniform within `1 / (2 D)`; those of the contexts become zeros.

    Args:
        u_embeddings: of the centres. Attach an optimizer before, or its new table is filled twice.
        v_embeddings: of the contexts.
        seed: the numbers depend on it alone.
    """
    bound = 0.5 / u_embeddings.embedding_dim
    u_embeddings.table.uniform_(-bound, bound, seed=seed)
    v_embeddings.table.zeros_()
