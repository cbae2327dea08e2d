"""NeuMF, the recommender of He et al. (2017), with rows in host memory, and its score."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demos import loop
from demos.ranking import Candidates, RatingBatch, Score, score
from speedtorch.memory.placement import MemoryKind
from speedtorch.nn.embedding import Embedding

__all__ = ["NeuMF", "held_out_score"]

# The standard deviation of the initial rows, as in the paper.
_INITIAL_STD = 0.01
_SCORED_AT_ONCE = 1024


class NeuMF(loop.Model):
    """Generalised matrix factorisation (GMF) and a multilayer perceptron (MLP) in parallel.

    Each part has its own rows for users and items. GMF multiplies a user's row and an item's row
    element by element. The MLP concatenates them and applies three layers, each half as wide as the
    one before. A last layer maps both results to one number. GMF's rows have `dim` numbers, the
    MLP's twice as many. The initial layers depend only on the seed; draw_rows() draws the rows.

    Example:
        >>> model = NeuMF(1000, 500, 8)
        >>> model(torch.tensor([4, 999]), torch.tensor([[1, 2, 3], [4, 5, 499]])).shape
        torch.Size([2, 3])
    """

    averages = True

    def __init__(
        self,
        users: int,
        items: int,
        dim: int,
        *,
        memory: MemoryKind = "auto",
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.gmf_users = Embedding(users, dim, memory=memory)
            self.gmf_items = Embedding(items, dim, memory=memory)
            self.mlp_users = Embedding(users, 2 * dim, memory=memory)
            self.mlp_items = Embedding(items, 2 * dim, memory=memory)
            widths = (4 * dim, 2 * dim, dim, dim)
            self.layers = nn.ModuleList(
                nn.Linear(wide, narrow) for wide, narrow in itertools.pairwise(widths)
            )
            self.last = nn.Linear(2 * dim, 1)
        self.to(device)

    def draw_rows(self, seed: int) -> None:
        """Draws all rows from a normal distribution near 0."""
        for number, embedding in enumerate(self.embeddings()):
            embedding.init_(nn.init.normal_, 0, _INITIAL_STD, seed=4 * seed + number)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Rates items `[B, C]` for users `[B]`; the ids may be on the CPU or on the GPU.

        Returns the logits `[B, C]` of the probabilities that the users are interested in the items.
        """
        product = self.gmf_users(user).unsqueeze(1) * self.gmf_items(item)
        left = self.mlp_users(user).unsqueeze(1).expand(-1, item.shape[1], -1)
        value = torch.cat([left, self.mlp_items(item)], 2)
        for layer in self.layers:
            value = F.relu(layer(value))
        made: Tensor = self.last(torch.cat([product, value], 2)).squeeze(2)
        return made

    def loss(self, batch: RatingBatch) -> Tensor:
        """The mean binary cross-entropy; the first item of each rating is the positive one."""
        logits = self(batch.user, batch.item)
        rated = torch.zeros_like(logits)
        rated[:, 0] = 1
        return F.binary_cross_entropy_with_logits(logits, rated)

    def ids(self, batch: RatingBatch) -> dict[nn.Module, Tensor]:
        """The ids that a batch looks up in each module, for speedtorch.prefetch."""
        return {
            self.gmf_users: batch.user,
            self.gmf_items: batch.item,
            self.mlp_users: batch.user,
            self.mlp_items: batch.item,
        }


def held_out_score(model: NeuMF, candidates: Candidates) -> Score:
    """Scores a model on held-out items."""
    parts = zip(*(ids.split(_SCORED_AT_ONCE) for ids in vars(candidates).values()), strict=True)
    with torch.no_grad():
        return score(torch.cat([model(*part).cpu() for part in parts]))
