"""`speedtorch demo word2vec`: skip-gram with negative sampling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from demos import loop
from demos.auc import auc
from demos.pairs import Batch, HeldOut, PairStream
from demos.plain import RowOptimizer
from demos.settings import StoredSettings, option, optional_count
from demos.word_vectors import WordVectors
from speedtorch.nn.embedding import Embedding

__all__ = ["SIDES", "Score", "Settings", "SkipGram", "Word2Vec", "held_out_score"]

SIDES = ("u_embeddings", "v_embeddings")
_SCORED_AT_ONCE = 1 << 14


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


@dataclass(frozen=True)
class Score:
    """How well a model distinguishes pairs of real text from random pairs of the same words.

    Attributes:
        auc: The probability that a random true pair has a larger dot product than a random false
            pair; ties count half. 0.5 before training.
        log_likelihood: The mean of `log s(true) + log s(-false)` over the pairs, with the logistic
            function `s`. This is the negated training loss with one negative per pair.
        pairs: Number of true pairs, equal to the number of false pairs.
    """

    auc: float
    log_likelihood: float
    pairs: int


def held_out_score(model: SkipGram, held: HeldOut) -> Score | None:
    """Scores the vectors on held-out pairs; None if there are none."""
    if not len(held):
        return None
    true, false = (_dots(model, held.centre, ids) for ids in (held.context, held.shuffled))
    likelihood = -np.logaddexp(0, -true).mean() - np.logaddexp(0, false).mean()
    return Score(auc(true, false), float(likelihood), len(true))


def _dots(
    model: SkipGram, centre: npt.NDArray[np.int64], context: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Dot products `[P]` of centre and context rows, in double precision."""
    blocks = (torch.split(torch.from_numpy(ids), _SCORED_AT_ONCE) for ids in (centre, context))
    pairs = (map(model.rows, SIDES, block) for block in zip(*blocks, strict=True))
    return torch.cat([(u.double() * v.double()).sum(1) for u, v in pairs]).numpy()


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
