"""`speedtorch demo ncf`: NeuMF, the recommender of He et al. (2017)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demos import loop
from demos.ranking import BatchStream, Candidates, RatingBatch, Score, score
from demos.ratings import generated_ratings, leave_one_out, read_ratings
from demos.runner import Demo
from demos.settings import RunSettings, option
from speedtorch.memory.placement import MemoryKind
from speedtorch.nn.embedding import Embedding

__all__ = ["NCF", "NeuMF", "Settings", "held_out_score"]

# The standard deviation of the initial rows, as in the paper.
_INITIAL_STD = 0.01
_SCORED_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """All settings of a run, each with an option of the command line."""

    optimizer: ClassVar[str] = "Adam"
    ratings: Path | None = option(
        None, "u.data, ratings.dat or ratings.csv (default: generated)", type=Path, metavar="FILE"
    )
    out: Path = option(Path("ncf"), "folder for the results", metavar="FOLDER")
    dim: int = option(16, "numbers per row of the factorisation; the perceptron has twice as many")
    epochs: int = option(8, "passes over the ratings")
    batch: int = option(1024, "ratings per batch")
    lr: float = option(0.003, "learning rate of Adam")
    negatives: int = option(4, "sampled items per rating")


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


class NCF(Demo):
    """Neural collaborative filtering (NeuMF) on a MovieLens file or on generated ratings.

    Rows and their optimizer state are in host memory.
    """

    summary = "a recommender, with the rows of users and items in host memory"
    settings_type = Settings
    settings: Settings
    example, unit = "rating", "ratings"

    def make_model(self) -> NeuMF:
        """Reads the ratings and creates the model."""
        seed, file = self.settings.seed, self.settings.ratings
        self.ratings = read_ratings(file) if file else generated_ratings(seed=seed)
        self.split = leave_one_out(self.ratings)
        self.candidates = Candidates.draw(self.ratings, self.split, seed=seed)
        self.size = {"users": len(self.ratings.user_ids), "items": len(self.ratings.item_ids)}
        return NeuMF(
            **self.size,
            dim=self.settings.dim,
            memory=self.settings.memory,
            device=self.device,
            seed=seed,
        )

    def batches(self) -> BatchStream:
        """Samples negatives."""
        settings, users, items = self.settings, self.size["users"], self.size["items"]
        source = "from a file" if settings.ratings else "generated"
        count = f"{len(self.ratings):,} of {users:,} users for {items:,} items"
        print(f"ratings    {count}, {source}", flush=True)
        how = settings.batching()
        return BatchStream(self.split, items, negatives=settings.negatives, **how)

    def score(self, model: NeuMF) -> Score:
        """How high the held-out items rank."""
        return held_out_score(model, self.candidates)

    def results(self, before: Score, after: Score) -> tuple[dict[str, Any], list[str]]:
        """The scores and the sizes of the data."""
        return {**self.size, "ratings": len(self.ratings)}, [
            f"hit rate   {before.hit_rate:.3f} at 10 before training, {after.hit_rate:.3f} after,"
            f" for {after.users:,} users",
            f"NDCG       {before.ndcg:.3f} at 10 before training, {after.ndcg:.3f} after",
        ]
