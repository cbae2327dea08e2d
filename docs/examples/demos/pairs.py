"""Training batches of skip-gram with negative sampling, and held-out pairs.

The computation uses NumPy on whole arrays and depends only on the seed, so that two models can be
trained on the same batches, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from demos import batches
from demos.batches import Ids, Outcome
from demos.corpus import Corpus
from demos.settings import check_least

__all__ = ["Batch", "HeldOut", "PairStream"]

_BLOCK_TOKENS = 1 << 20
_STRETCH_TOKENS = 64
_HELD_OUT_LIMIT = 50_000
# The first number of a generator's seed, so that no two uses draw the same numbers.
_SPLIT, _TRAINING, _SCORE = 1, 2, 3


@dataclass(frozen=True, eq=False)
class Batch(batches.Batch):
    """Pairs of words and their negatives.

    Attributes:
        centre: `[B]` int64 word ids.
        context: `[B]` int64 word ids.
        negative: `[B, K]` int64 word ids.
        progress: Position in the text at the end of this batch, in epochs.
    """

    centre: Tensor
    context: Tensor
    negative: Tensor
    progress: float

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self.centre)


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Pairs from held-out text, and as many random pairs of the same words.

    Attributes:
        centre: `[P]` int64 word ids.
        context: `[P]` int64 word ids; `centre[i]` and `context[i]` are neighbours in the text.
        shuffled: `[P]` int64, `context` in random order. Each word is equally frequent in true and
            false pairs, so that frequencies do not distinguish them.
    """

    centre: Ids
    context: Ids
    shuffled: Ids

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self.centre)


class PairStream(batches.Batches):
    """The batches of a corpus, on a device.

    Frequent words are dropped at random as in word2vec: a word with the share `f` of the text is
    kept with probability `sqrt(t / f) + t / f` for `t = sample`. Each centre has a random window
    of 1 to `window` words on each side. Negatives are drawn in proportion to `f ** 0.75`. Random
    stretches of 64 words are held out, and no trained pair has a word in them. A batch has `batch`
    pairs with `negatives` negatives each; the last batch of an epoch may be smaller.

    Example:
        >>> corpus = Corpus.from_passages(["red green blue " * 9], min_count=1)
        >>> stream = PairStream(corpus, window=2, negatives=3, batch=8, sample=0)
        >>> first = next(stream.epoch(0))
        >>> len(first), first.negative.shape
        (8, torch.Size([8, 3]))
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        window: int = 5,
        negatives: int = 5,
        sample: float = 1e-3,
        held_out: float = 0.05,
        device: torch.device | str = "cpu",
        **how: Any,
    ) -> None:
        """`how` are arguments of Batches."""
        super().__init__(**how)
        check_least(1, window=window, negatives=negatives)
        check_least(0, sample=sample)
        if not 0 <= held_out < 1:
            raise ValueError(f"held_out must be at least 0 and below 1, got {held_out}")
        self.corpus, self.device = corpus, torch.device(device)
        self.window, self.negatives = window, negatives
        share = corpus.counts / corpus.counts.sum()
        ratio = sample / share if sample else np.ones_like(share)
        self._keep = np.minimum(1.0, np.sqrt(ratio) + ratio)
        noise = np.cumsum(corpus.counts**0.75)
        self._noise = noise / noise[-1]
        draws = np.random.default_rng([_SPLIT, self.seed]).random(
            -(-len(corpus) // _STRETCH_TOKENS)
        )
        held = np.repeat(draws < held_out, _STRETCH_TOKENS)[: len(corpus)]
        # Pairs do not cross a boundary of a held-out stretch, nor the gap without it.
        edge = np.diff(corpus.passage, prepend=0) != 0
        edge[1:] |= held[1:] != held[:-1]
        segment = np.cumsum(edge, dtype=np.int64)
        self._train = (corpus.tokens[~held], segment[~held])
        self._held = (corpus.tokens[held], segment[held])

    @property
    def words(self) -> int:
        """The number of words in the training text, `W`, before frequent words are dropped."""
        return len(self._train[0])

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yields the batches of one pass, with its own dropped words, windows and negatives."""
        # Blocks bound the memory for the pairs of a long text.
        starts = range(0, self.words, _BLOCK_TOKENS)
        order = np.random.default_rng([_TRAINING, self.seed, number]).permutation(len(starts))
        done, empty = 0, True
        for index in order.tolist():
            random = np.random.default_rng([_TRAINING, self.seed, number, index + 1])
            block = slice(starts[index], starts[index] + _BLOCK_TOKENS)
            tokens, segment = self._train[0][block], self._train[1][block]
            length = len(tokens)
            centre, context = self._pairs(tokens, segment, random)
            shuffle = random.permutation(len(centre))
            for begin in range(0, len(shuffle), self.batch):
                pick = shuffle[begin : begin + self.batch]
                passed = length * (begin + len(pick)) / len(shuffle)
                progress = number + (done + passed) / self.words
                yield self._make(centre[pick], context[pick], random, progress)
            done += length
            empty &= not len(shuffle)
        if empty:
            raise ValueError(
                f"the text has no pairs to train on ({self.words} words of {len(self.corpus)} in"
                " training). Choose a longer text, a lower minimum count or a smaller held-out"
                " share."
            )

    def track(self, outcome: Outcome, batch: Batch) -> float:
        """Counts the words so far and returns the progress, from 0 to 1."""
        outcome.words = round(batch.progress * self.words)
        return outcome.steps / self.steps if self.steps else batch.progress / self.epochs

    def held_out_pairs(self) -> HeldOut:
        """Pairs of the held-out text, formed as in training; at most 50,000."""
        random = np.random.default_rng([_SCORE, self.seed])
        found = [np.zeros((2, 0), np.int64)]
        for start in range(0, len(self._held[0]), _BLOCK_TOKENS):
            block = slice(start, start + _BLOCK_TOKENS)
            found.append(np.stack(self._pairs(self._held[0][block], self._held[1][block], random)))
        pairs = random.permutation(np.concatenate(found, axis=1), axis=1)[:, :_HELD_OUT_LIMIT]
        return HeldOut(pairs[0], pairs[1], random.permutation(pairs[1]))

    def _pairs(
        self, tokens: npt.NDArray[np.int32], segment: Ids, random: np.random.Generator
    ) -> tuple[Ids, Ids]:
        """Drops frequent words and returns the centres `[P]` and contexts `[P]` of all pairs."""
        kept = random.random(len(tokens)) < self._keep[tokens]
        tokens, segment = tokens[kept], segment[kept]
        reach = random.integers(1, self.window + 1, len(tokens))
        centres, contexts = [], []
        for distance in range(1, self.window + 1):
            left, right = tokens[:-distance], tokens[distance:]
            near = (segment[:-distance] == segment[distance:]) & (left != right)
            forward = near & (reach[:-distance] >= distance)
            backward = near & (reach[distance:] >= distance)
            centres += [left[forward], right[backward]]
            contexts += [right[forward], left[backward]]
        return np.concatenate(centres, dtype=np.int64), np.concatenate(contexts, dtype=np.int64)

    def _make(
        self, centre: Ids, context: Ids, random: np.random.Generator, progress: float
    ) -> Batch:
        draws = random.random((len(centre), self.negatives))
        negative = np.searchsorted(self._noise, draws, side="right")
        centres, contexts, negatives = map(torch.from_numpy, (centre, context, negative))
        return Batch(centres, contexts, negatives, progress).to(self.device)
