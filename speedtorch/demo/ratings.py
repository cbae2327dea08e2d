"""Ratings for the recommender: a file in any of MovieLens's formats, or a generated set.

Who rated what, and when, is all that is kept: the recommender learns which items a user takes an
interest in, not how many stars they get.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["Ratings", "Split", "generated_ratings", "leave_one_out", "read_ratings"]

Ids = npt.NDArray[np.int64]

_COLUMNS = b"userId,movieId,rating,timestamp"
_SEPARATORS = (b"::", b"\t", b",")
# Up to 18 digits fit into 64 bits.
_ID, _STARS, _TIME = rb"(\d{1,18})", rb"\d+(?:\.\d+)?", rb"(-?\d{1,18})"

_TOPICS = 12
_FEWEST_PER_USER = 10


@dataclass(frozen=True, eq=False)
class Ratings:
    """Who rated what, user by user and within a user in the order of time.

    Attributes:
        user: `[R]` int64, rising; users have the numbers 0 to `len(user_ids) - 1`.
        item: `[R]` int64; no user has an item twice.
        user_ids: `[U]` int64, what each user is called in the file.
        item_ids: `[I]` int64, what each item is called there.

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
        """Numbers users and items, any whole numbers `[N]`, and sorts.

        Of several ratings of one user for one item the latest stays; those of the same time stay
        in the order given.
        """
        user_ids, users = np.unique(np.asarray(user, np.int64), return_inverse=True)
        item_ids, items = np.unique(np.asarray(item, np.int64), return_inverse=True)
        order = np.lexsort((np.asarray(time, np.int64), users))
        users, items = users[order], items[order]
        # unique finds the first of equal ones, which is the last of them in the other direction.
        pair = (users * len(item_ids) + items)[::-1]
        kept = np.sort(len(pair) - 1 - np.unique(pair, return_index=True)[1])
        return cls(users[kept], items[kept], user_ids, item_ids)

    def __len__(self) -> int:
        """The number of ratings, `R`."""
        return len(self.user)


@dataclass(frozen=True, eq=False)
class Split:
    """Ratings to train on, and each user's latest, which is kept out.

    Attributes:
        user: `[T]` int64, rising.
        item: `[T]` int64.
        held_user: `[H]` int64, rising; those with at least two ratings.
        held_item: `[H]` int64.
    """

    user: Ids
    item: Ids
    held_user: Ids
    held_item: Ids


def leave_one_out(ratings: Ratings) -> Split:
    """Holds each user's latest rating out (He et al., 2017); a single one stays for training.

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
    r"""Reads a ratings file of MovieLens; what it is shows in its first line.

    Lines have user, item, rating and timestamp, separated by tabs (`u.data`), by `::`
    (`ratings.dat`) or by commas below a header (`ratings.csv`). Empty lines do not count.

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
    with path.open("rb") as file:
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
                    f"{path}, line {number}: expected user and item as whole numbers of at most 18"
                    f" digits, a rating and a timestamp with {separator.decode()!r} between them,"
                    f" got {_shown(line)}"
                )
            user, item, time = found.groups()
            users.append(int(user))
            items.append(int(item))
            times.append(int(time))
    if not users:
        raise ValueError(f"{path}: there are no ratings in this file")
    return Ratings.from_columns(users, items, times)


def _separator(line: bytes, path: Path, number: int) -> bytes:
    """What separates the columns, by the first line; of commas, that is the header."""
    if line.startswith(b"\x1f\x8b"):
        raise ValueError(f"{path}: this file is gzip; unpack it first (gunzip)")
    for separator in _SEPARATORS:
        if separator in line and (separator != b"," or line == _COLUMNS):
            return separator
    raise ValueError(
        f"{path}, line {number}: expected numbers with tabs or '::' between them, or the header"
        f" {_COLUMNS.decode()!r}, got {_shown(line)}"
    )


def _shown(line: bytes) -> str:
    text = line.decode(errors="replace")
    return repr(text if len(text) <= 60 else text[:60] + "...")


def generated_ratings(
    *, users: int = 3000, items: int = 1000, per_user: int = 30, seed: int = 0
) -> Ratings:
    """Makes ratings up, of users and items with latent tastes, so that something can be learnt.

    Each user likes a few of twelve topics, each item is about one or two of them, and some items
    are more popular than others. Users' and items' ids are their numbers, and items that nobody
    rated are left out. `per_user` is an average.

    Example:
        >>> ratings = generated_ratings(users=50, items=100)
        >>> len(ratings.user_ids), len(ratings.item_ids) <= 100
        (50, True)
    """
    if users < 1 or not _FEWEST_PER_USER <= per_user <= items // 2:
        raise ValueError(
            f"expected 1 user or more and {_FEWEST_PER_USER} to {items // 2} ratings of each, half"
            f" of the {items} items, got {users} users and {per_user} ratings"
        )
    random = np.random.default_rng([seed, users, items, per_user])
    taste = random.dirichlet(np.full(_TOPICS, 0.1), users)
    about = random.dirichlet(np.full(_TOPICS, 0.1), items)
    popularity = random.permutation(items) + items / 20
    liking = np.log(taste @ about.T + 0.003) - 0.5 * np.log(popularity)
    # The largest of these sums are a draw without replacement, in proportion to exp(liking).
    ranked = np.argsort(-(liking + random.gumbel(size=liking.shape)), axis=1)
    more = random.exponential(per_user - _FEWEST_PER_USER, users).round().astype(np.int64)
    counts = np.minimum(_FEWEST_PER_USER + more, items // 2)
    user = np.repeat(np.arange(users), counts)
    item = ranked[np.arange(items) < counts[:, None]]
    return Ratings.from_columns(user, item, random.permutation(len(user)))
