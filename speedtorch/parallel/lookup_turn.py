"""LookupTurn: how a lookup that was planned is known when it comes."""

from __future__ import annotations

import torch
from torch import Tensor

from speedtorch.nn.shared_lookups import Ids, NoIds
from speedtorch.plan.planned_batch import SeenIds

__all__ = ["LookupTurn"]


class LookupTurn:
    """The turn of one lookup, known by its tensor and what that holds.

    Args:
        ids: of the whole table, of any shape; an id that is out of range stands for none.
        device: where rows are held.
    """

    has_come = False

    def __init__(self, ids: Ids, device: torch.device) -> None:
        self.error: Exception | None = None
        if isinstance(ids, NoIds):
            self.error, ids = ids.error, torch.tensor([-1])
        # A copy of those on the CPU: nothing waits for it, and NumPy cannot have written to it.
        copied = SeenIds(ids, device, unread=ids.is_cuda)
        self._seen = [SeenIds(ids, device, unread=True), copied]
        self.ids = copied.values

    def come(self) -> None:
        """Says that the lookup has come."""
        self.has_come = True

    def is_of(self, ids: Ids) -> bool:
        """Whether it is one of this very tensor, which was not written to."""
        return isinstance(ids, Tensor) and all(each.are(ids) for each in self._seen)
