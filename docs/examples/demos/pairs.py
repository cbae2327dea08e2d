"""Training batches of skip-gram with negative sampling, and held-out pairs.

The computation uses NumPy on whole arrays and depends only on the seed, so that two models can be
trained on the same batches, one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from demos.corpus import Corpus
from demos.settings import check_least

__all__ = ["Batch", "HeldOut", "PairStream"]

Ids = npt.NDArray[np.int64]

_BLOCK_TOKENS = 1 << 20
_STRETCH_TOKENS = 64
_HELD_OUT_LIMIT = 50_000
# The first number of a generator's seed, so that no two uses draw the same numbers.
_SPLIT, _TRAINING, _SCORE = 1, 2, 3


@dataclass(frozen=True, eq=False)
class Batch:
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

    def to(self, device: torch.device) -> Batch:
        """Returns the batch on a device; the copy to a GPU is asynchronous."""
        centre, context, negative = (
            ids.to(device, non_blocking=device.type == "cuda")
            for ids in (self.centre, self.context, self.negative)
        )
        return Batch(centre, context, negative, self.progress)


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


class PairStream:
    """The batches of a corpus; every iteration yields the same batches.

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
        batch: int = 4096,
        sample: float = 1e-3,
        held_out: float = 0.05,
        seed: int = 0,
    ) -> None:
        check_least(1, window=window, negatives=negatives, batch=batch)
        check_least(0, sample=sample, seed=seed)
        if not 0 <= held_out < 1:
            raise ValueError(f"held_out must be at least 0 and below 1, got {held_out}")
        self.corpus = corpus
        self.window, self.negatives, self.batch, self.seed = window, negatives, batch, seed
        share = corpus.counts / corpus.counts.sum()
        ratio = sample / share if sample else np.ones_like(share)
        self._keep = np.minimum(1.0, np.sqrt(ratio) + ratio)
        noise = np.cumsum(corpus.counts**0.75)
        self._noise = noise / noise[-1]
        draws = np.random.default_rng([_SPLIT, seed]).random(-(-len(corpus) // _STRETCH_TOKENS))
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

    def batches(self, *, epochs: int | None = None, steps: int | None = None) -> Iterator[Batch]:
        """Yields batches on the CPU until the first of the given limits."""
        numbers = itertools.count() if epochs is None else iter(range(epochs))
        return itertools.islice(self._epochs(numbers), steps)

    def _epochs(self, numbers: Iterator[int]) -> Iterator[Batch]:
        for number in numbers:
            empty = True
            for batch in self.epoch(number):
                empty = False
                yield batch
            if empty:
                raise ValueError(
                    f"the text has no pairs to train on ({self.words} words of"
                    f" {len(self.corpus)} in training). Choose a longer text, a lower minimum count"
                    " or a smaller held-out share."
                )

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yields the batches of one pass, with its own dropped words, windows and negatives."""
        # Blocks bound the memory for the pairs of a long text.
        starts = range(0, self.words, _BLOCK_TOKENS)
        order = np.random.default_rng([_TRAINING, self.seed, number]).permutation(len(starts))
        done = 0
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
        return Batch(
            centre=torch.from_numpy(centre),
            context=torch.from_numpy(context),
            negative=torch.from_numpy(negative),
            progress=progress,
        )
