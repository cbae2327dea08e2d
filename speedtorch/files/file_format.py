"""The interface of a file format: file names, headers, and the place of each array."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["FileFormat", "NewContent", "ReadAt", "StoredArray", "are_sizes", "joined_names"]

ReadAt = Callable[[memoryview, int], None]
"""read(view, offset) fills a view with a file's bytes from `offset` on, or raises ValueError."""

NewContent = tuple[str, bytes, list[Tensor]]
"""The path of a file, its header, and the fields whose bytes follow the header in this order."""


@dataclass(slots=True)  # frozen=True takes three times as long to create.
class StoredArray:
    """An array within a file: its shape (rows first), its dtype, and the offset of its bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class FileFormat(Protocol):
    """The format of table files with one ending: a module in table_files.FORMATS."""

    def files_to_write(self, path: str, fields: Mapping[str, Tensor]) -> list[NewContent]:
        """Returns the files to write for these fields."""

    def files_to_read(self, path: str, names: Collection[str] | None) -> dict[str, list[str]]:
        """Returns the possible paths of each file, by the prefix of its fields' names.

        Examples are `{"": ["t.safetensors"]}` and `{"weight": ["<hidden folder>/t.npy", "t.npy"]}`.
        The first path that exists is the file. `names` limits the fields (None: all fields).
        """

    def read_arrays(self, read: ReadAt, size: int) -> dict[str, StoredArray]:
        """Returns a file's arrays by name without the prefix; ValueError if `size` does not fit."""


def joined_names(names: Collection[str]) -> str:
    """Joins names for an error message, at most 20 of them."""
    shown = ", ".join(islice(names, 20))
    return shown if len(names) <= 20 else f"{shown}, and {len(names) - 20:,} more"


def are_sizes(value: Any) -> bool:
    """Whether `value` is a list of integers from 0 to 2^63 - 1."""
    if not isinstance(value, list):
        return False
    for n in value:  # noqa: SIM110 - all() takes twice as long for the few sizes of an array
        if type(n) is not int or not 0 <= n < 2**63:
            return False
    return True
