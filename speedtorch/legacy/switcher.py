"""What all SpeedTorch classes share: a table and the ids of a batch.

A switcher holds all rows of a variable, of its optimizer state or of data, and exchanges those of a
batch. Ids arrive as the 2019 classes took them: positives of any shape and, if there are, negatives
of any shape; both are flattened, the positives first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speedtorch.ops import pinned_gather, pinned_scatter, synchronize
from speedtorch.table import HostTable

__all__ = ["Indexes", "OneField", "Switcher", "flat_index"]

Indexes = Tensor | npt.NDArray[Any] | list[Any] | tuple[Any, ...] | range | int


def flat_index(positives: Indexes, negatives: Indexes | None, device: torch.device) -> Tensor:
    """The ids of a batch as one row of numbers.

    Args:
        positives: ids of any shape: a NumPy array, a list or a tensor on either device.
        negatives: more of them, which follow, or None.
        device: where the rows are worked on. Ids on a GPU stay there if it is this one; ids on the
            CPU stay where they are (the ops take them from there, so that nothing waits).

    Returns:
        int32 or int64 `[ids]`.

    Raises:
        TypeError: they are not integers.

    Example:
        >>> flat_index(np.array([[3, 1], [0, 3]]), [7], torch.device("cpu"))
        tensor([3, 1, 0, 3, 7])
    """
    parts = [_flat(part) for part in (positives, negatives) if part is not None]
    if any(part.is_cuda for part in parts):
        # Towards the CPU a copy must be waited for, towards a GPU nothing has to wait.
        parts = [part.to(device, non_blocking=device.type == "cuda") for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _flat(indexes: Indexes) -> Tensor:
    if isinstance(indexes, Tensor):
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


class Switcher:
    """A set of fields, all with one row per class, whose rows are exchanged batch by batch."""

    _how_to_start = ""  # which methods make the table

    def __init__(self) -> None:
        """Starts without a table."""
        self._table: HostTable | None = None
        self._fields: dict[str, Tensor] | None = None

    @property
    def table(self) -> HostTable:
        """The HostTable that holds the rows.

        Raises:
            RuntimeError: there is none yet.
        """
        if self._table is None:
            raise self._not_started()
        return self._table

    def _not_started(self) -> RuntimeError:
        return RuntimeError(f"{type(self).__name__} has no table yet: call {self._how_to_start}")

    def _use_table(self, table: HostTable, names: tuple[str, ...]) -> None:
        self._table = table
        self._fields = {name: table[name] for name in names}

    def _rows(self) -> dict[str, Tensor]:
        """The fields `[rows, ...]` by name, made on first use where that needs no argument."""
        if self._fields is None:
            raise self._not_started()
        if self._table is not None:
            _ = self._table.record  # a closed table refuses: rows put there would be lost
        return self._fields

    def _gather(self, name: str, index: Tensor, device: torch.device) -> Tensor:
        field = self._rows()[name]
        out = torch.empty((index.numel(), *field.shape[1:]), dtype=field.dtype, device=device)
        pinned_gather(field, index, out=out)
        return out

    def _scatter(self, name: str, index: Tensor, rows: Tensor, *, accumulate: bool = False) -> None:
        pinned_scatter(self._rows()[name], index, rows.contiguous(), accumulate=accumulate)

    def _settle(self) -> None:
        """Waits for the GPU, so that the CPU's view of the rows is current."""
        if self._table is None:
            synchronize()
        else:
            self._table.settle()

    def _to_numpy(self) -> dict[str, npt.NDArray[Any]]:
        """Every field; a view where the table is in host memory, a copy where it is on the GPU."""
        self._settle()
        return {name: field.cpu().numpy() for name, field in self._rows().items()}

    def _variable(self) -> Tensor | dict[str, Tensor]:
        return self._rows()

    # What switcher_files.py needs to know.

    def _to_save(self) -> dict[str, Tensor]:
        """What files hold: tensors with one row per class."""
        return self._rows()

    def _layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what a file must hold, by name."""
        return {name: (tuple(rows.shape), rows.dtype) for name, rows in self._to_save().items()}

    def _to_load(self) -> dict[str, Tensor]:
        """Where the content of a file goes; called when it is known to fit."""
        return self._rows()

    def _loaded(self, content: dict[str, Tensor]) -> None:
        """Called once all of a file's content is there."""


class OneField(Switcher):
    """A switcher of a single field, "weight"."""

    def getNumpyVersion(self) -> npt.NDArray[Any]:
        """All rows as a NumPy array, current when this returns.

        Returns:
            A view of the table (no copy; later exchanges show in it) where it is in host memory, a
            copy where it is on the GPU.
        """
        return self._to_numpy()["weight"]

    def _variable(self) -> Tensor:
        return self._rows()["weight"]
