"""JoinedRows: the rows of a step with many lookups, in the order in which they joined."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from speedtorch.ops.functions import append_ids

__all__ = ["JoinedRows"]


class JoinedRows(NamedTuple):
    """Rows that many lookups of a step have loaded on the CPU, in memory with space for more.

    A lookup appends its new rows without a copy of the others, unless the memory is full.
    """

    rows: list[Tensor]
    """The step's rows, with the padding row, and then the rows that joined later."""
    ids: Tensor
    """The ids of these rows."""
    table: Tensor
    """The hash table of the ids; see append_ids."""
    first: int
    """The number of rows of the step before others joined."""
    size: int
    """The number of rows."""

    @classmethod
    def of(cls, rows: list[Tensor], ids: Tensor, padding: int | None) -> JoinedRows:
        """The rows of a step: ids ascend, and the padding row is the last."""
        if padding is not None:
            ids = torch.cat([ids, ids.new_tensor([padding])])
        count = len(ids)
        return cls(rows, ids, ids[:0], count, count)

    def with_space(self, count: int) -> JoinedRows:
        """The same rows in memory that has space for `count` more."""
        if len(self.table) > 0 and self.size + count <= len(self.ids):
            return self
        space = 1 << (2 * (self.size + count) - 1).bit_length()
        (ids,) = _longer([self.ids], space, self.size)
        rows, table = _longer(self.rows, space, self.size), ids.new_full((2 * space + 1,), -1)
        return self._replace(rows=rows, ids=ids, table=table)

    def append(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Finds the places of unique ids; returns them, and the new ids among them.

        New ids get the places from `size` on. The caller loads their rows to these places and then
        continues with a larger `size`.
        """
        places, more = append_ids(self.table, self.ids, self.size, ids)
        return places, more


def _longer(rows: list[Tensor], space: int, count: int) -> list[Tensor]:
    longer = [each.new_empty((space, *each.shape[1:])) for each in rows]
    for to, each in zip(longer, rows, strict=True):
        to[:count] = each[:count]
    return longer
