"""Together: lookups of several tables that ranks compare and ask for at once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from speedtorch.parallel.counted_requests import Request
from speedtorch.parallel.fixed_requests import FixedRequest
from speedtorch.parallel.ranks import Ranks

__all__ = ["AnyRequest", "OfTable", "Together", "in_rounds", "together"]

AnyRequest: TypeAlias = Request | FixedRequest


def in_rounds(requests: Sequence[AnyRequest], ranks: Ranks) -> None:
    """Lets the first request that is told or asked do so for all, or for as many as fit."""
    kinds: dict[type, list[AnyRequest]] = {}
    for request in requests:
        kinds.setdefault(request.in_rounds_of, []).append(request)
    for kind, alike in kinds.items():
        most = min(request.most_at_once for request in alike)
        for begin in range(0, len(alike), most):
            kind(alike[begin : begin + most], ranks)


class Table(Protocol):
    """Requests of a table; Requests documents the methods."""

    @property
    def shared_by(self) -> tuple[Ranks, Hashable]: ...

    def join(self, others: Together | None) -> None: ...

    def made(self, parts: Sequence[Tensor], *, trains: bool) -> list[AnyRequest]: ...


class OfTable(NamedTuple):
    """Lookups of a table."""

    table: Table
    parts: Sequence[Tensor]
    """The ids of each lookup."""
    trains: bool
    """Whether the lookups are for a step."""


class Together:
    """Lookups of several tables; the first table that makes its requests makes those of all."""

    def __init__(self, lookups: Sequence[OfTable], ranks: Ranks) -> None:
        self._lookups, self._ranks = lookups, ranks
        self._made: dict[Table, list[AnyRequest]] | None = None

    def take(self, table: Table) -> list[AnyRequest] | None:
        """The requests of a table, once."""
        if self._made is None:
            self._made = {each: each.made(ids, trains=to) for each, ids, to in self._lookups}
            in_rounds([each for made in self._made.values() for each in made], self._ranks)
        return self._made.pop(table, None)


@contextmanager
def together(lookups: Sequence[OfTable]) -> Iterator[None]:
    """Within this, each table makes, announces or plans these lookups.

    The tables of the same ranks do so in one exchange.
    """
    alike: dict[tuple[Ranks, Hashable], list[OfTable]] = {}
    for each in lookups:
        alike.setdefault(each.table.shared_by, []).append(each)
    try:
        for (ranks, _), some in alike.items():
            joined = Together(some, ranks)
            for each in some:
                each.table.join(joined)
        yield
    finally:
        for each in lookups:
            each.table.join(None)
