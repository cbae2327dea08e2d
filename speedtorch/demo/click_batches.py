"""Clicks -> training batches of the DLRM, in an order that the seed decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speedtorch.demo.criteo import CATEGORIES, Clicks
from speedtorch.demo.processes import ALONE, Processes
from speedtorch.demo.settings import check_least

__all__ = ["ClickBatch", "ClickBatches"]


@dataclass(frozen=True, eq=False)
class ClickBatch:
    """Some advertisements, on the CPU: a batch, or what a process has of one.

    Attributes:
        clicked: `[B]` float32, 0 or 1.
        numbers: `[B, 13]` float32.
        ids: for each categorical feature `[B]` int64.
        size: how many the batch has on all processes.
    """

    clicked: Tensor
    numbers: Tensor
    ids: dict[str, Tensor]
    size: int

    @classmethod
    def of(
        cls,
        clicks: Clicks,
        pick: slice | npt.NDArray[np.int64],
        rows: int,
        size: int | None = None,
    ) -> ClickBatch:
        """Those at some places; a category's id is the remainder of its division by `rows`.

        They are all that the batch has, if no size is given.
        """
        ids = np.ascontiguousarray((clicks.categories[pick].astype(np.int64) % rows).T)
        clicked = clicks.clicked[pick]
        return cls(
            torch.from_numpy(clicked),
            torch.from_numpy(clicks.numbers[pick]),
            dict(zip(CATEGORIES, torch.from_numpy(ids), strict=True)),
            len(clicked) if size is None else size,
        )

    def __len__(self) -> int:
        """How many the batch has."""
        return self.size


class ClickBatches:
    """All clicks, epoch after epoch, each epoch in an order of its own that the seed decides.

    The last batch of an epoch may be smaller; they are the same every time they are asked for. Of
    several processes each gets its share of every batch, which may be none of a small one.

    Example:
        >>> clicks = Clicks(np.zeros(5), np.zeros((5, 13)), np.full((5, 26), 12))
        >>> [(len(batch), batch.ids["C26"].tolist()) for batch in ClickBatches(clicks, 10, batch=4)]
        [(4, [2, 2, 2, 2]), (1, [2])]
    """

    def __init__(
        self,
        clicks: Clicks,
        rows: int,
        *,
        batch: int = 1024,
        epochs: int = 1,
        seed: int = 0,
        processes: Processes = ALONE,
    ) -> None:
        check_least(1, rows=rows, batch=batch, epochs=epochs)
        check_least(0, seed=seed)
        self._clicks, self._rows = clicks, rows
        self._batch, self._epochs, self._seed = batch, epochs, seed
        self._processes = processes

    def __len__(self) -> int:
        """Batches in all."""
        return self._epochs * -(-len(self._clicks) // self._batch)

    def __iter__(self) -> Iterator[ClickBatch]:
        """The batches."""
        for epoch in range(self._epochs):
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._clicks))
            for begin in range(0, len(order), self._batch):
                pick = order[begin : begin + self._batch]
                own = self._processes.share(pick)
                yield ClickBatch.of(self._clicks, own, self._rows, len(pick))
