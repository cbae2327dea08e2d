"""`speedtorch demo dlrm`: DLRM (Naumov et al., 2019), on one or several processes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demos import loop
from demos.auc import auc
from demos.click_batches import ClickBatch, ClickBatches
from demos.criteo import CATEGORIES, NUMBERS, Clicks, read_clicks, write_clicks
from demos.processes import SINGLE_PROCESS, Processes
from demos.runner import Demo
from demos.settings import StoredSettings, check_least, option, optional_count
from speedtorch.nn.collection import EmbeddingBagCollection
from speedtorch.nn.table_config import EmbeddingBagConfig

__all__ = ["DLRM", "DLRMDemo", "PlainRows", "Score", "Settings", "held_out_score"]

# Widths of the hidden layers, sufficient for the generated clicks.
_BOTTOM = (128, 64)
_TOP = (256, 128)
_SCORED_AT_ONCE = 4096
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


class PlainRows(nn.Module):
    """A torch.nn.Embedding per categorical feature, with all rows on the device.

    Every bag has one id. State dicts are interchangeable with EmbeddingBagCollection's. On the CPU,
    both add gradients in the order of the batch, which torch.nn.EmbeddingBag does not.
    """

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        bags = {name: nn.Embedding(rows, dim) for name in CATEGORIES}
        self.embedding_bags = nn.ModuleDict(bags)

    def forward(self, ids: dict[str, Tensor]) -> Tensor:
        """Concatenates the rows of ids `[B]` of each feature to `[B, 26 * D]`."""
        bags = self.embedding_bags
        device = next(self.parameters()).device
        found = [bags[name](values.to(device)) for name, values in ids.items()]
        return torch.cat(found, 1)


class DLRM(loop.Model):
    """Predicts a click on an advertisement from 13 numbers and 26 categories.

    The bottom perceptron maps the 13 numbers to a vector of a row's size. The top perceptron
    receives this vector and the dot products of all pairs of the 27 vectors. The initial values
    depend only on the seed. With `plain`, PlainRows keeps all rows on the device. Otherwise an
    EmbeddingBagCollection with the arguments `how` keeps them in host memory.

    Example:
        >>> clicks = Clicks(*(np.zeros(shape, np.float32) for shape in (5, (5, 13), (5, 26))))
        >>> DLRM(1000, 8)(ClickBatch.of(clicks, slice(None), 1000)).shape
        torch.Size([5])
    """

    averages = True
    pairs: Tensor

    def __init__(
        self,
        rows: int,
        dim: int,
        *,
        plain: bool = False,
        device: torch.device | str = "cpu",
        seed: int = 0,
        **how: Any,
    ) -> None:
        super().__init__()
        check_least(1, rows=rows, dim=dim)
        self.rows, self.dim = rows, dim
        vectors = 1 + len(CATEGORIES)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.bottom = _perceptron((NUMBERS, *_BOTTOM, dim))
            self.top = _perceptron((dim + vectors * (vectors - 1) // 2, *_TOP, 1))
            self.bags = PlainRows(rows, dim) if plain else _host_bags(rows, dim, device, how)
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)
        self.to(device)

    def ids(self, batch: ClickBatch) -> dict[nn.Module, Any]:
        """The ids that a batch looks up, for speedtorch.prefetch."""
        return {self.bags: batch.ids}

    def forward(self, batch: ClickBatch) -> Tensor:
        """Returns the logits `[B]` of the click probabilities."""
        dense = self.bottom(batch.numbers.to(self.pairs.device))
        found = self.bags(batch.ids)
        rows = found if isinstance(found, Tensor) else found.values()
        vectors = torch.cat([dense, rows], 1).view(len(dense), 1 + len(CATEGORIES), self.dim)
        products = vectors @ vectors.transpose(1, 2)
        pairs = products[:, self.pairs[0], self.pairs[1]]
        made: Tensor = self.top(torch.cat([dense, pairs], 1)).squeeze(1)
        return made

    def loss(self, batch: ClickBatch) -> Tensor:
        """The sum of this part's binary cross-entropies, divided by the whole batch's size."""
        logits = self(batch)
        clicked = batch.clicked.to(logits.device)
        return F.binary_cross_entropy_with_logits(logits, clicked, reduction="sum") / len(batch)


def _host_bags(
    rows: int, dim: int, device: torch.device | str, how: Mapping[str, Any]
) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(num_embeddings=rows, embedding_dim=dim, name=name) for name in CATEGORIES
    ]
    return EmbeddingBagCollection(tables=tables, device=device, **how)


def _perceptron(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers with a ReLU between each two."""
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class Score:
    """The quality of a model's predictions for held-out clicks.

    Attributes:
        auc: The probability that a random advertisement with a click has a higher prediction than a
            random one without; ties count half. 0.5 without any training.
        normalised_entropy: The mean loss, divided by the loss of a model that knows only the share
            of clicks (He et al., 2014); less than 1, and lower is better.
        samples: Number of scored advertisements.
    """

    auc: float
    normalised_entropy: float
    samples: int


def held_out_score(model: DLRM, held: Clicks, processes: Processes = SINGLE_PROCESS) -> Score:
    """Scores a model on held-out advertisements, which must include both outcomes.

    Several processes score different parts, and all return the score of the whole.
    """
    starts = range(0, len(held), _SCORED_AT_ONCE)
    parts = [slice(start, start + _SCORED_AT_ONCE) for start in starts]
    parts += [slice(0)] * (-len(parts) % processes.size)  # a lookup needs all processes
    found = torch.zeros(len(held), dtype=torch.float64)
    with torch.no_grad():
        for part in parts[processes.rank :: processes.size]:
            found[part] = model(ClickBatch.of(held, part, model.rows)).cpu().double()
    logits = processes.sum(found).numpy()
    clicked = held.clicked > 0
    loss = np.logaddexp(0, np.where(clicked, -logits, logits)).mean()
    share = clicked.mean()
    entropy = -share * np.log(share) - (1 - share) * np.log(1 - share)
    return Score(auc(logits[clicked], logits[~clicked]), float(loss / entropy), len(held))


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
