"""JoinedRows: the rows of a step with many lookups, in the order in which they joined."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["JoinedRows"]


class JoinedRows(NamedTuple):
    """Rows that many lookups of a step have loaded on the CPU, in memory with space for more.

    A lookup appends its new rows without a copy of the others, unless the memory is full; see
    append_batch.
    """

    rows: list[Tensor]
    """The step's rows, with the padding row, and then the rows that joined later."""
    ids: Tensor
    """The ids of these rows."""
    table: Tensor
    """The hash table of the ids, initially empty."""
    first: int
    """The number of rows of the step before others joined."""
    size: int
    """The number of rows."""

    @classmethod
    def of(cls, rows: list[Tensor], ids: Tensor, padding: int | None) -> JoinedRows:
        """The rows of a step: ids ascend, and the padding row is the last."""
        # A copy, because a lookup may name a view of the step's ids.
        ids = torch.cat([ids, ids.new_tensor([] if padding is None else [padding])])
        count = len(ids)
        return cls(rows, ids, ids[:0], count, count)

    def with_batch(self, more: Tensor, longer: list[Tensor]) -> JoinedRows:
        """The rows with the new ids `more`, in the memory `longer` if it was too small."""
        if longer:
            ids, table, *rows = longer
            return JoinedRows(rows, ids, table, self.first, self.size + len(more))
        return self._replace(size=self.size + len(more))
