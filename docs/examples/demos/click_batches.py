"""Training batches of the DLRM, in an order that the seed determines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demos.batches import Batch, Ids, ShuffledBatches
from demos.criteo import CATEGORIES, Clicks
from demos.processes import SINGLE_PROCESS, Processes
from demos.settings import check_least

__all__ = ["ClickBatch", "ClickBatches"]


@dataclass(frozen=True, eq=False)
class ClickBatch(Batch):
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
        pick: slice | Ids,
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


class ClickBatches(ShuffledBatches):
    """All clicks, epoch after epoch.

    With several processes, each process receives its part of every batch, which may be empty.

    Example:
        >>> clicks = Clicks(np.zeros(5), np.zeros((5, 13)), np.full((5, 26), 12))
        >>> [(len(batch), batch.ids["C26"].tolist()) for batch in ClickBatches(clicks, 10, batch=4)]
        [(4, [2, 2, 2, 2]), (1, [2])]
    """

    def __init__(
        self, clicks: Clicks, rows: int, *, processes: Processes = SINGLE_PROCESS, **how: Any
    ) -> None:
        """`how` are arguments of Batches."""
        super().__init__(len(clicks), **how)
        check_least(1, rows=rows)
        self._clicks, self._rows, self._processes = clicks, rows, processes

    def _make(self, pick: Ids, random: np.random.Generator) -> ClickBatch:
        part = self._processes.share(pick)
        return ClickBatch.of(self._clicks, part, self._rows, len(pick))
