"""LookupRequest: what ranks ask each other for at a lookup; LookupRound: at several at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from torch import Tensor

from speedtorch.parallel.calls import Call, Kind
from speedtorch.parallel.lookup_turn import LookupTurn
from speedtorch.parallel.ranks import LOOKUPS, Asked, Ranks
from speedtorch.parallel.sharded_ids import ShardedIds
from speedtorch.step.trained_rows import Bags

__all__ = ["Lookup", "LookupRequest", "LookupRound", "in_rounds"]


class Lookup(NamedTuple):
    """A lookup of a table."""

    name: str
    """What errors call the module."""
    table: int
    """The number of the table."""
    turn: LookupTurn
    ids: ShardedIds
    number: int
    """Among the lookups of the table."""


class LookupRequest(ABC):
    """The unique rows of a lookup, and what ranks ask each other for: `asked`, after ask()."""

    kind: ClassVar[Kind]
    round_type: ClassVar[type[LookupRound[Any]]]
    round: LookupRound[Any]
    asked: Asked

    def __init__(self, lookup: Lookup) -> None:
        self.name, table, self.turn, self.ids, self.lookup = lookup
        self.call = Call(self.kind, table)

    def join(self, to: LookupRound[Any]) -> None:
        """Is told and asked with the other requests of a round."""
        self.round = to

    @property
    def most_at_once(self) -> int:
        """The most lookups of a round."""
        return LOOKUPS

    @property
    def places(self) -> Tensor:
        """Where the rows of the ids are among the rows that come."""
        return self.ids.places

    def own_error(self) -> Exception | None:
        """Why this rank has no ids, or what is wrong with them."""
        return self.turn.error or self.ids.out_of_range(self.name, self.turn.ids)

    def bad_ids(self, ranks: list[int]) -> Exception:
        """The error about ids of these ranks."""
        return self.own_error() or IndexError(
            f"{self.name}: an id on ranks {ranks} is out of range, or no integer; no row was moved"
        )

    @abstractmethod
    def ask(self) -> None:
        """Asks the other ranks; raises on all of them what is wrong with ids on one of them."""

    @abstractmethod
    def summed(self, gradient: Tensor, bags: Bags | None) -> Tensor:
        """The gradient of a lookup's result, added up for each of the rows that come."""

    @abstractmethod
    def with_padding(self, rows: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """The places, and the rows with the padding's as the last, whose number is given."""


_Request = TypeVar("_Request", bound=LookupRequest)


class LookupRound(ABC, Generic[_Request]):
    """Lookups that ranks compare at once, and whose ids they exchange at once.

    Args:
        requests: Of the lookups, of one table or of several tables.
        ranks: The ranks that own the rows.
    """

    is_asked = False
    """Whether the ids were exchanged, or cannot be."""

    def __init__(self, requests: Sequence[_Request], ranks: Ranks) -> None:
        self._requests, self._ranks = requests, ranks
        for request in requests:
            request.join(self)

    def tell(self) -> None:
        """Tells each rank what can be told without waiting for the device: by default all.

        Raises DisagreementError on all ranks if some of them are at other lookups.
        """
        self.ask()

    def ask(self) -> None:
        """Asks the other ranks, once; each request has its answer then."""
        if not self.is_asked:
            self.is_asked = True
            requests, self._requests = self._requests, ()  # which have this
            self._exchange(requests)

    @abstractmethod
    def _exchange(self, requests: Sequence[_Request]) -> None:
        """Exchanges the ids of the requests."""


def in_rounds(requests: Sequence[LookupRequest], ranks: Ranks) -> None:
    """Lets the first request that is told or asked do so for all, or for as many as fit."""
    while requests:
        first = requests[0]
        alike = [each for each in requests if type(each) is type(first)][: first.most_at_once]
        first.round_type(alike, ranks)
        requests = [each for each in requests if each not in alike]
