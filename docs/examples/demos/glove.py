"""`speedtorch demo glove`: word vectors from counts of word pairs (Pennington et al., 2014)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from demos import loop
from demos.cooccurrence import PairBatch, PairBatches, count_cooccurrence
from demos.settings import RunSettings, option, optional_count
from demos.word_vectors import WordVectors
from speedtorch.memory.placement import MemoryKind
from speedtorch.nn.embedding import Embedding

__all__ = ["GloVe", "GloVeDemo", "Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """All settings of a run, each with an option of the command line."""

    corpus: Path | None = option(None, "text to train on, plain or gzip", type=Path, metavar="FILE")
    out: Path = option(Path("glove"), "folder for the results", metavar="FOLDER")
    optimizer: str = option("Adagrad", "any of torch.optim", metavar="NAME")
    lr: float = option(0.05, "learning rate")
    dim: int = option(100, "numbers per vector")
    window: int = option(10, "maximum distance of a context word")
    min_count: int = option(10, "drop rarer words")
    x_max: float = option(100.0, "counts below this value have a lower weight")
    alpha: float = option(0.75, "exponent of that weight")
    epochs: int = option(15, "passes over the pairs")
    steps: int | None = optional_count("batches to train on, instead of --epochs")
    batch: int = option(8192, "pairs per batch")


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


class GloVeDemo(WordVectors):
    """GloVe.

    Four speedtorch.Embedding modules keep vectors, biases and their optimizer state in host memory
    and prefetch the rows of the next batch during a step.
    """

    summary = "word vectors from counts of word pairs, with speedtorch.Embedding"
    settings_type = Settings
    settings: Settings
    unit = "pairs"

    def make_model(self) -> GloVe:
        """Creates the model."""
        return GloVe(
            len(self.corpus.words),
            self.settings.dim,
            x_max=self.settings.x_max,
            alpha=self.settings.alpha,
            device=self.device,
            memory=self.settings.memory,
        )

    def batches(self) -> PairBatches:
        """Counts the pairs."""
        window = self.settings.window
        pairs = count_cooccurrence(self.corpus, window=window, label="counting")
        print(f"pairs      {len(pairs):,} unique pairs within {window} words", flush=True)
        return PairBatches(pairs, device=self.device, **self.settings.batching())
