"""The ids of a batch, in any of the forms that the SpeedTorch classes take."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = [
    "Indexes",
    "SeenIds",
    "all_within",
    "check_ids",
    "flat_index",
    "not_ids",
    "on_gpu",
]

Indexes = Tensor | npt.NDArray[Any] | list[Any] | tuple[Any, ...] | range | int


def flat_index(positives: Indexes, negatives: Indexes | None, device: torch.device) -> Tensor:
    """The ids of a batch as one row of numbers, int32 or int64 `[ids]`.

    Ids on the CPU stay there, as the ops take them from there and nothing waits then; others come
    to the device that works on the rows. TypeError if they are not integers.

    Example:
        >>> flat_index(np.array([[3, 1], [0, 3]]), [7], torch.device("cpu"))
        tensor([3, 1, 0, 3, 7])
    """
    given = (positives,) if negatives is None else (positives, negatives)
    parts = [_flat(part) for part in given]
    if any(part.is_cuda for part in parts):
        # Towards the CPU a copy must be waited for, towards a GPU nothing has to wait.
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
        # A copy where torch could not share: read-only arrays, other byte orders, backward strides.
        array = np.require(array, requirements=["C", "W"])
        ids = torch.from_numpy(array if array.dtype.isnative else array.astype(np.int64))
    if ids.dtype in (torch.int64, torch.int32):
        return ids
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise TypeError(f"indexes: expected integers, got {ids.dtype} of shape {list(ids.shape)}")
    return ids.to(torch.int64)


def not_ids(name: str, given: object) -> TypeError:
    """The error about something else than a tensor where ids are taken."""
    return TypeError(
        f"{name}: expected an int32 or int64 tensor, got {type(given).__name__}; torch.as_tensor"
        " makes one of a list or an array"
    )


def check_ids(name: str, ids: object, numbers: type[Exception] = TypeError) -> None:
    """Raises TypeError, or for tensors of other numbers `numbers`, unless torch looks these up."""
    if not isinstance(ids, Tensor):
        raise not_ids(name, ids)
    if ids.dtype not in (torch.int64, torch.int32) or ids.layout != torch.strided:
        raise numbers(
            f"{name}: expected a dense int32 or int64 tensor, got {ids.dtype} of shape"
            f" {list(ids.shape)}"
        )


def all_within(index: Tensor, rows: int) -> bool:
    """Whether ids on the CPU all name one of so many rows."""
    if not index.numel():
        return True
    low, high = torch.aminmax(index)
    return int(low) >= 0 and int(high) < rows


def on_gpu(ids: Indexes) -> bool:
    """Whether these lie where nobody waits to read them."""
    return isinstance(ids, Tensor) and ids.is_cuda


class SeenIds:
    """Ids that are recognised when they come again.

    Ids on the CPU are compared with a copy, which nobody else writes to and which a GPU takes
    without waiting. Ids on a GPU are never read: they must be the same tensor, unchanged. It is
    kept, and so is its memory, which it can be made to leave (`tensor.data = other`): no other
    tensor comes to lie there.

    Args:
        ids: of any shape, on either device.
        device: where they will be needed.
    """

    def __init__(self, ids: Tensor, device: torch.device) -> None:
        self.shape = ids.shape
        self.values = ids.detach()
        self._unread: Tensor | None = None
        if on_gpu(ids):
            if not ids.is_inference():  # such a tensor does not count its versions
                self._unread, self._state = ids, _state_of(ids)
        elif ids.is_cpu:
            copy = torch.empty_like(self.values, pin_memory=device.type == "cuda")
            self.values = copy.copy_(self.values)

    def flat(self, device: torch.device) -> Tensor:
        """The ids as one row of numbers on a device, which need not wait for it."""
        flat = self.values.reshape(-1)
        if flat.device == device:
            return flat
        return flat.to(device, non_blocking=device.type == "cuda")

    def are(self, ids: Tensor) -> bool:
        """Whether these are the ids, for certain."""
        if self._unread is not None:
            return ids is self._unread and _state_of(ids) == self._state
        known = self.values
        return known.is_cpu and ids.is_cpu and ids.dtype == known.dtype and torch.equal(ids, known)


def _state_of(tensor: Tensor) -> tuple[Hashable, ...]:
    """What shows that a tensor has changed, without reading it."""
    layout = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return (tensor._version, *layout)
