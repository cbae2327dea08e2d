"""PlannedLookup: recognizes a planned lookup by its tensor of ids."""

from __future__ import annotations

import torch
from torch import Tensor

from speedtorch.nn.shared_lookups import Ids, NoIds
from speedtorch.plan.planned_batch import SeenIds

__all__ = ["PlannedLookup"]


class PlannedLookup:
    """One planned lookup, recognized by its tensor and the tensor's version.

    Args:
        ids: Ids of the whole table, of any shape. An id out of range names no row.
        device: The device of a step's rows.
    """

    is_used = False
    """Whether a step has looked up these ids."""

    def __init__(self, ids: Ids, device: torch.device) -> None:
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
