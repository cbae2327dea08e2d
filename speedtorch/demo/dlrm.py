"""DLRM (Naumov et al., 2019) with its rows in host memory, or in plain torch, and its training."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtorch.demo import loop
from speedtorch.demo.auc import auc
from speedtorch.demo.click_batches import ClickBatch, ClickBatches
from speedtorch.demo.criteo import CATEGORIES, NUMBERS, Clicks
from speedtorch.demo.processes import ALONE, Processes
from speedtorch.demo.settings import check_least
from speedtorch.nn.collection import EmbeddingBagCollection
from speedtorch.nn.row_module import RowModule
from speedtorch.nn.table_config import EmbeddingBagConfig

__all__ = ["DLRM", "Outcome", "PlainRows", "Score", "held_out_score", "train"]

# Layers between the first and the last, wide enough for what is made up here.
_BOTTOM = (128, 64)
_TOP = (256, 128)
_SCORED_AT_ONCE = 4096


class PlainRows(nn.Module):
    """A torch.nn.Embedding for each categorical feature, all of its rows on the device.

    Every bag has one id. The state dict is that of an EmbeddingBagCollection. On the CPU gradients
    are added up as there, in the order of the batch, which torch.nn.EmbeddingBag does not do.
    """

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        bags = {name: nn.Embedding(rows, dim) for name in CATEGORIES}
        self.embedding_bags = nn.ModuleDict(bags)

    def forward(self, ids: dict[str, Tensor]) -> Tensor:
        """The rows `[B, 26 * D]` of ids `[B]` of each feature, side by side."""
        bags = self.embedding_bags
        device = next(self.parameters()).device
        found = [bags[name](each.to(device)) for name, each in ids.items()]
        return torch.cat(found, 1)


class DLRM(loop.Model):
    """How likely an advertisement is clicked, by 13 numbers and 26 categories.

    The bottom perceptron makes as many numbers of the 13 as a category's row has. The dot products
    of all pairs of these 27, and the bottom's result, go through the top perceptron. All first
    values depend on the seed alone. With `plain` the rows are torch's, on the device; without, an
    EmbeddingBagCollection, of which `how` are arguments, keeps them in host memory.

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

    def embeddings(self) -> list[RowModule]:
        """The modules whose rows are in host memory."""
        return [each for each in self.modules() if isinstance(each, RowModule)]

    def ids(self, batch: ClickBatch) -> dict[nn.Module, Any]:
        """The ids that a batch looks up, for prefetch."""
        return {self.bags: batch.ids}

    def forward(self, batch: ClickBatch) -> Tensor:
        """The logits `[B]` of the probabilities."""
        dense = self.bottom(batch.numbers.to(self.pairs.device))
        found = self.bags(batch.ids)
        rows = found if isinstance(found, Tensor) else found.values()
        vectors = torch.cat([dense, rows], 1).view(len(dense), 1 + len(CATEGORIES), self.dim)
        products = vectors @ vectors.transpose(1, 2)
        pairs = products[:, self.pairs[0], self.pairs[1]]
        made: Tensor = self.top(torch.cat([dense, pairs], 1)).squeeze(1)
        return made

    def loss(self, batch: ClickBatch) -> Tensor:
        """Binary cross-entropy, on average over the whole batch, to which a share adds its part."""
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
    """Linear layers with ReLU between them, and none behind the last."""
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@dataclass
class Outcome(loop.Outcome):
    """What a training run did."""

    samples: int = 0
    """Advertisements, in its batches."""


def train(model: DLRM, optimizer: loop.Optimizer, batches: ClickBatches, **how: Any) -> Outcome:
    """Trains on all batches; `how` are options of loop.train."""
    outcome = Outcome()

    def track(batch: ClickBatch) -> float:
        outcome.samples += len(batch)
        return outcome.steps

    how = {"total": len(batches), "unit": "steps", "layout": loop.STEPS_LAYOUT, **how}
    loop.train(model, optimizer, batches, outcome, track, **how)
    return outcome


@dataclass(frozen=True)
class Score:
    """How well a model foretells clicks that were kept out of training.

    Attributes:
        auc: the chance that one with a click, drawn at random, is held to be more likely than one
            without; ties count half. 0.5 for a model that knows nothing.
        normalised_entropy: the mean of the loss, divided by what it is for a model that knows the
            share of clicks and nothing else (He et al., 2014); below 1, and the less the better.
        samples: how many there are.
    """

    auc: float
    normalised_entropy: float
    samples: int


def held_out_score(model: DLRM, held: Clicks, processes: Processes = ALONE) -> Score:
    """Scores a model on clicks kept out of training, some with a click and some without.

    Several processes score it in turn, each a part as one alone would; all give the same.
    """
    starts = range(0, len(held), _SCORED_AT_ONCE)
    parts = [slice(start, start + _SCORED_AT_ONCE) for start in starts]
    parts += [slice(0)] * (-len(parts) % processes.size)  # lookups are those of all processes
    found = torch.zeros(len(held), dtype=torch.float64)
    with torch.no_grad():
        for part in parts[processes.rank :: processes.size]:
            found[part] = model(ClickBatch.of(held, part, model.rows)).cpu().double()
    logits = processes.summed(found).numpy()
    clicked = held.clicked > 0
    loss = np.logaddexp(0, np.where(clicked, -logits, logits)).mean()
    share = clicked.mean()
    entropy = -share * np.log(share) - (1 - share) * np.log(1 - share)
    return Score(auc(logits[clicked], logits[~clicked]), float(loss / entropy), len(held))
