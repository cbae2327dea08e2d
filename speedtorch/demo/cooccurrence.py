"""How often words stand near each other: the counts that GloVe (Pennington et al., 2014) fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from speedtorch.demo.corpus import Corpus
from speedtorch.demo.settings import check_least

__all__ = ["Cooccurrence", "count_cooccurrence"]

_Ids = npt.NDArray[np.int64]
_Sums = npt.NDArray[np.float64]

_BLOCK_PAIRS = 1 << 22  # bounds the memory that the pairs of a long text take before they are added


@dataclass(frozen=True, eq=False)
class Cooccurrence:
    """Counts of word pairs, each pair once, in ascending order of row and column.

    Attributes:
        rows: `[P]` int64 word ids.
        columns: `[P]` int64 word ids.
        counts: `[P]` float32, above 0; `(i, j)` has the count of `(j, i)`.
    """

    rows: _Ids
    columns: _Ids
    counts: npt.NDArray[np.float32]

    def __len__(self) -> int:
        """The number of pairs, `P`."""
        return len(self.counts)


def count_cooccurrence(
    corpus: Corpus, *, window: int = 10, label: str | None = None
) -> Cooccurrence:
    """Counts the pairs of words that stand within a window of one passage.

    Each word is a context of those before it and of those behind it. A word `d` places away counts
    `1 / d`; sums are formed in double precision. `label` shows a progress bar of this name.

    Example:
        >>> corpus = Corpus.from_passages(["cat dog fox"], min_count=1)
        >>> found = count_cooccurrence(corpus)
        >>> found.rows.tolist(), found.columns.tolist(), found.counts.tolist()
        ([0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1], [1.0, 0.5, 1.0, 1.0, 0.5, 1.0])
    """
    check_least(1, window=window)
    words = len(corpus.words)
    parts: list[tuple[_Ids, _Sums]] = []
    hidden = True if label is None else None  # tqdm then looks whether stderr is a terminal
    with tqdm(total=len(corpus), desc=label, disable=hidden, unit=" words") as bar:
        for read, keys, weights in _blocks(corpus, window):
            parts.append(_added(keys, weights))
            # Parts double in size from the last to the first: each key is merged a few times only.
            while len(parts) > 1 and 2 * len(parts[-1][0]) > len(parts[-2][0]):
                parts.append(_merged(parts.pop(), parts.pop()))
            bar.update(read)
    while len(parts) > 1:
        parts.append(_merged(parts.pop(), parts.pop()))
    if not parts or not len(parts[0][0]):
        raise ValueError(
            f"the text gives no pairs ({len(corpus)} words, none of them in one passage with"
            " another): give a longer one, or lower the minimum count"
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


def _blocks(corpus: Corpus, window: int) -> Iterator[tuple[int, _Ids, _Sums]]:
    """Blocks of words: how many, their pairs as one key each, and what each pair counts."""
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
            one, other = tokens[left][near], tokens[right][near]
            keys.append(np.minimum(one, other) * words + np.maximum(one, other))
            weights.append(np.full(len(one), 1 / distance))
        yield stop - start, np.concatenate(keys), np.concatenate(weights)


def _added(keys: _Ids, weights: _Sums) -> tuple[_Ids, _Sums]:
    """Each key once, in ascending order, and the sum of its weights."""
    found, place = np.unique(keys, return_inverse=True)
    return found, np.bincount(place, weights, minlength=len(found)).astype(np.float64, copy=False)


def _merged(one: tuple[_Ids, _Sums], other: tuple[_Ids, _Sums]) -> tuple[_Ids, _Sums]:
    return _added(np.concatenate([one[0], other[0]]), np.concatenate([one[1], other[1]]))
