"""Request: rows that ranks request from each other at a lookup, with counts first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speedtorch.parallel.calls import END, Kind, are_counts
from speedtorch.parallel.lookup_request import LookupRequest, LookupRound
from speedtorch.parallel.ranks import Asked, divided
from speedtorch.plan.host_copy import HostCopy
from speedtorch.step.trained_rows import Bags

__all__ = ["CountedRound", "Request"]

_Counts = list[list[int]]


class CountedRound(LookupRound["Request"]):
    """Several lookups with one exchange of counts and one of ids."""

    _told: HostCopy | None = None
    """The counts of this rank, `[lookups * size]`; unless ranks meet beside the device, the words
    of all ranks follow."""

    def tell(self) -> None:
        """Sends each rank the numbers of rows that this rank requests.

        Ranks that meet beside the device only compare their lookups: the CPU has no counts yet.
        """
        if self._told is None and not self.is_asked:
            if self._ranks.meets_beside_the_device:
                first, calls = self._requests[0], [request.call for request in self._requests]
                self._ranks.meet(first.name, calls, first.ids.counts.device)
            self._told = self._begun(self._requests)

    def _begun(self, requests: Sequence[Request]) -> HostCopy:
        counts = [request.ids.counts for request in requests]
        own = counts[0] if len(counts) == 1 else torch.cat(counts)
        if self._ranks.meets_beside_the_device:
            return HostCopy(own)
        words = self._ranks.words([request.call.code for request in requests], own.device).clone()
        words[:, : len(requests)] += own.view(len(requests), -1).t() + 1
        others = self._ranks.exchanged(requests[0].name, words)[:, : len(requests) + 1]
        told = HostCopy(torch.cat([own, others.reshape(-1)]))
        if own.is_cpu:  # the words are complete: raises at once if the lookups differ
            self._counts(requests, told)
        return told

    def _counts(self, requests: Sequence[Request], told: HostCopy) -> tuple[_Counts, _Counts]:
        """Per lookup and rank the numbers of rows to send and to receive; -1 if ids are bad.

        Raises DisagreementError on all ranks unless all are at the same lookups now.
        """
        name, codes = requests[0].name, [request.call.code for request in requests]
        size, length = self._ranks.size, len(codes) * self._ranks.size
        if self._ranks.meets_beside_the_device:
            own = told.read()
            apart = [zip(codes, own[rank::size], strict=True) for rank in range(size)]
            words = [[*(code + count + 1 for code, count in each), END] for each in apart]
            found = self._ranks.met(name, words)
        else:
            own = self._ranks.read(name, told)
            found = divided(own[length:], len(codes) + 1)
        given = [[words[k] - code - 1 for words in found] for k, code in enumerate(codes)]
        if any(words[-1] != END for words in found) or not all(map(are_counts, given)):
            raise self._ranks.differing(name, found)
        return given, divided(own[:length], size)

    def _exchange(self, requests: Sequence[Request]) -> None:
        """As LookupRound._exchange; sends no ids of a lookup with bad ids on some rank."""
        try:
            given, got = self._counts(requests, self._told or self._begun(requests))
            lookups = list(zip(requests, given, got, strict=True))
            for request, counts, _ in lookups:
                if bad := [rank for rank, count in enumerate(counts) if count < 0]:
                    request.take(bad)
            if good := [each for each in lookups if min(each[1]) >= 0]:
                asking, given, got = map(list, zip(*good, strict=True))
                sent = [r.ids.sent[: sum(counts)] for r, counts in zip(asking, got, strict=True)]
                ids = self._ranks.exchanged_jointly(requests[0].name, sent, given, got)
                for request, asked in zip(asking, map(Asked, ids, given, got), strict=True):
                    request.take(asked)
        except RuntimeError as error:
            for request in requests:
                request.take(error)


class Request(LookupRequest):
    """The unique rows of a lookup, and the rows that ranks request from each other.

    The number of rows is on the device at once. ask() waits for the counts of the other ranks and
    sets `asked`.
    """

    kind, round_type = Kind.COUNTS, CountedRound
    _error: Exception | None = None

    def take(self, answer: Asked | list[int] | Exception) -> None:
        """Sets the requested rows, the ranks with bad ids, or the error of the exchange."""
        if isinstance(answer, Asked):
            self.asked = answer
        else:
            self._error = answer if isinstance(answer, Exception) else self.bad_ids(answer)

    def summed(self, gradient: Tensor, bags: Bags | None) -> Tensor:
        """As LookupRequest.summed."""
        return self.ids.summed(gradient, bags, sum(self.asked.got))

    def ask(self) -> None:
        """As LookupRequest.ask."""
        self.round.ask()
        if self._error is not None:
            raise self._error

    def with_padding(self, rows: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """As LookupRequest.with_padding."""
        places, count = self.places, len(rows)
        if count == 0:  # stays in the graph: the backward is a collective call of all ranks
            return places, torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))])
        unique = self.ids.unique[:count]
        place = torch.searchsorted(unique, number).clamp_(max=count - 1)
        is_padding = (places == place) & (unique[place] == number)
        return places.where(~is_padding, count), torch.cat([rows, rows[place].unsqueeze(0)])
