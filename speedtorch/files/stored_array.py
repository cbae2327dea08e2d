"""An array within a file, as a file's header describes it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

__all__ = ["StoredArray", "are_sizes"]

_LARGEST = 2**63 - 1


class StoredArray(NamedTuple):
    """An array within a file.

    Attributes:
        shape: Its shape, rows first.
        dtype: Its elements.
        offset: Where its bytes start in the file.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def are_sizes(value: Any) -> bool:
    """Whether this is a list of integers from 0 to 2^63 - 1."""
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size <= _LARGEST for size in value
    )
