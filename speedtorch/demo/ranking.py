"""Ratings -> training batches with sampled negatives, and the score of a ranking.

Everything here is NumPy on whole arrays and depends on the seed alone, so that two models can be
trained and scored on the very same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speedtorch.demo.ratings import Ids, Ratings, Split
from speedtorch.demo.settings import check_least

__all__ = ["BatchStream", "Candidates", "RatingBatch", "Score", "score"]

_OTHERS = 99
_TOP = 10
_SCORED_LIMIT = 10_000
# First word of a generator's seed, so that no two uses draw the same numbers.
_TRAINING, _SCORE = 1, 2
# A user who has rated almost every item may then get a rated one among the negatives.
_MOST_DRAWS = 50


@dataclass(frozen=True, eq=False)
class RatingBatch:
    """Ratings and their negatives.

    Attributes:
        user: `[B]` int64.
        item: `[B, 1 + K]` int64: first the item that the user rated, then K others.
    """

    user: Tensor
    item: Tensor

    def __len__(self) -> int:
        """The number of ratings, `B`."""
        return len(self.user)


class BatchStream:
    """The batches of a split, the same ones every time they are asked for.

    Negatives are items, of all that there are, that the user did not rate, drawn evenly. Held-out
    ones are among them, as training must not know which these are.

    Example:
        >>> split = Split(*(np.array(part) for part in ([0, 0, 1], [3, 4, 4], [0], [5])))
        >>> stream = BatchStream(split, 9, batch=2, negatives=4)
        >>> [(len(batch), tuple(batch.item.shape)) for batch in stream.batches(1)]
        [(2, (2, 5)), (1, (1, 5))]
    """

    def __init__(
        self, split: Split, items: int, *, batch: int = 1024, negatives: int = 4, seed: int = 0
    ) -> None:
        check_least(1, batch=batch, negatives=negatives)
        check_least(0, seed=seed)
        self.split, self.items = split, items
        self.batch, self.negatives, self.seed = batch, negatives, seed
        self._rated = np.sort(split.user * items + split.item)

    def __len__(self) -> int:
        """The ratings of an epoch."""
        return len(self.split.user)

    def batches(self, epochs: int) -> Iterator[RatingBatch]:
        """Yields batches, on the CPU; each epoch has its own order and negatives."""
        for number in range(epochs):
            random = np.random.default_rng([_TRAINING, self.seed, number])
            order = random.permutation(len(self))
            for begin in range(0, len(order), self.batch):
                pick = order[begin : begin + self.batch]
                user, item = self.split.user[pick], self.split.item[pick]
                others = self._unrated(user, random)
                listed = np.concatenate([item[:, None], others], axis=1)
                yield RatingBatch(torch.from_numpy(user), torch.from_numpy(listed))

    def _unrated(self, user: Ids, random: np.random.Generator) -> Ids:
        drawn = random.integers(0, self.items, (len(user), self.negatives))
        for _ in range(_MOST_DRAWS):
            wrong = _contains(self._rated, user[:, None] * self.items + drawn)
            if not wrong.any():
                break
            drawn[wrong] = random.integers(0, self.items, int(wrong.sum()))
        return drawn


def _contains(rising: Ids, values: Ids) -> npt.NDArray[np.bool_]:
    near = np.minimum(np.searchsorted(rising, values), len(rising) - 1)
    return np.asarray(rising[near] == values)


@dataclass(frozen=True, eq=False)
class Candidates:
    """Held-out items, each among others that the user did not rate.

    Attributes:
        user: `[H]` int64.
        item: `[H, 100]` int64, no two equal in a row: first the held-out item.

    Example:
        >>> from speedtorch.demo.ratings import generated_ratings, leave_one_out
        >>> ratings = generated_ratings(users=50, items=200)
        >>> Candidates.draw(ratings, leave_one_out(ratings)).item.shape
        torch.Size([50, 100])
    """

    user: Tensor
    item: Tensor

    @classmethod
    def draw(cls, ratings: Ratings, split: Split, *, seed: int = 0) -> Candidates:
        """Draws 99 items for each held-out one, of at most 10,000 users drawn at random.

        Users who rated so much that no 99 items are left are not among them.
        """
        random = np.random.default_rng([_SCORE, seed])
        items = len(ratings.item_ids)
        left = items - np.bincount(ratings.user, minlength=len(ratings.user_ids))
        able = np.flatnonzero(left[split.held_user] >= _OTHERS)
        if not len(able):
            raise ValueError(
                f"nobody can be scored: that takes a user with at least 2 ratings and {_OTHERS}"
                f" unrated items, and there are {len(split.held_user)} users"
                f" with 2 ratings, and {items} items"
            )
        pick = np.sort(random.permutation(able)[:_SCORED_LIMIT])
        user, item = split.held_user[pick], split.held_item[pick]
        rated = np.sort(ratings.user * items + ratings.item)
        others = random.integers(0, items, (len(user), _OTHERS))
        while True:
            others.sort(axis=1)
            wrong = _contains(rated, user[:, None] * items + others)
            wrong[:, 1:] |= others[:, 1:] == others[:, :-1]
            if not wrong.any():
                break
            others[wrong] = random.integers(0, items, int(wrong.sum()))
        listed = np.concatenate([item[:, None], others], axis=1)
        return cls(torch.from_numpy(user), torch.from_numpy(listed))

    def __len__(self) -> int:
        """The number of users, `H`."""
        return len(self.user)


@dataclass(frozen=True)
class Score:
    """How far up a model ranks the held-out items among 99 others.

    Attributes:
        hit_rate: share of the users whose item is among the first 10; 0.1 by chance.
        ndcg: mean over the users of `1 / log2(place + 1)`, where places are 1 to 10; 0 for an item
            further down; 0.045 by chance.
        users: how many there are.
    """

    hit_rate: float
    ndcg: float
    users: int


def score(values: Tensor) -> Score:
    """Scores rankings: `[H, C]`, what a model gives the candidates, held-out items first.

    One that is equal to another candidate's counts as behind it, so that a model which gives all
    the same has no hits.

    Example:
        >>> score(torch.tensor([[9.0, 1.0, 2.0], [3.0, 4.0, 1.0]])).hit_rate
        1.0
    """
    before = (~(values[:, 1:] < values[:, :1])).sum(1)
    hit = before < _TOP
    gain = torch.where(hit, 1 / torch.log2(before.double() + 2), 0.0)
    return Score(hit.double().mean().item(), gain.mean().item(), len(values))
