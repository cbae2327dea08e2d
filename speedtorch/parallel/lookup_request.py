"""LookupRequest: rows that ranks request at one lookup; LookupRound: at several lookups at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from speedtorch.nn.shared_lookups import Ids, NoIds
from speedtorch.parallel.calls import Call, Kind
from speedtorch.parallel.ranks import LOOKUPS, Ranks, RequestedRows
from speedtorch.parallel.sharded_ids import ShardedIds
from speedtorch.plan.planned_batch import SeenIds
from speedtorch.step.trained_rows import Bags

__all__ = ["Lookup", "LookupRequest", "LookupRound", "group_in_rounds"]


class Lookup:
    """One lookup of a table, recognized by its tensor of ids and the tensor's version.

    Args:
        name: The module's name in errors.
        table: The number of the table.
        number: The lookup's number among the table's lookups since the last error.
        ids: Ids of the whole table, of any shape. An id out of range names no row.
        device: The device of a step's rows.
        is_ahead: Whether the lookup is announced or prefetched.
    """

    is_used = False
    """Whether a step has looked up these ids."""

    def __init__(
        self,
        name: str,
        table: int,
        number: int,
        ids: Ids,
        device: torch.device,
        *,
        is_ahead: bool,
    ) -> None:
        self.name, self.table, self.number, self.is_ahead = name, table, number, is_ahead
        self.error: Exception | None = None
        if isinstance(ids, NoIds):
            self.error, ids = ids.error, torch.tensor([-1])
        # Ids on the CPU are copied: nothing waits for the copy, and NumPy cannot write to it.
        copied = SeenIds(ids, device, unread=ids.is_cuda)
        self._seen = [SeenIds(ids, device, unread=True), copied]
        self.ids = copied.values

    def mark_used(self) -> None:
        """Sets `is_used`."""
        self.is_used = True

    def matches(self, ids: Ids) -> bool:
        """Whether `ids` is the same tensor object, unchanged since."""
        return isinstance(ids, Tensor) and all(seen.matches(ids) for seen in self._seen)


class LookupRequest(ABC):
    """The unique rows of a lookup, and after exchange_ids() the rows that all ranks request."""

    kind: ClassVar[Kind]
    kind_ahead: ClassVar[Kind]
    """`kind`, for an announced or prefetched lookup."""
    round_type: ClassVar[type[LookupRound[Any]]]
    round: LookupRound[Any]
    requested: RequestedRows
    fault: Tensor
    """With a capacity, the fault code of all ranks, `[1]`, on the device; 0: no fault."""

    def __init__(self, lookup: Lookup, ids: ShardedIds) -> None:
        self.lookup, self.ids, self.name = lookup, ids, lookup.name
        self.call = Call(self.kind_ahead if lookup.is_ahead else self.kind, lookup.table)

    def join(self, to: LookupRound[Any]) -> None:
        """Joins a round, which exchanges the ids of all its requests."""
        self.round = to

    @property
    def max_lookups(self) -> int:
        """The maximum number of lookups in a round."""
        return LOOKUPS

    @property
    def places(self) -> Tensor:
        """The position of each id's row among the received rows."""
        return self.ids.places

    def own_error(self) -> Exception | None:
        """The error of this rank's ids; None if the ids are valid."""
        return self.lookup.error or self.ids.out_of_range(self.name, self.lookup.ids)

    def bad_ids(self, ranks: list[int]) -> Exception:
        """The error about ids of these ranks."""
        return self.own_error() or IndexError(
            f"{self.name}: ids of ranks {ranks} are out of range or not integers. No row was moved."
        )

    @abstractmethod
    def exchange_ids(self) -> None:
        """Exchanges the ids of the round; bad ids on one rank raise on all ranks."""

    @abstractmethod
    def summed(self, gradient: Tensor, bags: Bags | None) -> Tensor:
        """Sums the gradient of a lookup's result for each received row."""

    @abstractmethod
    def with_padding(self, rows: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Places and rows; row `number`, which is the padding's, is appended as the last."""


_Request = TypeVar("_Request", bound=LookupRequest)


class LookupRound(ABC, Generic[_Request]):
    """Lookups with one comparison among the ranks and one exchange of ids.

    Args:
        requests: The requests of lookups of one or several tables.
        ranks: The ranks that own the rows.
    """

    is_exchanged = False
    """Whether the exchange of ids has been tried."""

    def __init__(self, requests: Sequence[_Request], ranks: Ranks) -> None:
        self._requests, self._ranks = requests, ranks
        for request in requests:
            request.join(self)

    def send_counts(self) -> None:
        """Starts the exchange of ids without a wait for the device, such as by sending counts.

        A round without counts exchanges its ids here, which needs no such wait.

        Raises DisagreementError on all ranks if the ranks are at different lookups.
        """
        self.exchange_ids()

    def exchange_ids(self) -> None:
        """Exchanges the ids, once, and sets the result of each request."""
        if not self.is_exchanged:
            self.is_exchanged = True
            requests, self._requests = self._requests, ()  # no reference cycle: requests have this
            self._exchange(requests)

    @abstractmethod
    def _exchange(self, requests: Sequence[_Request]) -> None:
        """Exchanges the ids of the requests."""


def group_in_rounds(requests: Sequence[LookupRequest], ranks: Ranks) -> None:
    """Groups requests of one type into rounds of at most `max_lookups` requests."""
    while requests:
        first = requests[0]
        alike = [other for other in requests if type(other) is type(first)][: first.max_lookups]
        first.round_type(alike, ranks)
        requests = [request for request in requests if request not in alike]
