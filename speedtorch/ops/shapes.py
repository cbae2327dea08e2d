"""Checks of the shapes and dtypes of rows."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch

__all__ = ["check_dtype", "check_span", "row_count", "row_shape"]

_QUANTIZED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)


def row_shape(dim: int | Sequence[int], what: str = "dim") -> tuple[int, ...]:
    """The row shape for a number of columns or a shape; errors name the argument `what`."""
    parts = dim if isinstance(dim, Sequence) and not isinstance(dim, str) else (dim,)
    try:
        if any(isinstance(part, bool) for part in parts):
            raise TypeError
        shape = tuple(operator.index(part) for part in parts)
    except TypeError:
        raise TypeError(f"{what}: expected an int or a tuple of ints, got {dim!r}") from None
    if any(part < 0 for part in shape):
        raise ValueError(f"{what}: expected sizes of 0 or more, got {dim!r}")
    return shape


def row_count(rows: int, what: str) -> int:
    """A number of rows; errors name the argument `what`."""
    if isinstance(rows, Sequence):
        raise TypeError(f"{what}: expected an int, got {rows!r}")
    return row_shape(rows, what)[0]


def check_dtype(what: str, dtype: object) -> None:
    """Raises TypeError unless `dtype` is a dtype, and ValueError for quantized dtypes."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{what}: expected a torch.dtype, got {dtype!r}")
    if dtype in _QUANTIZED:
        raise ValueError(f"{what}: quantized dtypes are not supported, got {dtype}")


def check_span(what: str, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raises ValueError for an empty shape whose strides would overflow int64."""
    if 0 in shape and math.prod(max(1, size) for size in shape) * dtype.itemsize >= 2**63:
        raise ValueError(f"{what}: rows of {list(shape)} span more than 2^63 - 1 bytes")
