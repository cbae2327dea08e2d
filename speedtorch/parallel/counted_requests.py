"""CountedRequest: rows that ranks request from each other at a lookup, after their counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speedtorch.parallel.calls import END, Kind, are_counts
from speedtorch.parallel.lookup_request import LookupRequest, LookupRound
from speedtorch.parallel.ranks import RequestedRows, split_evenly
from speedtorch.plan.host_copy import HostCopy
from speedtorch.step.trained_rows import Bags

__all__ = ["CountedRequest", "CountedRound"]

_Counts = list[list[int]]


class CountedRound(LookupRound["CountedRequest"]):
    """Several lookups with one exchange of counts and one of ids."""

    _gathered: HostCopy | None = None
    """The counts of this rank, `[lookups * size]`; if ranks have no barrier, the words of all
    ranks follow."""

    def send_counts(self) -> None:
        """Starts to send each rank the number of rows that this rank requests from it.

        Ranks with a barrier only start to copy their counts to the CPU. They compare their lookups
        when they exchange the ids.
        """
        if self._gathered is None and not self.is_exchanged:
            self._gathered = self._gather_counts(self._requests)

    def _gather_counts(self, requests: Sequence[CountedRequest]) -> HostCopy:
        counts = [request.ids.counts for request in requests]
        own = counts[0] if len(counts) == 1 else torch.cat(counts)
        if self._ranks.has_barrier:
            return HostCopy(own)
        calls, numbers = [request.call for request in requests], own.view(len(requests), -1).t() + 1
        words = self._ranks.gather_codes(requests[0].name, calls, own.device, numbers)
        gathered = HostCopy(torch.cat([own, words.reshape(-1)]))
        if own.is_cpu:  # the words are complete: raises at once if the lookups differ
            self._read_counts(requests, gathered)
        return gathered

    def _read_counts(
        self, requests: Sequence[CountedRequest], gathered: HostCopy
    ) -> tuple[_Counts, _Counts]:
        """The numbers of rows to send and to receive, per lookup and rank; -1 if ids are bad.

        Raises DisagreementError on all ranks unless all are at the same lookups now.
        """
        name, codes = requests[0].name, [request.call.code for request in requests]
        size, length = self._ranks.size, len(codes) * self._ranks.size
        if self._ranks.has_barrier:
            own = gathered.read()
            counts = [own[rank::size] for rank in range(size)]
            words = [[*(c + n + 1 for c, n in zip(codes, to, strict=True)), END] for to in counts]
            found = self._ranks.exchange_words(name, words)
        else:
            own = self._ranks.read(name, gathered)
            found = split_evenly(own[length:], len(codes) + 1)
        sent = [[words[k] - code - 1 for words in found] for k, code in enumerate(codes)]
        if any(words[-1] != END for words in found) or not all(map(are_counts, sent)):
            raise self._ranks.disagreement(name, found)
        return sent, split_evenly(own[:length], size)

    def _exchange(self, requests: Sequence[CountedRequest]) -> None:
        """Like LookupRound._exchange; sends no ids of a lookup with bad ids on some rank."""
        try:
            gathered = self._gathered or self._gather_counts(requests)
            lookups = list(zip(requests, *self._read_counts(requests, gathered), strict=True))
            for request, counts, _ in lookups:
                if bad := [rank for rank, count in enumerate(counts) if count < 0]:
                    request.set_result(bad)
            if good := [lookup for lookup in lookups if min(lookup[1]) >= 0]:
                valid, sent, received = map(list, zip(*good, strict=True))
                own = [r.ids.sent[: sum(counts)] for r, counts in zip(valid, received, strict=True)]
                # A rank sends as many ids as it receives rows.
                ids = self._ranks.all_to_all_jointly(requests[0].name, own, sent, received)
                for request, *rows in zip(valid, ids, sent, received, strict=True):
                    request.set_result(RequestedRows(*rows))
        except RuntimeError as error:
            for request in requests:
                request.set_result(error)


class CountedRequest(LookupRequest):
    """The unique rows of a lookup, and the rows that ranks request from each other.

    The number of rows is on the device at once. exchange_ids() waits for the counts of the other
    ranks and sets `requested`.
    """

    kind, kind_ahead, round_type = Kind.COUNTS, Kind.COUNTS_AHEAD, CountedRound
    _error: Exception | None = None

    def set_result(self, result: RequestedRows | list[int] | Exception) -> None:
        """Sets the requested rows, the ranks with bad ids, or the error of the exchange."""
        if isinstance(result, RequestedRows):
            self.requested = result
        else:
            self._error = result if isinstance(result, Exception) else self.bad_ids(result)

    def summed(self, gradient: Tensor, bags: Bags | None) -> Tensor:
        """See LookupRequest.summed."""
        return self.ids.summed(gradient, bags, sum(self.requested.received_counts))

    def exchange_ids(self) -> None:
        """See LookupRequest.exchange_ids."""
        self.round.exchange_ids()
        if self._error is not None:
            raise self._error

    def with_padding(self, rows: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """See LookupRequest.with_padding."""
        places, count = self.places, len(rows)
        if count == 0:  # keep the node in the graph: all ranks call the backward together
            return places, torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))])
        unique = self.ids.unique[:count]
        place = torch.searchsorted(unique, number).clamp_(max=count - 1)
        is_padding = (places == place) & (unique[place] == number)
        return places.where(~is_padding, count), torch.cat([rows, rows[place].unsqueeze(0)])
