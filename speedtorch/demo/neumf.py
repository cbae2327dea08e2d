"""NeuMF, the recommender of He et al. (2017), with its rows in host memory, and its training."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtorch.demo import loop
from speedtorch.demo.ranking import BatchStream, Candidates, RatingBatch, Score, score
from speedtorch.memory.placement import MemoryKind
from speedtorch.nn.embedding import Embedding

__all__ = ["NeuMF", "Outcome", "held_out_score", "train"]

# As in the paper: the spread of the rows before training.
_SPREAD = 0.01
_SCORED_AT_ONCE = 1024


class NeuMF(loop.Model):
    """Generalised matrix factorisation (GMF) and a multilayer perceptron (MLP), side by side.

    Both have rows of their own for users and items. GMF multiplies them, number by number; the MLP
    puts them one after the other through three layers, each half as wide; a last layer makes one
    number out of both results. A row of GMF has `dim` numbers, one of the MLP twice as many. The
    layers' first values depend on the seed alone; for those of the rows see draw_rows.

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

    def embeddings(self) -> list[Embedding]:
        """The four modules whose rows are in host memory."""
        return [self.gmf_users, self.gmf_items, self.mlp_users, self.mlp_items]

    def draw_rows(self, seed: int) -> None:
        """Draws all rows anew, near 0."""
        for number, embedding in enumerate(self.embeddings()):
            embedding.init_(nn.init.normal_, 0, _SPREAD, seed=4 * seed + number)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Rates items `[B, C]` for users `[B]`, by ids on either device.

        Gives `[B, C]`, larger for an item that the user is more likely to take an interest in: the
        logit of the probability.
        """
        product = self.gmf_users(user).unsqueeze(1) * self.gmf_items(item)
        left = self.mlp_users(user).unsqueeze(1).expand(-1, item.shape[1], -1)
        value = torch.cat([left, self.mlp_items(item)], 2)
        for layer in self.layers:
            value = F.relu(layer(value))
        made: Tensor = self.last(torch.cat([product, value], 2)).squeeze(2)
        return made

    def loss(self, batch: RatingBatch) -> Tensor:
        """How wrongly the first item of each rating is told from its negatives, on average."""
        logits = self(batch.user, batch.item)
        rated = torch.zeros_like(logits)
        rated[:, 0] = 1
        return F.binary_cross_entropy_with_logits(logits, rated)

    def ids(self, batch: RatingBatch) -> dict[nn.Module, Tensor]:
        """The ids that a batch looks up in each module, for prefetch."""
        return {
            self.gmf_users: batch.user,
            self.gmf_items: batch.item,
            self.mlp_users: batch.user,
            self.mlp_items: batch.item,
        }


@dataclass
class Outcome(loop.Outcome):
    """What a training run did; an example of it is a rating with its negatives."""

    ratings: int = 0
    """In its batches, without negatives."""


def train(
    model: NeuMF, optimizer: loop.Optimizer, stream: BatchStream, *, epochs: int, **how: Any
) -> Outcome:
    """Trains for some epochs; `how` are options of loop.train."""
    outcome = Outcome()

    def track(batch: RatingBatch) -> float:
        outcome.ratings += len(batch)
        return outcome.ratings

    how = {"total": epochs * len(stream), "unit": "ratings", **how}
    loop.train(model, optimizer, stream.batches(epochs), outcome, track, **how)
    return outcome


def held_out_score(model: NeuMF, candidates: Candidates) -> Score:
    """Scores a model on items kept out of training."""
    starts = range(0, len(candidates), _SCORED_AT_ONCE)
    parts = [slice(start, start + _SCORED_AT_ONCE) for start in starts]
    with torch.no_grad():
        values = [model(candidates.user[part], candidates.item[part]).cpu() for part in parts]
    return score(torch.cat(values))
