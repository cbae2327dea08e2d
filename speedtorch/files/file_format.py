"""What a file format tells of its files: their names, what they begin with, what lies where."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["FileFormat", "NewContent", "Read", "StoredArray", "are_sizes", "listed"]

Read = Callable[[memoryview, int], None]
"""read(view, offset) fills a view with a file's bytes from there on, or raises ValueError."""

NewContent = tuple[str, bytes, list[Tensor]]
"""The path of a file, its header, and the fields whose bytes follow it in this order."""


@dataclass(slots=True)  # A frozen one takes three times as long to make.
class StoredArray:
    """An array within a file: its shape, rows first, its elements, and the byte it starts at."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class FileFormat(Protocol):
    """How the fields of a table stand in files of one ending: a module, named in FORMATS."""

    def files_to_write(self, path: str, fields: Mapping[str, Tensor]) -> list[NewContent]:
        """The files that hold these fields."""

    def files_to_read(self, path: str, names: Collection[str] | None) -> dict[str, list[str]]:
        """The files of these fields, or (None) of what there is, by the begin of fields' names.

        Each is the first of these that is there.
        """

    def read_arrays(self, read: Read, size: int) -> dict[str, StoredArray]:
        """The arrays of a file by the rest of their names; ValueError if its size is another."""


def listed(names: Collection[str]) -> str:
    """Names for a message, of which a file may have many thousands."""
    some = ", ".join(islice(names, 20))
    return some if len(names) <= 20 else f"{some}, and {len(names) - 20:,} more"


def are_sizes(value: Any) -> bool:
    """Whether this is a list of integers from 0 to 2^63 - 1."""
    if not isinstance(value, list):
        return False
    for n in value:  # noqa: SIM110 - all() takes twice as long for the few sizes of an array
        if type(n) is not int or not 0 <= n < 2**63:
            return False
    return True
