"""The layout of the fields in a row's record.

A weight row and its optimizer state are adjacent (`[weight | exp_avg | exp_avg_sq]`), so one run of
bytes crosses PCIe or NVLink-C2C for them. Fields of one dtype keep the given order, without
padding. Fields of different dtypes are sorted by descending item size, with padding only at the end
of the record.

A record of 128 bytes or more is an exception if only some of its fields are multiples of 16 bytes.
These fields come first, and the record is padded to a multiple of 16. Otherwise a row of 128
numbers and a single number would allow only accesses of 4 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtorch.ops.shapes import check_dtype, row_shape

__all__ = ["Fields", "lay_out", "weight_and_state"]

_ACCESS_BYTES = 16  # the widest access of a GPU thread
_LONG_BYTES = 128  # Padding lengthens a record of this size or more by less than 12 %.

Fields = Mapping[str, tuple[int | Sequence[int], torch.dtype]]
"""Name to (row shape, dtype)."""


class Record(NamedTuple):
    """Fields in the given order, their byte offsets, and their common dtype, or None."""

    fields: dict[str, tuple[tuple[int, ...], torch.dtype]]
    offsets: dict[str, int]
    record_bytes: int
    dtype: torch.dtype | None

    def rows_of(self, data: Tensor, rows: int, name: str) -> Tensor:
        """Returns a field of all rows, `[rows, *shape]`: a strided view of `data` (uint8, 1-D)."""
        shape, dtype = self.fields[name]
        steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        strides = (self.record_bytes // dtype.itemsize, *steps)
        offset = self.offsets[name] // dtype.itemsize
        return data.view(dtype).as_strided((rows, *shape), strides, offset)

    def records_of(self, data: Tensor, rows: int) -> Tensor:
        """Returns all fields of all rows, `[rows, columns]` of the common dtype, or else uint8."""
        dtype = self.dtype or torch.uint8
        return data.view(dtype).view(rows, self.record_bytes // dtype.itemsize)


def weight_and_state(
    dim: int | Sequence[int], dtype: torch.dtype, state: Iterable[str] | Fields
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns the fields of a weight and its optimizer state. See HostTable."""
    shape = row_shape(dim)
    if isinstance(state, str):
        raise TypeError(f"state: expected several names, got one string. Write ({state!r},).")
    if not isinstance(state, Iterable):
        raise TypeError(f"state: expected names or a mapping of them, got {state!r}")
    listed = [(name, shape, dtype) for name in state]
    if isinstance(state, Mapping):
        listed = list(_triples("state", state))
    fields = {"weight": (shape, dtype)}
    for name, its_shape, its_dtype in listed:
        if name in fields:
            raise ValueError(f"state: the name {name!r} occurs twice ('weight' is always there)")
        fields[name] = (its_shape, its_dtype)
    return fields


def lay_out(fields: Fields) -> Record:
    """Computes the byte offset of each field in a record, and the size of a record."""
    if not fields:
        raise ValueError("fields: a table needs at least one field")
    placed: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, shape, dtype in _triples("field", fields):
        if not isinstance(name, str):
            raise TypeError(f"fields: names must be strings, got {name!r}")
        if not name or not name.isprintable() or set(name) & set("/\\") or name == "__metadata__":
            raise ValueError(
                f"fields: {name!r} is not a valid name. A name must consist of printable characters"
                " other than / and \\, and must not be '__metadata__'."
            )
        check_dtype(f"field {name!r}", dtype)
        placed[name] = (shape, dtype)
    row_bytes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in placed.items()}
    alignment = {name: dtype.itemsize for name, (_, dtype) in placed.items()}
    wide = [name for name, nbytes in row_bytes.items() if nbytes % _ACCESS_BYTES == 0]
    if 0 < len(wide) < len(placed) and sum(row_bytes.values()) >= _LONG_BYTES:
        alignment |= dict.fromkeys(wide, _ACCESS_BYTES)
    end, offsets = 0, {}
    for name in sorted(placed, key=lambda name: -alignment[name]):
        offsets[name] = end
        end += row_bytes[name]
    dtypes = {dtype for _, dtype in placed.values()}
    largest = max(alignment.values())
    shared = dtypes.pop() if len(dtypes) == 1 else None
    return Record(placed, offsets, -(-end // largest) * largest, shared)


def _triples(what: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    for name, pair in fields.items():
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise TypeError(f"{what} {name!r}: expected (row shape, dtype), got {pair!r}")
        yield name, row_shape(pair[0], f"{what} {name!r}"), pair[1]
