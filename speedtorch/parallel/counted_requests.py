"""Request: the rows that ranks ask each other for at a lookup, in any number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speedtorch.parallel.calls import Call, Kind
from speedtorch.parallel.lookup_turn import LookupTurn
from speedtorch.parallel.ranks import LOOKUPS, Asked, Ranks, Told
from speedtorch.parallel.sharded_ids import ShardedIds
from speedtorch.step.trained_rows import Bags

__all__ = ["CountedRound", "Request"]


class CountedRound:
    """Lookups that ranks compare at once, and whose counts and ids they exchange at once.

    Args:
        requests: Of the lookups, of one table or of several tables.
        ranks: The ranks that own the rows.
    """

    is_asked = False
    """Whether the ids were exchanged, or cannot be."""
    _told: Told | None = None

    def __init__(self, requests: Sequence[Request], ranks: Ranks) -> None:
        self._requests, self._ranks = requests, ranks
        for request in requests:
            request.join(self)

    def tell(self) -> None:
        """Tells each rank how many rows this rank will ask for; nothing waits for the device.

        Raises DisagreementError on all ranks if some of them are at other lookups.
        """
        if self._told is None and not self.is_asked:
            if self._ranks.meets_beside_the_device:
                first, calls = self._requests[0], [request.call for request in self._requests]
                self._ranks.meet(first.name, calls, first.ids.counts.device)
            self._told = self._begun(self._requests)

    def _begun(self, requests: Sequence[Request]) -> Told:
        counts = [request.ids.counts for request in requests]
        together = counts[0].view(1, -1) if len(counts) == 1 else torch.stack(counts)
        return self._ranks.tell(requests[0].name, [request.call for request in requests], together)

    def ask(self) -> None:
        """Asks the other ranks, once; each request has its answer then."""
        if self.is_asked:
            return
        self.is_asked = True
        requests, self._requests = self._requests, ()  # which have this
        try:
            told = self._told or self._begun(requests)
            answers = self._ranks.ask(told, [request.ids.sent for request in requests])
        except RuntimeError as error:
            for request in requests:
                request.take(error)
            return
        for request, answer in zip(requests, answers, strict=True):
            request.take(answer)


class Request:
    """The unique rows of a lookup, and what ranks ask each other for.

    The number of rows is on the device at once. `asked` is known after ask(), which waits for the
    counts of the other ranks.

    Args:
        name: What errors call the module.
        table: The number of the table.
        turn: Of the lookup.
        ids: Of the lookup.
        lookup: Its number among the lookups of the table.
    """

    in_rounds_of = CountedRound
    most_at_once = LOOKUPS
    round: CountedRound
    asked: Asked
    _error: IndexError | RuntimeError | None = None

    def __init__(
        self, name: str, table: int, turn: LookupTurn, ids: ShardedIds, lookup: int
    ) -> None:
        self.name, self.turn, self.ids, self.lookup = name, turn, ids, lookup
        self.call = Call(Kind.COUNTS, table)

    def join(self, to: CountedRound) -> None:
        """Is told and asked with the other requests of a round."""
        self.round = to

    def take(self, answer: Asked | list[int] | RuntimeError) -> None:
        """Takes what ranks ask for, or the ranks whose ids are bad, or why ranks cannot ask."""
        if isinstance(answer, Asked):
            self.asked = answer
        elif isinstance(answer, RuntimeError):
            self._error = answer
        else:
            self._error = self.ids.out_of_range(self.name, self.turn.ids) or IndexError(
                f"{self.name}: an id on ranks {answer} is out of range, or no integer; no row was"
                " moved"
            )

    @property
    def places(self) -> Tensor:
        """Where the rows of the ids are among the rows that come."""
        return self.ids.places

    def summed(self, gradient: Tensor, bags: Bags | None) -> Tensor:
        """The gradient of a lookup's result, added up for each of the rows that come."""
        return self.ids.summed(gradient, bags, sum(self.asked.got))

    def ask(self) -> None:
        """Asks the other ranks; IndexError on all of them if an id on one of them is bad."""
        self.round.ask()
        if self._error is not None:
            raise self._error

    def with_padding(self, rows: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """The places, and the rows with the padding's as the last, whose number is given."""
        places, count = self.places, len(rows)
        if count == 0:  # gradients of none go to their owners, too
            return places, torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))])
        unique = self.ids.unique[:count]
        place = torch.searchsorted(unique, number).clamp_(max=count - 1)
        is_padding = (places == place) & (unique[place] == number)
        return places.where(~is_padding, count), torch.cat([rows, rows[place].unsqueeze(0)])
