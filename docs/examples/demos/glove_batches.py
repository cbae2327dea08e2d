"""Training batches of GloVe, in an order that the seed determines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from demos.cooccurrence import Cooccurrence
from demos.settings import check_least

__all__ = ["PairBatch", "PairBatches"]


@dataclass(frozen=True, eq=False)
class PairBatch:
    """Pairs of words and their counts.

    Attributes:
        rows: `[B]` int64 word ids.
        columns: `[B]` int64 word ids.
        counts: `[B]` float32.
    """

    rows: Tensor
    columns: Tensor
    counts: Tensor

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self.counts)

    def to(self, device: torch.device) -> PairBatch:
        """Returns the batch on a device; the copy to a GPU is asynchronous."""
        moved = (
            column.to(device, non_blocking=device.type == "cuda")
            for column in (self.rows, self.columns, self.counts)
        )
        return PairBatch(*moved)


class PairBatches:
    """All pairs, epoch after epoch, each epoch in its own order, which the seed determines.

    The number of batches is `steps`, or without `steps` that of `epochs`. The last batch of an
    epoch may be smaller.

    Example:
        >>> pairs = Cooccurrence(np.arange(5), np.arange(5), np.ones(5, np.float32))
        >>> [len(batch) for batch in PairBatches(pairs, batch=4, epochs=2)]
        [4, 1, 4, 1]
    """

    def __init__(
        self,
        pairs: Cooccurrence,
        *,
        batch: int = 8192,
        epochs: int = 1,
        steps: int | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        check_least(1, batch=batch, epochs=epochs, steps=steps)
        check_least(0, seed=seed)
        if not len(pairs):
            raise ValueError("pairs must not be empty")
        self._pairs, self._batch, self._seed = pairs, batch, seed
        self._device = torch.device(device)
        self._steps = epochs * -(-len(pairs) // batch) if steps is None else steps

    def __len__(self) -> int:
        """The number of batches of all epochs."""
        return self._steps

    def __iter__(self) -> Iterator[PairBatch]:
        """Yields the batches on the device."""
        return itertools.islice(self._endless(), self._steps)

    def _endless(self) -> Iterator[PairBatch]:
        pairs = self._pairs
        for epoch in itertools.count():
            order = np.random.default_rng([self._seed, epoch]).permutation(len(pairs))
            for begin in range(0, len(order), self._batch):
                pick = order[begin : begin + self._batch]
                columns = (pairs.rows[pick], pairs.columns[pick], pairs.counts[pick])
                yield PairBatch(*map(torch.from_numpy, columns)).to(self._device)
