"""DLRM (Naumov et al., 2019), with rows in host memory or in plain torch, and its score."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demos import loop
from demos.auc import auc
from demos.click_batches import ClickBatch
from demos.criteo import CATEGORIES, NUMBERS, Clicks
from demos.processes import SINGLE_PROCESS, Processes
from demos.settings import check_least
from speedtorch.nn.collection import EmbeddingBagCollection
from speedtorch.nn.table_config import EmbeddingBagConfig

__all__ = ["DLRM", "PlainRows", "Score", "held_out_score"]

# Widths of the hidden layers, sufficient for the generated clicks.
_BOTTOM = (128, 64)
_TOP = (256, 128)
_SCORED_AT_ONCE = 4096


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
