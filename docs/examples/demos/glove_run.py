"""`speedtorch demo glove`: word vectors from counts of word pairs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from demos.cooccurrence import PairBatches, count_cooccurrence
from demos.glove import GloVe
from demos.settings import RunSettings, option, optional_count
from demos.word_vectors import WordVectors

__all__ = ["GloVeDemo", "Settings"]


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
