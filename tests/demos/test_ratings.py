"""The recommender's ratings: each of MovieLens's formats, broken lines, split, generated ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from demo_commands import written

from demos.ratings import Ratings, generated_ratings, leave_one_out, read_ratings

TABS = "196\t242\t3\t881250949\n7\t242\t5\t881250950\n196\t12\t1\t881250948\n"
COLONS = TABS.replace("\t", "::")
COMMAS = "userId,movieId,rating,timestamp\n" + TABS.replace("\t", ",").replace("3,8", "3.5,8")
EXPECTED = (
    "expected user and item as integers of at most 18 digits, a rating and a timestamp, separated"
)


def as_lists(ratings: Ratings) -> list[list[int]]:
    columns = (ratings.user, ratings.item, ratings.user_ids, ratings.item_ids)
    assert all(column.dtype == np.int64 for column in columns)
    return [column.tolist() for column in columns]


@pytest.mark.parametrize(
    "content",
    [
        TABS,
        COLONS,
        COMMAS,
        TABS.replace("\n", "\r\n"),
        "\ufeff" + COMMAS,
        "\n" + COLONS + "\n\n",
        TABS.removesuffix("\n"),
    ],
    ids=["u.data", "ratings.dat", "ratings.csv", "windows", "mark", "empty_lines", "no_end"],
)
@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
def test_each_format_gives_the_same_ratings(tmp_path: Path, content: str, zipped: bool) -> None:
    found = read_ratings(written(tmp_path / "some file", content, zipped))
    # User 196 rated item 12 before item 242.
    assert as_lists(found) == [[0, 1, 1], [1, 0, 1], [7, 196], [12, 242]]
    assert len(found) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TABS + "1\t2\t3\n", f"line 4: {EXPECTED} by '\\t', got '1\\t2\\t3'"),
        (TABS + "1\t2\t3\t4\t5\n", "line 4: "),
        (COLONS + "1::x::3::4\n", f"line 4: {EXPECTED} by '::', got '1::x::3::4'"),
        (COLONS + "1\t2\t3\t4\n", "line 4: "),
        (COMMAS + "1,2,nan,4\n", f"line 5: {EXPECTED} by ',', got '1,2,nan,4'"),
        (COMMAS + "-1,2,3,4\n", "line 5: "),
        (COMMAS + "1,2,3,4.5\n", "line 5: "),
        (COMMAS + "1,2,3,٤\n", "line 5: "),
        (COMMAS + "9" * 19 + ",2,3,4\n", "line 5: "),
        (TABS + "x" * 100, "got '" + "x" * 60 + "...'"),
        (b"1\t2\t3\t\xff\n", "line 1: "),
        ("1,2,3,4\n", "line 1: expected numbers separated by tabs or '::', or the header"),
        (
            "movieId,title,genres\n",
            "the header 'userId,movieId,rating,timestamp', got 'movieId,title,genres'",
        ),
        ("\n1|2|3|4\n", "line 2: "),
        ("", "the file has no ratings"),
        ("userId,movieId,rating,timestamp\n", "the file has no ratings"),
    ],
    ids=lambda value: "",
)
def test_the_error_of_a_broken_line_has_file_and_number(
    tmp_path: Path, content: str | bytes, message: str
) -> None:
    path = written(tmp_path / "some file", content)
    with pytest.raises(ValueError) as error:
        read_ratings(path)
    assert str(error.value).startswith(str(path)) and message in str(error.value)


def test_of_two_ratings_for_one_item_the_latest_counts() -> None:
    found = Ratings.from_columns([5, 5, 5], [1, 2, 1], [10, 20, 30])
    assert as_lists(found) == [[0, 0], [1, 0], [5], [1, 2]]


def test_each_users_latest_rating_is_held_out() -> None:
    user, item, time = [1, 1, 1, 2, 3, 3], [10, 11, 12, 10, 12, 11], [5, 9, 7, 1, 4, 4]
    split = leave_one_out(Ratings.from_columns(user, item, time))
    # User 2 has one rating, which stays; the times of user 3 are equal: the last in the file.
    assert split.held_user.tolist() == [0, 2] and split.held_item.tolist() == [1, 1]
    assert split.user.tolist() == [0, 0, 1, 2] and split.item.tolist() == [0, 2, 0, 2]


def test_generated_ratings_depend_on_the_seed_alone() -> None:
    one, same, other = (generated_ratings(users=200, items=100, seed=s) for s in (1, 1, 2))
    assert as_lists(one) == as_lists(same) != as_lists(other)
    counts = np.bincount(one.user)
    assert len(counts) == 200 and counts.min() >= 10 and counts.max() <= 50
    assert 20 < counts.mean() < 35
    assert len(np.unique(one.user * 100 + one.item)) == len(one)
