"""What other libraries need to take part in a benchmark."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from benchmarks.sizes import DEVICE


def has_cupy() -> bool:
    """Whether CuPy is installed and there is a GPU for it."""
    return DEVICE == "cuda" and importlib.util.find_spec("cupy") is not None


def cupy_view(tensor: torch.Tensor) -> Any:
    """A CuPy array over a tensor's memory, which may be host memory that the GPU reaches."""
    import cupy

    memory = cupy.cuda.UnownedMemory(
        tensor.data_ptr(), tensor.numel() * tensor.itemsize, owner=tensor, device_id=0
    )
    name = str(tensor.dtype).removeprefix("torch.")
    return cupy.ndarray(tuple(tensor.shape), dtype=name, memptr=cupy.cuda.MemoryPointer(memory, 0))
