"""One buffer of host memory for each kind, and the tables that are cut from it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

import speedtorch
from benchmarks.sizes import DEVICE, SIZES

KINDS = ("managed", "registered")


@cache
def _buffer(kind: str) -> Tensor:
    nbytes = SIZES.managed_bytes if kind == "managed" else SIZES.registered_bytes
    memory = kind if DEVICE == "cuda" else "plain"
    return speedtorch.empty(nbytes, dtype=torch.uint8, memory=memory)


def rows_in(kind: str, row_bytes: int) -> int:
    """Rows of the largest table of this kind."""
    nbytes = SIZES.managed_bytes if kind == "managed" else SIZES.registered_bytes
    return nbytes // row_bytes


def host_table(kind: str, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[rows, columns]` at the start of that kind's buffer."""
    nbytes = rows * columns * dtype.itemsize
    return _buffer(kind)[:nbytes].view(dtype).view(rows, columns)
