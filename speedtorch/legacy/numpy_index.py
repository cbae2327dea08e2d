"""NumPy's indexing on tensors: `data[index]` as the ids of whole rows, or as single elements."""

from __future__ import annotations

from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtorch.legacy.batch_ids import Indexes, all_within, flat_index

__all__ = ["Index", "elements_of", "row_ids"]

Index = Indexes | slice | EllipsisType | None


def row_ids(index: Index, rows: int, device: torch.device) -> Tensor | None:
    """The ids of the rows that an index selects, in its shape; None for any other index.

    Integers of any shape from -rows on, a slice, `...` or a mask `[rows]` select whole rows.
    `device` is the device of the work on the rows; see flat_index.

    Example:
        >>> row_ids([[-1, 0]], 7, torch.device("cpu"))
        tensor([[6, 0]])
        >>> row_ids(slice(None, None, -3), 7, torch.device("cpu")).tolist()
        [6, 3, 0]
    """
    if index is None or isinstance(index, tuple):
        return None
    if isinstance(index, slice | EllipsisType):
        chosen = range(rows)[index if isinstance(index, slice) else slice(None)]
        return torch.from_numpy(np.arange(chosen.start, chosen.stop, chosen.step))
    mask = index if isinstance(index, Tensor) else None
    if mask is None and (array := np.asarray(index)).dtype.kind == "b":
        mask = torch.from_numpy(array.copy())
    if mask is not None and mask.dtype == torch.bool:
        if mask.dim() == 1 and len(mask) != rows:
            raise IndexError(f"indexes: the mask must have {rows} entries, got {len(mask)}")
        return flat_index(mask.nonzero(), None, device) if mask.dim() == 1 else None
    shape = index.shape if isinstance(index, Tensor) else np.shape(index)
    ids = flat_index(index, None, device)
    if not (ids.is_cpu and all_within(ids, rows)):
        ids = ids.long()
        ids = torch.where((ids < 0) & (ids >= -rows), ids + rows, ids)
    return ids.view(shape)


def elements_of(data: Tensor, index: Index) -> tuple[Tensor, Tensor]:
    """Flattened contiguous `data`, and the positions of the elements of `data[index]` in it."""
    shape, index = tuple(data.shape), _for_numpy(index)
    places = [np.broadcast_to(axis, shape)[index] for axis in np.indices(shape, sparse=True)]
    return data.view(-1), torch.from_numpy(np.asarray(np.ravel_multi_index(places, shape)))


def _for_numpy(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_for_numpy(part) for part in index)
    return index.cpu().numpy() if isinstance(index, Tensor) else index
