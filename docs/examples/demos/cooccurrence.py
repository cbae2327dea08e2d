"""Counts of word pairs within a window, which GloVe (Pennington et al., 2014) fits in batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from demos.batches import Batch, Ids, ShuffledBatches
from demos.corpus import Corpus
from demos.settings import check_least

__all__ = ["Cooccurrence", "PairBatch", "PairBatches", "count_cooccurrence"]

_Sums = npt.NDArray[np.float64]

_BLOCK_PAIRS = 1 << 22  # bounds the memory for pairs that are not summed yet


@dataclass(frozen=True, eq=False)
class Cooccurrence:
    """Counts of unique word pairs, in ascending order of row and column.

    Attributes:
        rows: `[P]` int64 word ids.
        columns: `[P]` int64 word ids.
        counts: `[P]` float32, above 0; `(i, j)` and `(j, i)` have the same count.
    """

    rows: Ids
    columns: Ids
    counts: npt.NDArray[np.float32]

    def __len__(self) -> int:
        """The number of pairs, `P`."""
        return len(self.counts)


def count_cooccurrence(
    corpus: Corpus, *, window: int = 10, label: str | None = None
) -> Cooccurrence:
    """Counts the pairs of words within a window of one passage.

    Words before and after a word are its contexts. A word at distance `d` counts `1 / d`; the sums
    have double precision. `label` shows a progress bar with this name.

    Example:
        >>> corpus = Corpus.from_passages(["cat dog fox"], min_count=1)
        >>> found = count_cooccurrence(corpus)
        >>> found.rows.tolist(), found.columns.tolist(), found.counts.tolist()
        ([0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1], [1.0, 0.5, 1.0, 1.0, 0.5, 1.0])
    """
    check_least(1, window=window)
    words = len(corpus.words)
    parts: list[tuple[Ids, _Sums]] = []
    hidden = True if label is None else None  # None: tqdm shows the bar only on a terminal
    with tqdm(total=len(corpus), desc=label, disable=hidden, unit=" words") as bar:
        for read, keys, weights in _blocks(corpus, window):
            parts.append(_added(keys, weights))
            # Each part is at least twice as long as the next, so that each key is merged few times.
            while len(parts) > 1 and 2 * len(parts[-1][0]) > len(parts[-2][0]):
                parts.append(_merged(parts.pop(), parts.pop()))
            bar.update(read)
    while len(parts) > 1:
        parts.append(_merged(parts.pop(), parts.pop()))
    if not parts or not len(parts[0][0]):
        raise ValueError(
            f"the text must contain two words in one passage, got {len(corpus)} words in separate"
            " passages. Choose a longer text or a lower minimum count."
        )
    keys, sums = parts.pop()
    first, second = np.divmod(keys, words)
    apart = first != second
    # A word near itself is a context on both sides.
    counts = np.where(apart, sums, 2 * sums).astype(np.float32)
    mirrored = np.concatenate([keys, second[apart] * words + first[apart]])
    order = np.argsort(mirrored)
    rows, columns = np.divmod(mirrored[order], words)
    return Cooccurrence(rows, columns, np.concatenate([counts, counts[apart]])[order])


def _blocks(corpus: Corpus, window: int) -> Iterator[tuple[int, Ids, _Sums]]:
    """Yields blocks: the number of words, one key per pair, and the weights of the pairs."""
    length, words = len(corpus), len(corpus.words)
    if not length:
        return
    longest = int(np.bincount(corpus.passage).max())
    window = min(window, longest - 1)
    block = max(1, _BLOCK_PAIRS // max(1, window))
    for start in range(0, length, block):
        stop = min(start + block, length)
        tokens = corpus.tokens[start : stop + window].astype(np.int64)
        passage = corpus.passage[start : stop + window]
        keys, weights = [np.zeros(0, np.int64)], [np.zeros(0)]
        for distance in range(1, window + 1):
            left = slice(0, min(stop - start, len(tokens) - distance))
            right = slice(distance, distance + max(0, left.stop))
            if left.stop <= 0:
                break
            near = passage[left] == passage[right]
            first, second = tokens[left][near], tokens[right][near]
            keys.append(np.minimum(first, second) * words + np.maximum(first, second))
            weights.append(np.full(len(first), 1 / distance))
        yield stop - start, np.concatenate(keys), np.concatenate(weights)


def _added(keys: Ids, weights: _Sums) -> tuple[Ids, _Sums]:
    """The unique keys, in ascending order, and the sums of their weights."""
    found, place = np.unique(keys, return_inverse=True)
    return found, np.bincount(place, weights, minlength=len(found)).astype(np.float64, copy=False)


def _merged(a: tuple[Ids, _Sums], b: tuple[Ids, _Sums]) -> tuple[Ids, _Sums]:
    return _added(np.concatenate([a[0], b[0]]), np.concatenate([a[1], b[1]]))


@dataclass(frozen=True, eq=False)
class PairBatch(Batch):
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


class PairBatches(ShuffledBatches):
    """All pairs, epoch after epoch, on a device.

    Example:
        >>> pairs = Cooccurrence(np.arange(5), np.arange(5), np.ones(5, np.float32))
        >>> [len(batch) for batch in PairBatches(pairs, batch=4, epochs=2)]
        [4, 1, 4, 1]
    """

    def __init__(
        self, pairs: Cooccurrence, *, device: torch.device | str = "cpu", **how: Any
    ) -> None:
        """`how` are arguments of Batches."""
        super().__init__(len(pairs), **how)
        self._pairs, self._device = pairs, torch.device(device)

    def _make(self, pick: Ids, random: np.random.Generator) -> PairBatch:
        columns = (self._pairs.rows, self._pairs.columns, self._pairs.counts)
        return PairBatch(*(torch.from_numpy(c[pick]) for c in columns)).to(self._device)
