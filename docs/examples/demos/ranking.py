"""Training batches of ratings with sampled negatives, and the score of a ranking.

The computation uses NumPy on whole arrays and depends only on the seed, so that two models can be
trained and scored on the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from demos.batches import Batch, Ids, ShuffledBatches
from demos.ratings import Ratings, Split
from demos.settings import check_least

__all__ = ["BatchStream", "Candidates", "RatingBatch", "Score", "score"]

_NEGATIVES = 99
_TOP = 10
_SCORED_LIMIT = 10_000
# The first number of a generator's seed, so that no two uses draw the same numbers.
_TRAINING, _SCORE = 1, 2
# After these draws, a user with almost all items rated may have a rated item as a negative.
_MOST_DRAWS = 50


@dataclass(frozen=True, eq=False)
class RatingBatch(Batch):
    """Ratings and their negatives.

    Attributes:
        user: `[B]` int64.
        item: `[B, 1 + K]` int64: first the item that the user rated, then K negatives.
    """

    user: Tensor
    item: Tensor

    def __len__(self) -> int:
        """The number of ratings, `B`."""
        return len(self.user)


class BatchStream(ShuffledBatches):
    """The batches of a split, on the CPU; each epoch has its own order and negatives.

    Negatives are drawn uniformly from the items that the user did not rate in the training set. A
    rating may have the same negative twice. A user's held-out item may be a negative, because
    training must not know that item. If the user has rated almost all items, a negative may be a
    rated item.

    Example:
        >>> split = Split(*(np.array(part) for part in ([0, 0, 1], [3, 4, 4], [0], [5])))
        >>> stream = BatchStream(split, 9, batch=2, negatives=4)
        >>> [(len(batch), tuple(batch.item.shape)) for batch in stream]
        [(2, (2, 5)), (1, (1, 5))]
    """

    _purpose = (_TRAINING,)

    def __init__(self, split: Split, items: int, *, negatives: int = 4, **how: Any) -> None:
        """`how` are arguments of Batches."""
        super().__init__(len(split.user), **how)
        check_least(1, negatives=negatives)
        self.split, self.items, self.negatives = split, items, negatives
        self._rated = np.sort(split.user * items + split.item)

    def _make(self, pick: Ids, random: np.random.Generator) -> RatingBatch:
        user, item = self.split.user[pick], self.split.item[pick]
        items = np.concatenate([item[:, None], self._unrated(user, random)], axis=1)
        return RatingBatch(torch.from_numpy(user), torch.from_numpy(items))

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
    """Held-out items, each with 99 items that the user did not rate.

    Attributes:
        user: `[H]` int64.
        item: `[H, 100]` int64, unique in each row; the held-out item is the first.

    Example:
        >>> from demos.ratings import generated_ratings, leave_one_out
        >>> ratings = generated_ratings(users=50, items=200)
        >>> Candidates.draw(ratings, leave_one_out(ratings)).item.shape
        torch.Size([50, 100])
    """

    user: Tensor
    item: Tensor

    @classmethod
    def draw(cls, ratings: Ratings, split: Split, *, seed: int = 0) -> Candidates:
        """Draws 99 items per held-out item, for at most 10,000 random users.

        Users with fewer than 99 unrated items are excluded.
        """
        random = np.random.default_rng([_SCORE, seed])
        items = len(ratings.item_ids)
        unrated = items - np.bincount(ratings.user, minlength=len(ratings.user_ids))
        able = np.flatnonzero(unrated[split.held_user] >= _NEGATIVES)
        if not len(able):
            raise ValueError(
                f"the score requires a user with at least 2 ratings and {_NEGATIVES} unrated items,"
                f" got {len(split.held_user)} users with 2 ratings, and {items} items"
            )
        pick = np.sort(random.permutation(able)[:_SCORED_LIMIT])
        user, item = split.held_user[pick], split.held_item[pick]
        rated = np.sort(ratings.user * items + ratings.item)
        negatives = random.integers(0, items, (len(user), _NEGATIVES))
        while True:
            negatives.sort(axis=1)
            wrong = _contains(rated, user[:, None] * items + negatives)
            wrong[:, 1:] |= negatives[:, 1:] == negatives[:, :-1]
            if not wrong.any():
                break
            negatives[wrong] = random.integers(0, items, int(wrong.sum()))
        candidates = np.concatenate([item[:, None], negatives], axis=1)
        return cls(torch.from_numpy(user), torch.from_numpy(candidates))

    def __len__(self) -> int:
        """The number of users, `H`."""
        return len(self.user)


@dataclass(frozen=True)
class Score:
    """How high a model ranks the held-out items among 99 unrated items.

    Attributes:
        hit_rate: Share of the users whose item is among the first 10; 0.1 by chance with 100
            candidates.
        ndcg: The mean over the users of `1 / log2(place + 1)` for places 1 to 10, else 0; 0.045 by
            chance with 100 candidates.
        users: Number of users.
    """

    hit_rate: float
    ndcg: float
    users: int


def score(values: Tensor) -> Score:
    """Scores a model's ratings `[H, C]` of candidates; the held-out item is the first of a row.

    A held-out item with the same rating as a candidate is ranked behind it, so that a model with
    constant ratings has no hits.

    Example:
        >>> score(torch.tensor([[9.0, 1.0, 2.0], [3.0, 4.0, 1.0]])).hit_rate
        1.0
    """
    before = (~(values[:, 1:] < values[:, :1])).sum(1)
    hit = before < _TOP
    gain = torch.where(hit, 1 / torch.log2(before.double() + 2), 0.0)
    return Score(hit.double().mean().item(), gain.mean().item(), len(values))
