"""RequestMaker: makes the requests of a table's lookups, with those of other tables if told to."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from speedtorch.nn.shared_lookups import Ids, NoIds
from speedtorch.parallel.agreement import Agreement
from speedtorch.parallel.block_cyclic import BlockCyclic
from speedtorch.parallel.counted_requests import Request
from speedtorch.parallel.fair_shares import FairShares
from speedtorch.parallel.fixed_requests import FixedRequest
from speedtorch.parallel.lookup_request import Lookup, LookupRequest, in_rounds
from speedtorch.parallel.lookup_turn import LookupTurn
from speedtorch.parallel.ranks import Ranks
from speedtorch.parallel.sharded_ids import ShardedIds
from speedtorch.step.exchange import Exchange

__all__ = ["JointRequests", "RequestMaker"]


class RequestMaker:
    """Makes the requests of a table's lookups.

    Args:
        exchange: of the rows that this rank owns.
        dealt: which rank owns which row.
        ranks: that own them.
        number: of the table, the same on all ranks.
        fixed: for an exchange with a capacity what its FixedRequests are made with.
    """

    def __init__(
        self,
        exchange: Exchange,
        dealt: BlockCyclic,
        ranks: Ranks,
        number: int,
        fixed: tuple[FairShares, int, Agreement] | None,
    ) -> None:
        self._exchange, self._dealt, self._ranks = exchange, dealt, ranks
        self._number, self._fixed = number, fixed
        self._distances = dealt.distances()
        self._others: JointRequests | None = None
        self.restart()

    def restart(self) -> None:
        """Counts lookups from 0 again: before an error some ranks may have counted one more."""
        self._lookups = itertools.count()

    @property
    def shared_by(self) -> tuple[Ranks, torch.device]:
        """The ranks that own the rows, and where the rows of a step are."""
        return self._ranks, self._exchange.device

    def distances(self) -> Tensor:
        """Those of the blocks of rows, on the device, where they are from the first lookup on."""
        if (device := self._exchange.device) != self._distances.device:
            self._distances = self._distances.to(device)
        return self._distances

    def join(self, others: JointRequests | None) -> None:
        """Makes the next requests with those of other tables; None: alone."""
        self._others = others
        self.distances()

    def requests(self, parts: Sequence[Ids], *, trains: bool = True) -> list[LookupRequest]:
        """The requests of lookups, with those of the tables of join() if there are any."""
        made = None if self._others is None else self._others.take(self)
        if made is None:
            in_rounds(made := self.made(parts, trains), self._ranks)
        return made

    def made(self, parts: Sequence[Ids], trains: bool) -> list[LookupRequest]:
        """New requests of lookups, which no rank knows yet."""
        fixed, device = self._fixed if trains else None, self._exchange.device
        share, distances = -1 if fixed is None else fixed[0].rows, self.distances()
        made: list[LookupRequest] = []
        for ids in parts:
            error = ids.error if isinstance(ids, NoIds) else None
            turn = LookupTurn(torch.tensor([-1]) if isinstance(ids, NoIds) else ids, device)
            there = turn.ids.to(device, non_blocking=True)
            sharded = ShardedIds(there, self._dealt, distances, share, error)
            number, name = next(self._lookups), self._exchange.name
            lookup = Lookup(name, self._number, turn, sharded, number)
            made.append(Request(lookup) if fixed is None else FixedRequest(lookup, *fixed))
        return made


class JointRequests:
    """Lookups of several tables; the first table that makes its requests makes those of all."""

    def __init__(self, lookups: Mapping[RequestMaker, tuple[Sequence[Ids], bool]]) -> None:
        self._lookups = lookups
        self._made: dict[RequestMaker, list[LookupRequest]] | None = None

    def take(self, maker: RequestMaker) -> list[LookupRequest] | None:
        """The requests of a table, once."""
        if self._made is None:
            self._made = {each: each.made(*lookups) for each, lookups in self._lookups.items()}
            in_rounds([each for made in self._made.values() for each in made], maker.shared_by[0])
        return self._made.pop(maker, None)
