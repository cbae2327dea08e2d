"""`speedtorch demo dlrm`: a click model, on one or several processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demos.click_batches import ClickBatches
from demos.criteo import read_clicks, write_clicks
from demos.dlrm import DLRM, Score, held_out_score
from demos.runner import Demo
from demos.settings import StoredSettings, option, optional_count

__all__ = ["DLRMDemo", "Settings"]

# With these optimizers, torch does not change rows that a step does not look up.
_COMPARED = ("Adagrad", "SGD")


@dataclass(frozen=True, kw_only=True)
class Settings(StoredSettings):
    """All settings of a run, each with an option of the command line."""

    clicks: Path | None = option(
        None, "in Criteo's format, plain or gzip (default: generated)", type=Path, metavar="FILE"
    )
    lines: int | None = optional_count("maximum number of lines to read")
    out: Path = option(Path("dlrm"), "folder for the results", metavar="FOLDER")
    optimizer: str = option("Adagrad", "any of torch.optim", metavar="NAME")
    lr: float = option(0.01, "learning rate")
    rows: int = option(20_000, "rows of each table; a category's id is the category modulo rows")
    dim: int = option(16, "numbers per row")
    epochs: int = option(2, "passes over the lines")
    batch: int = option(1024, "lines per batch")
    held_out: float = option(0.1, "share of the lines, at the end, for the score only")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compare and self.optimizer not in _COMPARED:
            raise ValueError(
                f"--compare requires {' or '.join(_COMPARED)}, got {self.optimizer}: with other"
                " optimizers torch steps all rows, but speedtorch steps only looked-up rows"
            )


class DLRMDemo(Demo):
    """DLRM on a file in Criteo's format, such as train.txt of Kaggle's challenge.

    Without a file, the clicks are generated. A speedtorch.EmbeddingBagCollection keeps the rows of
    26 tables and their optimizer state in host memory and prefetches the rows of the next batch
    during a step. With torchrun, each process has a shard of the rows and trains a part of every
    batch.
    """

    summary = "a click model on Criteo's format, with 26 tables in host memory"
    settings_type = Settings
    settings: Settings
    example, unit = "sample", "steps"
    distributed = True

    def make_model(self) -> DLRM:
        """Creates the model."""
        how = {"memory": self.settings.memory, **self.settings.stored_as()}
        size, seed = (self.settings.rows, self.settings.dim), self.settings.seed
        return DLRM(*size, device=self.device, seed=seed, **how)

    def batches(self) -> ClickBatches:
        """Reads the clicks of the given file, or of a new generated file."""
        settings, is_first = self.settings, self.processes.is_first
        file = settings.clicks or settings.out / "clicks.txt"
        if not settings.clicks and is_first:
            write_clicks(file, seed=settings.seed)
        self.processes.wait()
        label = "reading" if is_first else None
        clicks = read_clicks(file, lines=settings.lines, label=label)
        share = 100 * clicks.clicked.mean()
        print(f"clicks     {share:.1f} % of {len(clicks):,} lines of {file}", flush=True)
        training, self.held = clicks.split(settings.held_out)
        return ClickBatches(
            training, settings.rows, processes=self.processes, **settings.batching()
        )

    def score(self, model: DLRM) -> Score:
        """The quality of the predictions for held-out clicks."""
        return held_out_score(model, self.held, self.processes)

    def results(self, before: Score, after: Score) -> tuple[dict[str, Any], list[str]]:
        """The scores."""
        return {}, [
            f"AUC        {before.auc:.4f} before training, {after.auc:.4f} after, for the last"
            f" {after.samples:,} lines",
            f"entropy    {before.normalised_entropy:.4f} before training,"
            f" {after.normalised_entropy:.4f} after; 1 for a model that knows only the share",
        ]

    def plain_model(self) -> DLRM:
        """DLRM with all rows on the device."""
        return DLRM(self.settings.rows, self.settings.dim, plain=True)
