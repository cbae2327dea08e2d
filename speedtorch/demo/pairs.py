"""Word ids -> training batches of skip-gram with negative sampling, and the pairs kept out of them.

Everything here is NumPy on whole arrays and depends on the seed alone, so that two models can be
trained on the very same batches one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speedtorch.demo.corpus import Corpus
from speedtorch.demo.settings import check_least

__all__ = ["Batch", "HeldOut", "PairStream"]

Ids = npt.NDArray[np.int64]

_BLOCK_TOKENS = 1 << 20
_STRETCH_TOKENS = 64
_HELD_OUT_LIMIT = 50_000
# First word of a generator's seed, so that no two uses draw the same numbers.
_SPLIT, _TRAINING, _SCORE = 1, 2, 3


@dataclass(frozen=True, eq=False)
class Batch:
    """Pairs of words and their negatives.

    Attributes:
        centre: `[B]` int64 word ids.
        context: `[B]` int64 word ids.
        negative: `[B, K]` int64 word ids.
        progress: how much of the text was gone through when this batch ends, in epochs.
    """

    centre: Tensor
    context: Tensor
    negative: Tensor
    progress: float

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self.centre)

    def to(self, device: torch.device) -> Batch:
        """Returns the batch on a device, without waiting for it where that is a GPU."""
        centre, context, negative = (
            each.to(device, non_blocking=device.type == "cuda")
            for each in (self.centre, self.context, self.negative)
        )
        return Batch(centre, context, negative, self.progress)


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Pairs from text that training never sees, and as many that chance makes of the same words.

    Attributes:
        centre: `[P]` int64 word ids.
        context: `[P]` int64 word ids; `centre[i]` and `context[i]` stand near each other.
        shuffled: `[P]` int64, `context` in random order: every word is as frequent among the false
            pairs as among the true ones, so that frequencies alone say nothing.
    """

    centre: Ids
    context: Ids
    shuffled: Ids

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self.centre)


class PairStream:
    """The batches of a corpus, the same ones every time they are asked for.

    Frequent words are dropped at random as in word2vec (with `t = sample` and a word's share `f`
    of the text it is kept with probability `sqrt(t / f) + t / f`), windows have a random reach of
    1 to `window` words around each centre, and negatives are drawn in proportion to `f ** 0.75`.
    Stretches of 64 words, drawn at random, are held out: no pair with a word in them is trained on.
    A batch has `batch` pairs, the last one of an epoch perhaps fewer, with `negatives` each.

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
            raise ValueError(f"held_out is {held_out}; it must be from 0 to below 1")
        self.corpus = corpus
        self.window, self.negatives, self.batch, self.seed = window, negatives, batch, seed
        share = corpus.counts / corpus.counts.sum()
        ratio = sample / share if sample else np.ones_like(share)
        self._keep = np.minimum(1.0, np.sqrt(ratio) + ratio)
        noise = np.cumsum(corpus.counts**0.75)
        self._noise = noise / noise[-1]
        draws = np.random.default_rng([_SPLIT, seed]).random(-(-len(corpus) // _STRETCH_TOKENS))
        held = np.repeat(draws < held_out, _STRETCH_TOKENS)[: len(corpus)]
        # Pairs do not reach over the edge of a held-out stretch, or over the gap that it leaves.
        edge = np.diff(corpus.passage, prepend=0) != 0
        edge[1:] |= held[1:] != held[:-1]
        piece = np.cumsum(edge, dtype=np.int64)
        self._train = (corpus.tokens[~held], piece[~held])
        self._held = (corpus.tokens[held], piece[held])

    @property
    def words(self) -> int:
        """Words of the text that are trained on, `W`, before dropping."""
        return len(self._train[0])

    def batches(self, *, epochs: int | None = None, steps: int | None = None) -> Iterator[Batch]:
        """Yields batches, on the CPU, until one of the limits given is reached."""
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
                    f"the text gives no pairs to train on ({self.words} words of "
                    f"{len(self.corpus)} in training): give a longer one, or lower the minimum "
                    "count or the held-out share"
                )

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yields the batches of one pass, which has its own dropping, windows and negatives."""
        # Blocks bound the memory that the pairs of a long text take.
        starts = range(0, self.words, _BLOCK_TOKENS)
        order = np.random.default_rng([_TRAINING, self.seed, number]).permutation(len(starts))
        done = 0
        for index in order.tolist():
            random = np.random.default_rng([_TRAINING, self.seed, number, index + 1])
            block = slice(starts[index], starts[index] + _BLOCK_TOKENS)
            tokens, piece = self._train[0][block], self._train[1][block]
            length = len(tokens)
            centre, context = self._pairs(tokens, piece, random)
            shuffle = random.permutation(len(centre))
            for begin in range(0, len(shuffle), self.batch):
                pick = shuffle[begin : begin + self.batch]
                gone = length * (begin + len(pick)) / len(shuffle)
                progress = number + (done + gone) / self.words
                yield self._make(centre[pick], context[pick], random, progress)
            done += length

    def held_out_pairs(self) -> HeldOut:
        """Pairs of the held-out text, with dropping and windows as in training; 50,000 at most."""
        random = np.random.default_rng([_SCORE, self.seed])
        found = [np.zeros((2, 0), np.int64)]
        for start in range(0, len(self._held[0]), _BLOCK_TOKENS):
            block = slice(start, start + _BLOCK_TOKENS)
            found.append(np.stack(self._pairs(self._held[0][block], self._held[1][block], random)))
        pairs = random.permutation(np.concatenate(found, axis=1), axis=1)[:, :_HELD_OUT_LIMIT]
        return HeldOut(pairs[0], pairs[1], random.permutation(pairs[1]))

    def _pairs(
        self, tokens: npt.NDArray[np.int32], piece: Ids, random: np.random.Generator
    ) -> tuple[Ids, Ids]:
        """Centres and contexts, `[P]` and `[P]`, from the words that dropping leaves."""
        kept = random.random(len(tokens)) < self._keep[tokens]
        tokens, piece = tokens[kept], piece[kept]
        reach = random.integers(1, self.window + 1, len(tokens))
        centres, contexts = [], []
        for distance in range(1, self.window + 1):
            left, right = tokens[:-distance], tokens[distance:]
            near = (piece[:-distance] == piece[distance:]) & (left != right)
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
