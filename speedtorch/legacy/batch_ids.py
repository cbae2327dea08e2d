"""The ids of a batch, in all forms that the SpeedTorch classes accept."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Indexes", "all_within", "as_tensor", "flat_index", "on_gpu"]

Indexes = Tensor | npt.NDArray[Any] | list[Any] | tuple[Any, ...] | range | int


def flat_index(positives: Indexes, negatives: Indexes | None, device: torch.device) -> Tensor:
    """Flattens the ids of a batch to int32 or int64 `[ids]`, positives first.

    Ids on the CPU remain there, because the ops read them without a wait. If any ids are on a GPU,
    all are copied to `device`, the device of the work. Raises TypeError for other than integers.

    Example:
        >>> flat_index(np.array([[3, 1], [0, 3]]), [7], torch.device("cpu"))
        tensor([3, 1, 0, 3, 7])
    """
    given = (positives,) if negatives is None else (positives, negatives)
    parts = [_flat(part) for part in given]
    if any(part.is_cuda for part in parts):
        # The host must wait for a copy to the CPU, but not for a copy to a GPU.
        parts = [part.to(device, non_blocking=device.type == "cuda") for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _flat(indexes: Indexes) -> Tensor:
    if isinstance(indexes, Tensor):
        if indexes.layout != torch.strided or indexes.is_quantized:
            raise TypeError(f"indexes: expected dense integers, got {indexes.type()}")
        ids = indexes.detach().reshape(-1)
    else:
        array = np.asarray(indexes).reshape(-1)
        if array.size == 0 and not isinstance(indexes, np.ndarray):
            array = array.astype(np.int64)
        if array.dtype.kind not in "iu":
            raise TypeError(f"indexes: expected integers, got {array.dtype} of shape {array.shape}")
        ids = as_tensor(array)
    if ids.dtype in (torch.int64, torch.int32):
        return ids
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise TypeError(f"indexes: expected integers, got {ids.dtype} of shape {list(ids.shape)}")
    return ids.to(torch.int64)


def as_tensor(data: Tensor | npt.ArrayLike) -> Tensor:
    """Converts data to a tensor, which shares the memory if torch can share it."""
    if isinstance(data, Tensor):
        return data.detach()
    array = np.asarray(data)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    # Copies only arrays that torch cannot share: read-only, negative strides, fields of records.
    shared = all(stride >= 0 and stride % max(1, array.itemsize) == 0 for stride in array.strides)
    return torch.from_numpy(array if shared and array.flags.writeable else array.copy())


def all_within(index: Tensor, rows: int) -> bool:
    """Whether all ids on the CPU are in [0, rows)."""
    if not index.numel():
        return True
    low, high = torch.aminmax(index)
    return int(low) >= 0 and int(high) < rows


def on_gpu(ids: Indexes) -> bool:
    """Whether the ids are a tensor on a GPU, which the host cannot read without a wait."""
    return isinstance(ids, Tensor) and ids.is_cuda
