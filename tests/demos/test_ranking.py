"""The recommender's batches, candidates and scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from demos.ranking import BatchStream, Candidates, RatingBatch, score
from demos.ratings import Ratings, generated_ratings, leave_one_out

RATINGS = generated_ratings(users=60, items=140, seed=4)
SPLIT = leave_one_out(RATINGS)
ITEMS = len(RATINGS.item_ids)


def at_place(place: int, negatives: int = 99) -> list[float]:
    """Values of which the first is at a place, from 1 on."""
    return [0.5] + [1.0] * (place - 1) + [0.0] * (negatives - place + 1)


@pytest.mark.parametrize(
    ("places", "hit_rate", "ndcg"),
    [
        ([1], 1.0, 1.0),
        ([2], 1.0, 1 / math.log2(3)),
        ([3], 1.0, 0.5),
        ([10], 1.0, 1 / math.log2(11)),
        ([11], 0.0, 0.0),
        ([100], 0.0, 0.0),
        ([1, 3, 7, 50], 0.75, (1 + 0.5 + 1 / 3) / 4),
        (list(range(1, 101)), 0.1, sum(1 / math.log2(p + 1) for p in range(1, 11)) / 100),
    ],
    ids=str,
)
def test_scores_of_known_places(places: list[int], hit_rate: float, ndcg: float) -> None:
    found = score(torch.tensor([at_place(place) for place in places]))
    assert found.hit_rate == pytest.approx(hit_rate) and found.ndcg == pytest.approx(ndcg)
    assert found.users == len(places)


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_a_model_with_constant_ratings_has_no_hits(value: float) -> None:
    found = score(torch.full((3, 100), value))
    assert (found.hit_rate, found.ndcg) == (0.0, 0.0)


def pairs_of(batches: list[RatingBatch]) -> tuple[list[int], list[int]]:
    """Rated pairs and negatives, each as user * ITEMS + item."""
    keys = [batch.user[:, None] * ITEMS + batch.item for batch in batches]
    rated = torch.cat([key[:, 0] for key in keys]).tolist()
    return rated, torch.cat([key[:, 1:].flatten() for key in keys]).tolist()


def test_an_epoch_has_each_rating_once_and_no_rated_negatives() -> None:
    stream = BatchStream(SPLIT, ITEMS, batch=100, negatives=3, seed=1)
    batches = list(stream)
    assert sum(map(len, batches)) == stream.examples == len(RATINGS) - 60
    assert len(batches) == len(stream)
    rated, negatives = pairs_of(batches)
    assert sorted(rated) == sorted((SPLIT.user * ITEMS + SPLIT.item).tolist())
    assert len(negatives) == 3 * len(rated) and not set(negatives) & set(rated)
    # Left out, they would be the only items that a user never sees as a negative.
    assert set(negatives) & set((SPLIT.held_user * ITEMS + SPLIT.held_item).tolist())


def test_every_item_that_a_user_has_not_rated_is_drawn_as_often() -> None:
    ratings = Ratings.from_columns([0, 0, 1, 1], [0, 1, 2, 3], range(4))
    split = leave_one_out(ratings)
    (batch,) = BatchStream(split, 50, negatives=2000)
    for user, items in zip(batch.user.tolist(), batch.item, strict=True):
        counts = torch.bincount(items[1:], minlength=50)
        assert counts[2 * user] == 0
        counts[2 * user] = 2000 // 49
        assert counts.min() > 15 and counts.max() < 80  # 41 on average


def test_batches_depend_on_seed_and_epoch_alone() -> None:
    def batches(seed: int) -> list[RatingBatch]:
        return list(BatchStream(SPLIT, ITEMS, seed=seed, epochs=2))

    one, same, other = batches(1), batches(1), batches(2)
    assert all(torch.equal(a.item, b.item) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0].item, other[0].item)
    assert not torch.equal(one[0].item, one[len(one) // 2].item)


def test_a_user_who_rated_everything_does_not_stop_the_drawing() -> None:
    ratings = Ratings.from_columns([0] * 5 + [1], [0, 1, 2, 3, 4, 0], range(6))
    split = leave_one_out(ratings)
    assert [len(batch) for batch in BatchStream(split, 4, epochs=2)] == [5, 5]


def test_candidates_are_a_held_out_item_and_99_that_the_user_did_not_rate() -> None:
    # Users with 41 unrated items at least; those with fewer than 99 are left out.
    found = Candidates.draw(RATINGS, SPLIT, seed=2)
    left = ITEMS - np.bincount(RATINGS.user)
    assert 0 < len(found) == (left >= 99).sum() < 60
    assert found.item[:, 0].tolist() == SPLIT.held_item[found.user.numpy()].tolist()
    rated = set((RATINGS.user * ITEMS + RATINGS.item).tolist())
    for user, items in zip(found.user.tolist(), found.item.tolist(), strict=True):
        assert len(set(items)) == 100
        assert not rated & {user * ITEMS + item for item in items[1:]}


def test_candidates_can_be_all_the_items_that_there_are() -> None:
    ratings = Ratings.from_columns([0, 0, *[1] * 99], [0, 1, *range(2, 101)], range(101))
    found = Candidates.draw(ratings, leave_one_out(ratings))
    assert found.user.tolist() == [0] and sorted(found.item[0].tolist()) == list(range(1, 101))
