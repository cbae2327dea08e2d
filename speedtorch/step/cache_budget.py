"""CacheBudget: device memory that the caches of several tables share."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from speedtorch.step.hot_rows import BYTES_OF_SLOT

__all__ = ["CacheBudget", "CachedRows", "Need", "even_shares"]


class Need(NamedTuple):
    """The size of a cache that has all rows of a table."""

    rows: int
    row_bytes: int
    """Bytes of a row with its optimizer state."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: a row and its id."""
        return self.row_bytes + BYTES_OF_SLOT

    @property
    def nbytes(self) -> int:
        """Bytes of a cache of all rows."""
        return self.rows * self.slot_bytes

    def slots(self, nbytes: int) -> int:
        """The number of slots in a cache of `nbytes`."""
        return min(self.rows, nbytes // self.slot_bytes)


class CachedRows(Protocol):
    """Rows that have a cache, such as TrainedRows."""

    @property
    def is_captured(self) -> bool:
        """Whether a captured CUDA graph uses the rows."""

    @property
    def cache_bytes(self) -> int | None:
        """Bytes assigned to the cache, or None without a cache."""

    def cache_need(self) -> Need:
        """The size of a cache of all rows."""

    def cache(
        self, nbytes: int | None, members: Tensor | None = None, budget: CacheBudget | None = None
    ) -> None:
        """Replaces the cache by a new cache of `nbytes`, or by none if `nbytes` is None."""


class CacheBudget:
    """Bytes that caches share equally, with at least one row for each table.

    Bytes that a small table does not need go to others. attach() and resize() call share(), which
    divides the bytes again. A cache that a CUDA graph uses keeps its size.

    Args:
        nbytes: The bytes of all caches together.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._members: weakref.WeakKeyDictionary[object, tuple[CachedRows, Tensor | None]]
        self._members = weakref.WeakKeyDictionary()

    def add(self, owner: object, rows: CachedRows, members: Tensor | None = None) -> None:
        """Adds the rows of `owner` to the budget; replaces rows that `owner` added before.

        `members`: Ids of the only rows that have slots.
        """
        self._members[owner] = (rows, members)

    def remove(self, owner: object) -> None:
        """Removes the rows of `owner` from the budget."""
        self._members.pop(owner, None)

    def check(self, changed: Mapping[CachedRows, Need]) -> None:
        """Raises ValueError if the bytes are too few for tables with these needs."""
        self._open(changed)

    def share(self, changed: Mapping[CachedRows, Need] | None = None) -> None:
        """Assigns each cache its share; replaces only caches whose number of slots changes.

        `changed`: New needs of tables that are about to change. Raises ValueError before any change
        if the bytes are too few.
        """
        changed, members = changed or {}, dict(self._members.values())
        for rows, share in self._shares(changed).items():
            before, need = rows.cache_bytes, changed.get(rows) or rows.cache_need()
            if before is None or need.slots(before) != need.slots(share):
                rows.cache(share, members[rows], self)

    def share_anew(self) -> None:
        """Replaces every cache by an empty cache; otherwise like share()."""
        members = dict(self._members.values())
        for rows, share in self._shares({}).items():
            rows.cache(share, members[rows], self)

    def copied(self, owner: object, memo: dict[int, Any]) -> CacheBudget:
        """Returns the budget of deep copies of owners, with the cache bytes of `owner` added."""
        made: CacheBudget = memo.setdefault(id(self), CacheBudget(0))
        rows = self._members[owner][0]
        # Rows that a CUDA graph uses have no share, because their cache keeps its size.
        made.nbytes += self._shares({}).get(rows, rows.cache_bytes or 0)
        return made

    def _open(self, changed: Mapping[CachedRows, Need]) -> tuple[dict[CachedRows, Need], int]:
        """The tables whose caches may change, with their needs, and the bytes for them."""
        needs = {rows: changed.get(rows) or rows.cache_need() for rows, _ in self._members.values()}
        captured = [rows for rows in needs if rows.is_captured]
        in_graphs = sum(rows.cache_bytes or 0 for rows in captured)
        can_change = {
            rows: need for rows, need in needs.items() if need.rows and rows not in captured
        }
        least = sum(need.slot_bytes for need in can_change.values())
        if least > self.nbytes - in_graphs:
            in_use = f", and CUDA graphs use {in_graphs} bytes" if in_graphs else ""
            count = len(can_change)
            rows_of = f"One row of each of {count} tables takes" if count > 1 else "One row takes"
            raise ValueError(
                f"cache: {self.nbytes} bytes are too few. {rows_of} {least} bytes with its"
                f" optimizer state and {BYTES_OF_SLOT} bytes for its id{in_use}. Pass at least"
                f" {least + in_graphs} bytes."
            )
        return can_change, self.nbytes - in_graphs

    def _shares(self, changed: Mapping[CachedRows, Need]) -> dict[CachedRows, int]:
        needs, nbytes = self._open(changed)
        bounds = [(need.slot_bytes, need.nbytes) for need in needs.values()]
        return dict(zip(needs, even_shares(bounds, nbytes), strict=True))


def even_shares(bounds: Sequence[tuple[int, int]], total: int) -> list[int]:
    """Divides a total as evenly as the (minimum, maximum) of each share in `bounds` allows.

    The total must reach the sum of minimums. Bytes beyond the sum of maximums are divided evenly.
    """

    def shares(level: int) -> list[int]:
        """The shares if each is `level`, as far as its bounds allow."""
        return [min(max(level, least), most) for least, most in bounds]

    level = bisect_right(range(total + 1), total, key=lambda level: sum(shares(level))) - 1
    found = shares(level)
    spare = (total - sum(found)) // max(1, len(found))
    return [share + spare for share in found]
