"""`speedtorch demo word2vec`: skip-gram with negative sampling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from demos.evaluate import Score, held_out_score
from demos.pairs import PairStream
from demos.plain import RowOptimizer
from demos.settings import StoredSettings, option, optional_count
from demos.skipgram import SIDES, SkipGram
from demos.word_vectors import WordVectors
from speedtorch.nn.embedding import Embedding

__all__ = ["Settings", "Word2Vec"]


@dataclass(frozen=True, kw_only=True)
class Settings(StoredSettings):
    """All settings of a run, each with an option of the command line."""

    corpus: Path | None = option(None, "text to train on, plain or gzip", type=Path, metavar="FILE")
    out: Path = option(Path("word2vec"), "folder for the results", metavar="FOLDER")
    optimizer: str = option("Adamax", "any of torch.optim", metavar="NAME")
    lr: float | None = option(None, "initial learning rate, which falls to a hundredth", type=float)
    dim: int = option(100, "numbers per word")
    epochs: int = option(6, "passes over the text")
    steps: int | None = optional_count("batches to train on, instead of --epochs")
    batch: int = option(4096, "pairs per batch")
    window: int = option(5, "maximum distance of a context word")
    negatives: int = option(5, "per pair")
    min_count: int = option(10, "drop rarer words")
    sample: float = option(1e-3, "drop words that are more frequent at random")
    held_out: float = option(0.05, "share of the text for the score only")


class Word2Vec(WordVectors):
    """Skip-gram with negative sampling.

    Two speedtorch.Embedding modules keep word vectors and their optimizer state in host memory and
    prefetch the rows of the next batch during a step.
    """

    summary = "word vectors from real text, with the tables in host memory"
    settings_type = Settings
    settings: Settings
    unit = "words"
    last_rate = 0.01  # as in word2vec

    def make_model(self) -> SkipGram:
        """Creates the model."""
        how = {"memory": self.settings.memory, **self.settings.stored_as()}
        size = (len(self.corpus.words), self.settings.dim)
        return SkipGram(*(Embedding(*size, device=self.device, **how) for _ in SIDES))

    def batches(self) -> PairStream:
        """Draws the held-out text."""
        stream = PairStream(
            self.corpus,
            window=self.settings.window,
            negatives=self.settings.negatives,
            sample=self.settings.sample,
            held_out=self.settings.held_out,
            device=self.device,
            **self.settings.batching(),
        )
        self.held = stream.held_out_pairs()
        return stream

    def score(self, model: SkipGram) -> Score | None:
        """How well the vectors distinguish held-out pairs from random pairs."""
        return held_out_score(model, self.held)

    def results(
        self, before: Score | None, after: Score | None
    ) -> tuple[dict[str, Any], list[str]]:
        """The score and the words with the nearest vectors."""
        facts, lines = super().results(before, after)
        if before and after:
            score = (
                f"held out   AUC {before.auc:.4f} before training, {after.auc:.4f} after it (by"
                f" chance 0.5), on {after.pairs:,} held-out pairs"
            )
            lines = [score, *lines]
        return facts, lines

    def plain_model(self) -> SkipGram:
        """Skip-gram with full-size embeddings; SparseAdam requires sparse gradients."""
        size = (len(self.corpus.words), self.settings.dim)
        sparse = self.settings.optimizer == "SparseAdam"
        return SkipGram(*(nn.Embedding(*size, sparse=sparse) for _ in SIDES))

    def plain_optimizer(self, model: SkipGram) -> RowOptimizer:
        """Steps only the looked-up rows."""
        return RowOptimizer(model, self.make_optimizer)
