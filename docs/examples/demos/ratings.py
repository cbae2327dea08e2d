"""Ratings for the recommender: a file in one of MovieLens's formats, or a generated set.

The number of stars is ignored, because the recommender learns only which items interest a user.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from demos.batches import Ids
from demos.gzip_files import open_plain_or_gzip

__all__ = ["Ratings", "Split", "generated_ratings", "leave_one_out", "read_ratings"]

_COLUMNS = b"userId,movieId,rating,timestamp"
_SEPARATORS = (b"::", b"\t", b",")
# Up to 18 digits fit into 64 bits.
_ID, _STARS, _TIME = rb"(\d{1,18})", rb"\d+(?:\.\d+)?", rb"(-?\d{1,18})"

_TOPICS = 12
_FEWEST_PER_USER = 10


@dataclass(frozen=True, eq=False)
class Ratings:
    """Ratings in the order of users, and for each user in the order of time.

    Attributes:
        user: `[R]` int64, ascending, from 0 to `len(user_ids) - 1`.
        item: `[R]` int64, unique for each user.
        user_ids: `[U]` int64, the users' ids in the file.
        item_ids: `[I]` int64, the items' ids in the file.

    Example:
        >>> ratings = Ratings.from_columns([9, 4, 9], [70, 70, 50], [3, 1, 2])
        >>> ratings.user.tolist(), ratings.item.tolist(), ratings.item_ids.tolist()
        ([0, 1, 1], [1, 0, 1], [50, 70])
    """

    user: Ids
    item: Ids
    user_ids: Ids
    item_ids: Ids

    @classmethod
    def from_columns(cls, user: npt.ArrayLike, item: npt.ArrayLike, time: npt.ArrayLike) -> Ratings:
        """Numbers and sorts the users and items of ratings, given as arrays of integers `[N]`.

        If a user rated an item several times, the latest rating remains. Ratings with equal times
        remain in the given order.
        """
        user_ids, users = np.unique(np.asarray(user, np.int64), return_inverse=True)
        item_ids, items = np.unique(np.asarray(item, np.int64), return_inverse=True)
        order = np.lexsort((np.asarray(time, np.int64), users))
        users, items = users[order], items[order]
        # unique() finds the first of equal pairs; the reversed array makes this the last one.
        pair = (users * len(item_ids) + items)[::-1]
        kept = np.sort(len(pair) - 1 - np.unique(pair, return_index=True)[1])
        return cls(users[kept], items[kept], user_ids, item_ids)

    def __len__(self) -> int:
        """The number of ratings, `R`."""
        return len(self.user)


@dataclass(frozen=True, eq=False)
class Split:
    """Training ratings, and the held-out latest rating of each user.

    Attributes:
        user: `[T]` int64, ascending.
        item: `[T]` int64.
        held_user: `[H]` int64, ascending; the users with at least two ratings.
        held_item: `[H]` int64.
    """

    user: Ids
    item: Ids
    held_user: Ids
    held_item: Ids


def leave_one_out(ratings: Ratings) -> Split:
    """Holds out each user's latest rating (He et al., 2017); a user's only rating is for training.

    Example:
        >>> split = leave_one_out(Ratings.from_columns([1, 1, 2], [5, 6, 5], [20, 10, 30]))
        >>> split.item.tolist(), split.held_user.tolist(), split.held_item.tolist()
        ([1, 0], [0], [0])
    """
    user = ratings.user
    same = user[1:] == user[:-1]
    held = np.append(~same, True) & np.append(False, same)
    return Split(user[~held], ratings.item[~held], user[held], ratings.item[held])


def read_ratings(path: Path) -> Ratings:
    r"""Reads a ratings file of MovieLens, plain or gzip; the first line determines the format.

    Lines have user, item, rating and timestamp, separated by tabs (`u.data`), by `::`
    (`ratings.dat`) or by commas after a header (`ratings.csv`). Empty lines are skipped.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     _ = file.write(b"1::31::2.5::20\n1::29::3::10\n")
        ...     file.flush()
        ...     read_ratings(Path(file.name)).item.tolist()
        [0, 1]
    """
    users, items, times = array("q"), array("q"), array("q")
    separator, line_of = b"", re.compile(b"")
    with open_plain_or_gzip(path) as file:
        for number, line in enumerate(file, 1):
            line = line.strip(b"\r\n")
            if not line:
                continue
            if not separator:
                line = line.removeprefix(b"\xef\xbb\xbf")
                separator = _separator(line, path, number)
                line_of = re.compile(re.escape(separator).join((_ID, _ID, _STARS, _TIME)))
                if separator == b",":
                    continue
            found = line_of.fullmatch(line)
            if found is None:
                raise ValueError(
                    f"{path}, line {number}: expected user and item as integers of at most 18"
                    f" digits, a rating and a timestamp, separated by {separator.decode()!r}, got"
                    f" {_shown(line)}"
                )
            user, item, time = found.groups()
            users.append(int(user))
            items.append(int(item))
            times.append(int(time))
    if not users:
        raise ValueError(f"{path}: the file has no ratings")
    return Ratings.from_columns(users, items, times)


def _separator(line: bytes, path: Path, number: int) -> bytes:
    """The separator of the columns, according to the first line, which is a header for commas."""
    for separator in _SEPARATORS:
        if separator in line and (separator != b"," or line == _COLUMNS):
            return separator
    raise ValueError(
        f"{path}, line {number}: expected numbers separated by tabs or '::', or the header"
        f" {_COLUMNS.decode()!r}, got {_shown(line)}"
    )


def _shown(line: bytes) -> str:
    text = line.decode(errors="replace")
    return repr(text if len(text) <= 60 else text[:60] + "...")


def generated_ratings(
    *, users: int = 3000, items: int = 1000, per_user: int = 30, seed: int = 0
) -> Ratings:
    """Generates ratings from latent tastes, so that a model can learn from them.

    Each user likes a few of twelve topics, each item has one or two topics, and the popularity of
    items varies. Users' and items' ids are their numbers. Items without ratings are excluded.
    `per_user` is the mean number of ratings.

    Example:
        >>> ratings = generated_ratings(users=50, items=100)
        >>> len(ratings.user_ids), len(ratings.item_ids) <= 100
        (50, True)
    """
    if users < 1 or not _FEWEST_PER_USER <= per_user <= items // 2:
        raise ValueError(
            f"users must be at least 1 and per_user from {_FEWEST_PER_USER} to {items // 2}, half"
            f" of the {items} items, got users={users} and per_user={per_user}"
        )
    random = np.random.default_rng([seed, users, items, per_user])
    taste = random.dirichlet(np.full(_TOPICS, 0.1), users)
    about = random.dirichlet(np.full(_TOPICS, 0.1), items)
    popularity = random.permutation(items) + items / 20
    liking = np.log(taste @ about.T + 0.003) - 0.5 * np.log(popularity)
    # The items with the largest sums are drawn without replacement with weights exp(liking).
    ranked = np.argsort(-(liking + random.gumbel(size=liking.shape)), axis=1)
    more = random.exponential(per_user - _FEWEST_PER_USER, users).round().astype(np.int64)
    counts = np.minimum(_FEWEST_PER_USER + more, items // 2)
    user = np.repeat(np.arange(users), counts)
    item = ranked[np.arange(items) < counts[:, None]]
    return Ratings.from_columns(user, item, random.permutation(len(user)))
