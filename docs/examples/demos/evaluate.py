"""Evaluates word vectors: a score on held-out pairs, and nearest neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from demos.auc import auc
from demos.corpus import Corpus
from demos.pairs import HeldOut
from demos.skipgram import SIDES, SkipGram

__all__ = ["Rows", "Score", "content_words", "held_out_score", "nearest_neighbours", "row_blocks"]

Rows = Callable[[Tensor], Tensor]
"""Returns the vectors `[N, D]`, on the CPU, of word ids `[N]` on the CPU."""

_BLOCK_ROWS = 1 << 14
_FREQUENT = 200


@dataclass(frozen=True)
class Score:
    """How well a model distinguishes pairs of real text from random pairs of the same words.

    Attributes:
        auc: The probability that a random true pair has a larger dot product than a random false
            pair; ties count half. 0.5 before training.
        log_likelihood: The mean of `log s(true) + log s(-false)` over the pairs, with the logistic
            function `s`. This is the negated training loss with one negative per pair.
        pairs: Number of true pairs, equal to the number of false pairs.
    """

    auc: float
    log_likelihood: float
    pairs: int


def held_out_score(model: SkipGram, held: HeldOut) -> Score | None:
    """Scores the vectors on held-out pairs; None if there are none."""
    if not len(held):
        return None
    true, false = (_dots(model, held.centre, ids) for ids in (held.context, held.shuffled))
    likelihood = -np.logaddexp(0, -true).mean() - np.logaddexp(0, false).mean()
    return Score(auc(true, false), float(likelihood), len(true))


def _dots(
    model: SkipGram, centre: npt.NDArray[np.int64], context: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Dot products `[P]` of centre and context rows, in double precision."""
    blocks = (torch.split(torch.from_numpy(ids), _BLOCK_ROWS) for ids in (centre, context))
    pairs = (map(model.rows, SIDES, block) for block in zip(*blocks, strict=True))
    return torch.cat([(u.double() * v.double()).sum(1) for u, v in pairs]).numpy()


def content_words(corpus: Corpus, number: int) -> list[int]:
    """Finds frequent words that carry a meaning, in any language.

    Such words occur in few passages for their frequency, whereas words like "the" are spread
    evenly. Returns up to `number` of these words with at least four letters, most frequent first.

    Example:
        >>> text = ["rain and rain", "cold with wind", "wind with sun", "fog with hail"]
        >>> corpus = Corpus.from_passages(text, min_count=1)
        >>> [corpus.words[i] for i in content_words(corpus, 1)]
        ['rain']
    """
    passages = len(np.unique(corpus.passage))
    both = np.unique(corpus.tokens.astype(np.int64) * (1 << 32) + corpus.passage)
    holding = np.bincount(both >> 32, minlength=len(corpus.words))
    # The share of passages with the word if its occurrences were spread evenly.
    even = -np.expm1(-corpus.counts / passages)
    crowding = np.log(even * passages / holding)
    long = np.array([i for i, word in enumerate(corpus.words) if len(word) >= 4], np.int64)
    frequent = long[:_FREQUENT]
    if not len(frequent):
        return []
    crowded = crowding[frequent] >= np.quantile(crowding[frequent], 2 / 3)
    found: list[int] = frequent[crowded][:number].tolist()
    return found


def nearest_neighbours(
    rows: Rows, words: Sequence[str], chosen: Sequence[int], *, number: int = 6
) -> dict[str, list[str]]:
    """For each chosen word, the words with the highest cosine similarity, nearest first."""
    if not chosen:
        return {}
    query = _normalized(rows(torch.tensor(chosen)))
    blocks = row_blocks(rows, len(words))
    likeness = torch.cat([query @ _normalized(block).T for block in blocks], dim=1)
    likeness[
        torch.arange(len(chosen)), torch.tensor(chosen)
    ] = -2.0  # a word is not its own neighbour
    best = likeness.topk(min(number, len(words) - 1), dim=1).indices.tolist()
    return {words[i]: [words[j] for j in row] for i, row in zip(chosen, best, strict=True)}


def _normalized(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=1)


def row_blocks(rows: Rows, words: int) -> Iterable[Tensor]:
    """All rows, in blocks `[up to 16,384, D]`, so that no table is copied whole."""
    return map(rows, torch.split(torch.arange(words), _BLOCK_ROWS))
