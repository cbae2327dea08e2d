"""Host memory, one buffer for each kind: tables cut from it, and CuPy's view of them."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

import speedtorch
from benchmarks.sizes import DEVICE, SIZES

KINDS = {"managed": SIZES.managed_bytes, "registered": SIZES.registered_bytes}


@cache
def _buffer(kind: str) -> Tensor:
    memory = kind if DEVICE == "cuda" else "plain"
    return speedtorch.empty(KINDS[kind], dtype=torch.uint8, memory=memory)


def rows_in(kind: str, row_bytes: int) -> int:
    """Rows of the largest table of this kind."""
    return KINDS[kind] // row_bytes


def host_table(kind: str, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[rows, columns]` at the start of that kind's buffer."""
    nbytes = rows * columns * dtype.itemsize
    return _buffer(kind)[:nbytes].view(dtype).view(rows, columns)


def has_cupy() -> bool:
    """Whether CuPy is installed and there is a GPU for it."""
    return DEVICE == "cuda" and importlib.util.find_spec("cupy") is not None


def cupy_view(tensor: Tensor) -> Any:
    """A CuPy array over a tensor's memory, which may be host memory that the GPU reaches."""
    import cupy

    memory = cupy.cuda.UnownedMemory(
        tensor.data_ptr(), tensor.numel() * tensor.itemsize, owner=tensor, device_id=0
    )
    name = str(tensor.dtype).removeprefix("torch.")
    return cupy.ndarray(tuple(tensor.shape), dtype=name, memptr=cupy.cuda.MemoryPointer(memory, 0))
