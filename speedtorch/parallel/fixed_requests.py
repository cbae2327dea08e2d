"""FixedRequest: rows that ranks request from each other in blocks of one size, without counts.

A block has as many ids as a fair share of the capacity (fair_shares.py). The requested rows are
first. The other ids of a block stand for no row, and their gradients are zeros. The last word of a
block is the fault code of its ids, so that all ranks know about bad ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speedtorch.ops.functions import _ops
from speedtorch.parallel.calls import Kind
from speedtorch.parallel.fair_shares import FairShares
from speedtorch.parallel.fault_consensus import FaultConsensus
from speedtorch.parallel.lookup_request import Lookup, LookupRequest, LookupRound
from speedtorch.parallel.ranks import LOOKUPS, RequestedRows
from speedtorch.parallel.sharded_ids import ShardedIds
from speedtorch.plan.fixed_size_batch import BAD_IDS, raises_at_once
from speedtorch.step.fixed_blocks import OTHER_MODULE, rank_error
from speedtorch.step.trained_rows import Bags

__all__ = ["FixedRequest", "FixedRound"]


class FixedRound(LookupRound["FixedRequest"]):
    """Several lookups with one exchange of their blocks of ids; nothing waits for the device.

    Unless ranks compare their lookups before the exchange (FaultConsensus.compares_at_once), each
    request keeps on the device whether the lookups differ.
    """

    def _exchange(self, requests: Sequence[FixedRequest]) -> None:
        first, sent = requests[0], [request.ids.sent for request in requests]
        differs = first.consensus.compare_calls([request.call for request in requests])
        if len(sent) == 1:
            received = [self._ranks.all_to_all(first.name, sent[0])]
        else:
            joint = self._ranks.all_to_all(first.name, torch.cat(sent, 1))
            parts = torch.split(joint, [len(blocks[0]) for blocks in sent], 1)
            received = [blocks.contiguous() for blocks in parts]
        for request, blocks in zip(requests, received, strict=True):
            request.set_blocks(blocks, differs)


class FixedRequest(LookupRequest):
    """The unique rows of a lookup, and the blocks of rows that ranks request from each other.

    Args:
        lookup: The lookup.
        ids: The lookup's ids, with a share.
        shares: The sizes of the blocks.
        no_row: The position of a block's unused ids: the padding's row, or the position after this
            rank's last row, which reads as zeros. Neither is trained.
        consensus: The fault codes of the ranks that own the rows.
    """

    kind, kind_ahead, round_type = Kind.BLOCKS, Kind.BLOCKS_AHEAD, FixedRound

    def __init__(
        self,
        lookup: Lookup,
        ids: ShardedIds,
        shares: FairShares,
        no_row: int,
        consensus: FaultConsensus,
    ) -> None:
        super().__init__(lookup, ids)
        self.consensus, self._shares, self._no_row = consensus, shares, no_row

    @property
    def max_lookups(self) -> int:
        """1 unless ranks compare their lookups before the exchange.

        A joint exchange of different lookups would have different sizes on the ranks.
        """
        return LOOKUPS if self.consensus.compares_at_once else 1

    def set_blocks(self, blocks: Tensor, differs: Tensor | None) -> None:
        """Sets the received blocks of all ranks.

        `differs`: whether the ranks' lookups differ, `[1]`; None: the lookups are the same.
        """
        self._blocks = blocks
        ids, self.fault = _ops.requested_ids(blocks, self._no_row, differs)
        counts = [self._shares.rows] * self._shares.sharding.ranks
        self.requested = RequestedRows(ids, counts, counts)

    def exchange_ids(self) -> None:
        """Like LookupRequest.exchange_ids; on a GPU faults are found later, and no row changes."""
        self.round.exchange_ids()
        if raises_at_once(self.requested.ids.device) and (fault := int(self.fault)):
            if fault != OTHER_MODULE:
                bad = (self._blocks[:, -1] == BAD_IDS).nonzero()[:, 0].tolist()
                if bad or self.own_error() is not None:
                    raise self.bad_ids(bad)
            raise rank_error(self.name, fault, "Nothing has changed.")

    def own_error(self) -> Exception | None:
        """Like LookupRequest.own_error, or an error if ids name too many rows of a rank."""
        if (bad := super().own_error()) is not None:
            return bad
        shares = self._shares
        named, owner = map(int, self.ids.counts.max(0))
        return shares.error(self.name, named, owner) if named > shares.rows else None

    def summed(self, gradient: Tensor, bags: Bags | None) -> Tensor:
        """See LookupRequest.summed."""
        # One row more than ids: the last row is zeros, the gradient of a block's unused ids.
        most = self.ids.numbers.numel() + 1
        return self.ids.summed(gradient, bags, most).index_select(0, self.ids.entries)

    def with_padding(self, rows: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Like LookupRequest.with_padding. Without the padding's id, the first row is appended."""
        places, is_padding = self.places, self.ids.numbers == number
        row = rows[:1]
        if places.numel():
            row = rows.index_select(0, places.where(is_padding, 0).max().view(1))
        return places.where(~is_padding, len(rows)), torch.cat([rows, row])
