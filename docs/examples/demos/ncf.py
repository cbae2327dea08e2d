"""`speedtorch demo ncf`: a recommender."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from demos.neumf import NeuMF, held_out_score
from demos.ranking import BatchStream, Candidates, Score
from demos.ratings import generated_ratings, leave_one_out, read_ratings
from demos.runner import Demo
from demos.settings import RunSettings, option

__all__ = ["NCF", "Settings"]


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
