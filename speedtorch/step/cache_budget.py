"""CacheBudget: bytes of a device that the caches of several tables share."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from speedtorch.step.hot_rows import BYTES_OF_SLOT

__all__ = ["CacheBudget", "CachedRows", "Need", "even_shares"]


class Need(NamedTuple):
    """How large a cache of a table can become."""

    rows: int
    row_bytes: int
    """Of a row with its optimizer state."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: a row and its id."""
        return self.row_bytes + BYTES_OF_SLOT

    @property
    def nbytes(self) -> int:
        """Bytes of a cache of all rows."""
        return self.rows * self.slot_bytes

    def slots(self, nbytes: int) -> int:
        """The slots of a cache of so many bytes."""
        return min(self.rows, nbytes // self.slot_bytes)


class CachedRows(Protocol):
    """Rows that have a cache, such as TrainedRows."""

    @property
    def exchange(self) -> Any:
        """What moves the rows, and knows whether a CUDA graph uses them."""

    @property
    def cache_bytes(self) -> int | None:
        """The bytes that the cache was given, if there is one."""

    def cache_need(self) -> Need:
        """What a cache of all rows takes."""

    def cache(
        self, nbytes: int | None, members: Tensor | None = None, budget: CacheBudget | None = None
    ) -> None:
        """Gives the rows a cache of so many bytes."""


class CacheBudget:
    """Bytes that caches share: one row at least for each table, and then as evenly as they need.

    Optimizer state that is attached and rows that are added change what tables need, and `share()`
    divides the bytes anew. A cache that a CUDA graph uses keeps its bytes.

    Args:
        nbytes: How many there are.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._members: weakref.WeakKeyDictionary[object, tuple[CachedRows, Tensor | None]]
        self._members = weakref.WeakKeyDictionary()

    def add(self, owner: object, rows: CachedRows, members: Tensor | None = None) -> None:
        """Shares the bytes with the rows of `owner`, in place of rows that it had before.

        With `members` only rows with these ids have slots.
        """
        self._members[owner] = (rows, members)

    def remove(self, owner: object) -> None:
        """Ends add()."""
        self._members.pop(owner, None)

    def check(self, changed: Mapping[CachedRows, Need]) -> None:
        """Raises ValueError if the bytes are too few for tables with these needs."""
        self._open(changed)

    def share(self, changed: Mapping[CachedRows, Need] | None = None) -> None:
        """Gives each cache its share; one whose number of slots stays the same stays as it is.

        With `changed` as tables are about to need them. Raises ValueError if the bytes are too few;
        nothing has changed then.
        """
        changed, members = changed or {}, dict(self._members.values())
        for rows, share in self._shares(changed).items():
            before, need = rows.cache_bytes, changed.get(rows) or rows.cache_need()
            if before is None or need.slots(before) != need.slots(share):
                rows.cache(share, members[rows], self)

    def share_anew(self) -> None:
        """As share(), with caches that hold no row yet."""
        members = dict(self._members.values())
        for rows, share in self._shares({}).items():
            rows.cache(share, members[rows], self)

    def copied(self, owner: object, memo: dict[int, Any]) -> CacheBudget:
        """A budget for the copies that a deep copy makes of owners, with the bytes of those."""
        made: CacheBudget = memo.setdefault(id(self), CacheBudget(0))
        made.nbytes += self._shares({}).get(self._members[owner][0], 0)
        return made

    def _open(self, changed: Mapping[CachedRows, Need]) -> tuple[dict[CachedRows, Need], int]:
        """The tables whose caches may change, and the bytes that there are for them."""
        needs = {rows: changed.get(rows) or rows.cache_need() for rows, _ in self._members.values()}
        captured = [rows for rows in needs if rows.exchange.memory.is_captured]
        in_graphs = sum(rows.cache_bytes or 0 for rows in captured)
        can_change = {
            rows: need for rows, need in needs.items() if need.rows and rows not in captured
        }
        least = sum(need.slot_bytes for need in can_change.values())
        if least > self.nbytes - in_graphs:
            in_use = f" beside {in_graphs} bytes that CUDA graphs use" if in_graphs else ""
            count = len(can_change)
            rows_of = f"one row of each of {count} tables takes" if count > 1 else "one row takes"
            raise ValueError(
                f"cache: {self.nbytes} bytes are too few, as {rows_of} {least} bytes with its"
                f" optimizer state and {BYTES_OF_SLOT} bytes for its id{in_use}: give"
                f" {least + in_graphs} bytes or more"
            )
        return can_change, self.nbytes - in_graphs

    def _shares(self, changed: Mapping[CachedRows, Need]) -> dict[CachedRows, int]:
        needs, nbytes = self._open(changed)
        bounds = [(need.slot_bytes, need.nbytes) for need in needs.values()]
        return dict(zip(needs, even_shares(bounds, nbytes), strict=True))


def even_shares(bounds: Sequence[tuple[int, int]], total: int) -> list[int]:
    """Shares of a total, as even as the least and the most of each let them be.

    The total is at least the sum of the least. What exceeds the sum of the most is divided evenly.
    """

    def shares(level: int) -> list[int]:
        return [min(max(level, least), most) for least, most in bounds]

    level = bisect_right(range(total + 1), total, key=lambda level: sum(shares(level))) - 1
    found = shares(level)
    spare = (total - sum(found)) // max(1, len(found))
    return [share + spare for share in found]
