"""Training batches of the DLRM, in an order that the seed determines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from demos.criteo import CATEGORIES, Clicks
from demos.processes import SINGLE_PROCESS, Processes
from demos.settings import check_least

__all__ = ["ClickBatch", "ClickBatches"]


@dataclass(frozen=True, eq=False)
class ClickBatch:
    """A batch of advertisements on the CPU, or one process's part of a batch.

    Attributes:
        clicked: `[B]` float32, 0 or 1.
        numbers: `[B, 13]` float32.
        ids: `[B]` int64 for each categorical feature.
        size: Number of advertisements of the batch on all processes.
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
        """Selects advertisements by position; a category's id is the category modulo `rows`.

        `size` is the size of the whole batch, by default the number of selected advertisements.
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
        """The number of advertisements of the whole batch."""
        return self.size


class ClickBatches:
    """All clicks, epoch after epoch, each epoch in its own order, which the seed determines.

    Every iteration yields the same batches; the last batch of an epoch may be smaller. With several
    processes, each process receives its part of every batch, which may be empty.

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
        processes: Processes = SINGLE_PROCESS,
    ) -> None:
        check_least(1, rows=rows, batch=batch, epochs=epochs)
        check_least(0, seed=seed)
        self._clicks, self._rows = clicks, rows
        self._batch, self._epochs, self._seed = batch, epochs, seed
        self._processes = processes

    def __len__(self) -> int:
        """The number of batches of all epochs."""
        return self._epochs * -(-len(self._clicks) // self._batch)

    def __iter__(self) -> Iterator[ClickBatch]:
        """Yields this process's part of each batch."""
        for epoch in range(self._epochs):
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._clicks))
            for begin in range(0, len(order), self._batch):
                pick = order[begin : begin + self._batch]
                part = self._processes.share(pick)
                yield ClickBatch.of(self._clicks, part, self._rows, len(pick))
