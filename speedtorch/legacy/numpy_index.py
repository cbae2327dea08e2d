"""NumPy's indexing on tensors: `data[index]` as the ids of whole rows, or as parts of rows."""

from __future__ import annotations

from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speedtorch.legacy.batch_ids import Indexes, all_within, flat_index
from speedtorch.ops.functions import pinned_gather, pinned_scatter

__all__ = ["Index", "parts_of", "put_parts", "row_ids", "rows_around"]

Index = Indexes | slice | EllipsisType | None

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def row_ids(index: Index, rows: int, device: torch.device) -> Tensor | None:
    """The ids of the rows that an index selects, in its shape; None for an index of several axes.

    Integers of any shape from -rows on, a slice, or a mask `[rows]` select whole rows. `device` is
    the device of the work on the rows; see flat_index.

    Example:
        >>> row_ids([[-1, 0]], 7, torch.device("cpu"))
        tensor([[6, 0]])
        >>> row_ids(slice(None, None, -3), 7, torch.device("cpu")).tolist()
        [6, 3, 0]
    """
    if index is None or isinstance(index, EllipsisType | tuple):
        return None
    if isinstance(index, slice):
        chosen = range(rows)[index]
        return torch.from_numpy(np.arange(chosen.start, chosen.stop, chosen.step))
    mask = index if isinstance(index, Tensor) else None
    if mask is None and (array := np.asarray(index)).dtype.kind == "b":
        mask = torch.from_numpy(array.copy())
    if mask is not None and mask.dtype == torch.bool:
        if mask.dim() == 1 and len(mask) != rows:
            raise IndexError(f"indexes: the mask must have {rows} entries, got {len(mask)}")
        return mask.nonzero().flatten() if mask.dim() == 1 else None
    shape = index.shape if isinstance(index, Tensor) else np.shape(index)
    ids = flat_index(index, None, device)
    if not (ids.is_cpu and all_within(ids, rows)):
        ids = ids.long()
        ids = torch.where((ids < 0) & (ids >= -rows), ids + rows, ids)
    return ids.view(shape)


def parts_of(data: Tensor, index: Index) -> Tensor:
    """Copies `data[index]` to the CPU."""
    index = _for_numpy(index)
    if data.is_cuda:
        rows, index = rows_around(data, index)
        data = pinned_gather(data, rows).cpu()
    return torch.from_numpy(np.array(_array(data)[index])).view(data.dtype)


def put_parts(data: Tensor, index: Index, values: Tensor) -> None:
    """Writes `data[index] = values`; both have the same dtype."""
    index, array = _for_numpy(index), _array(values.cpu())
    if not data.is_cuda:
        _array(data)[index] = array
        return
    rows, index = rows_around(data, index)
    changed = pinned_gather(data, rows).cpu()
    _array(changed)[index] = array
    pinned_scatter(data, rows, changed.to(data.device))


def rows_around(data: Tensor, index: Any) -> tuple[Tensor, tuple[npt.NDArray[Any], ...]]:
    """The ascending ids of all rows that an index touches, and the index relative to these rows.

    For rows on a GPU, which NumPy cannot access.
    """
    shape = tuple(data.shape)
    along = np.indices(shape, sparse=True)
    places = [np.asarray(np.broadcast_to(axis, shape)[index]) for axis in along]
    rows, within = np.unique(places[0], return_inverse=True)
    within = within.reshape(places[0].shape)
    return torch.from_numpy(rows).to(data.device), (within, *places[1:])


def _array(data: Tensor) -> npt.NDArray[Any]:
    """A NumPy view in a dtype of the same size, because NumPy lacks some of torch's dtypes."""
    return data.detach().view(_SAME_SIZE[data.itemsize]).numpy()


def _for_numpy(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_for_numpy(part) for part in index)
    return index.cpu().numpy() if isinstance(index, Tensor) else index
