"""GloVe (Pennington et al., 2014) on four Embeddings whose rows are in host memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from demos import loop
from demos.cooccurrence import PairBatch
from speedtorch.memory.placement import MemoryKind
from speedtorch.nn.embedding import Embedding

__all__ = ["GloVe"]


class GloVe(loop.Model):
    """A vector and a bias per word as the target of a pair, and another as its context.

    The dot product of both vectors plus both biases approximates the logarithm of the pair's count.
    All four tables are in host memory; the module contains the rows of one batch. The weight of a
    pair is `(count / x_max) ** alpha` for counts below `x_max`, else 1.

    Example:
        >>> model = GloVe(1000, 8)
        >>> model.draw_rows(seed=3)
        >>> model.vectors(torch.tensor([7, 999])).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        words: int,
        dim: int,
        *,
        x_max: float = 100.0,
        alpha: float = 0.75,
        device: torch.device | str = "cpu",
        memory: MemoryKind = "auto",
    ) -> None:
        super().__init__()
        if not x_max > 0:
            raise ValueError(f"x_max must be above 0, got {x_max}")
        if not alpha >= 0:
            raise ValueError(f"alpha must be 0 or more, got {alpha}")
        self.x_max, self.alpha = x_max, alpha
        self.target = Embedding(words, dim, device=device, memory=memory)
        self.context = Embedding(words, dim, device=device, memory=memory)
        self.target_bias = Embedding(words, 1, device=device, memory=memory)
        self.context_bias = Embedding(words, 1, device=device, memory=memory)

    def draw_rows(self, seed: int) -> None:
        """Draws all vectors and biases from the uniform distribution within `1 / (2 D)`."""
        bound = 0.5 / self.target.embedding_dim
        for number, embedding in enumerate(self.embeddings()):
            embedding.init_(nn.init.uniform_, -bound, bound, seed=4 * seed + number)

    def ids(self, batch: PairBatch) -> dict[nn.Module, Tensor]:
        """The ids that a batch looks up in each Embedding, for speedtorch.prefetch."""
        return {
            self.target: batch.rows,
            self.context: batch.columns,
            self.target_bias: batch.rows,
            self.context_bias: batch.columns,
        }

    def forward(self, batch: PairBatch) -> Tensor:
        """Returns the sum of the losses, so that a row's step does not depend on the batch size."""
        dot = (self.target(batch.rows) * self.context(batch.columns)).sum(1)
        bias = (self.target_bias(batch.rows) + self.context_bias(batch.columns)).squeeze(1)
        weight = (batch.counts / self.x_max).clamp(max=1) ** self.alpha
        loss: Tensor = (weight * (dot + bias - batch.counts.log()) ** 2).sum()
        return loss

    @torch.no_grad()
    def vectors(self, ids: Tensor) -> Tensor:
        """Words' vectors `[N, D]` on the CPU: the sums of both vectors, as in the paper."""
        both: Tensor = self.target(ids) + self.context(ids)
        return both.cpu()
