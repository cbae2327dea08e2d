"""FixedRequest: what ranks ask each other for in blocks of one size, without counts.

Each rank asks each for a fair share of the capacity (fair_shares.py). The first rows are those that
it names; what fills the block is none, and so are its row and its gradient. With the ids goes word
of what is wrong with them, so that all ranks know of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speedtorch.ops.functions import _ops
from speedtorch.parallel.agreement import Agreement
from speedtorch.parallel.calls import Kind
from speedtorch.parallel.fair_shares import FairShares
from speedtorch.parallel.lookup_request import Lookup, LookupRequest, LookupRound
from speedtorch.parallel.ranks import LOOKUPS, Asked
from speedtorch.plan.fixed_size_batch import BAD_IDS, raises_at_once
from speedtorch.step.fixed_blocks import OTHER_MODULE, of_ranks
from speedtorch.step.trained_rows import Bags

__all__ = ["FixedRequest", "FixedRound"]


class FixedRound(LookupRound["FixedRequest"]):
    """Lookups whose blocks of ids ranks exchange at once; nothing waits for the device.

    If ranks compare later, each request knows on the device whether they are at other lookups.
    """

    def _exchange(self, requests: Sequence[FixedRequest]) -> None:
        first, sent = requests[0], [request.ids.sent for request in requests]
        differs = first.agreement.meet([request.call for request in requests])
        if len(sent) == 1:
            told = [self._ranks.exchanged(first.name, sent[0])]
        else:
            every = self._ranks.exchanged(first.name, torch.cat(sent, 1))
            told = [each.contiguous() for each in torch.split(every, [len(n[0]) for n in sent], 1)]
        for request, blocks in zip(requests, told, strict=True):
            request.take(blocks, differs)


class FixedRequest(LookupRequest):
    """The unique rows of a lookup, and what ranks ask each other for.

    Args:
        lookup: Of ids in blocks of a share.
        shares: The blocks of rows that each rank is asked for.
        none: The id that stands for no row in a block: one of each rank's own, never trained.
        agreement: What the ranks that own the rows agree on.
    """

    kind, round_type = Kind.BLOCKS, FixedRound
    fault: Tensor
    """What is wrong on some rank, on the device: `[1]`; 0: nothing."""

    def __init__(self, lookup: Lookup, shares: FairShares, none: int, agreement: Agreement) -> None:
        super().__init__(lookup)
        self.agreement, self._shares, self._none = agreement, shares, none

    @property
    def most_at_once(self) -> int:
        """Blocks of other sizes are exchanged after a comparison only."""
        return LOOKUPS if self.agreement.compares_at_once else 1

    def take(self, told: Tensor, differs: Tensor | None) -> None:
        """Takes the blocks of all ranks.

        `differs`: whether ranks look up different tables now, `[1]`; None: they do not.
        """
        self._told = told
        ids, self.fault = _ops.requested_ids(told, self._none, differs)
        every = [self._shares.rows] * self._shares.dealt.ranks
        self.asked = Asked(ids, every, every)

    def ask(self) -> None:
        """As LookupRequest.ask; what is found later moves no row."""
        self.round.ask()
        if raises_at_once(self.asked.ids.device) and (fault := int(self.fault)):
            if fault != OTHER_MODULE:
                bad = (self._told[:, -1] == BAD_IDS).nonzero()[:, 0].tolist()
                if bad or self.own_error() is not None:
                    raise self.bad_ids(bad)
            raise of_ranks(self.name, fault, "nothing has changed")

    def own_error(self) -> Exception | None:
        """As LookupRequest.own_error, which may be that ids name too many rows."""
        if (bad := super().own_error()) is not None:
            return bad
        shares = self._shares
        named, owner = (int(each) for each in self.ids.counts.max(0))
        return shares.exceeded(self.name, named, owner) if named > shares.rows else None

    def summed(self, gradient: Tensor, bags: Bags | None) -> Tensor:
        """As LookupRequest.summed."""
        # The row behind those of all ids is zeros: the gradient of a row that is none.
        most = self.ids.numbers.numel() + 1
        return self.ids.summed(gradient, bags, most).index_select(0, self.ids.entries)

    def with_padding(self, rows: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """As LookupRequest.with_padding."""
        places, is_padding = self.places, self.ids.numbers == number
        row = rows[:1]
        if places.numel():
            row = rows.index_select(0, places.where(is_padding, 0).max().view(1))
        return places.where(~is_padding, len(rows)), torch.cat([rows, row])
