"""Where the fields of a row lie within its record.

A row and what the optimizer remembers about it stand side by side, so that one run of bytes
crosses the link for them (`[weight | exp_avg | exp_avg_sq]`). Fields of one dtype follow each other
in the given order without padding; different dtypes go by falling item size, which leaves padding
at the end of the record only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speedtorch.ops.shapes import check_dtype, row_shape

__all__ = [
    "Field",
    "Record",
    "lay_out",
    "weight_and_state",
]


@dataclass(frozen=True)
class Field:
    """One field of a record.

    Attributes:
        shape: Shape of one row.
        dtype: Its elements.
        offset: Bytes from the start of the record.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int


@dataclass(frozen=True)
class Record:
    """The layout of one row's record.

    Attributes:
        fields: The fields in their given order.
        record_bytes: Bytes from one record to the next.
        dtype: The dtype that all fields share, or None.
    """

    fields: dict[str, Field]
    record_bytes: int
    dtype: torch.dtype | None

    def rows_of(self, data: Tensor, rows: int, name: str) -> Tensor:
        """One field of all rows, `[rows, *shape]`, a strided view of `data` (uint8, 1-D)."""
        field = self.fields[name]
        size = field.dtype.itemsize
        steps = [math.prod(field.shape[axis + 1 :]) for axis in range(len(field.shape))]
        strides = (self.record_bytes // size, *steps)
        return data.view(field.dtype).as_strided(
            (rows, *field.shape), strides, field.offset // size
        )

    def records_of(self, data: Tensor, rows: int) -> Tensor:
        """All fields of all rows, `[rows, columns]` of the shared dtype, or else uint8."""
        dtype = self.dtype or torch.uint8
        return data.view(dtype).view(rows, self.record_bytes // dtype.itemsize)


def weight_and_state(
    dim: int | Sequence[int],
    dtype: torch.dtype,
    state: Iterable[str] | Mapping[str, tuple[int | Sequence[int], torch.dtype]],
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The fields of a weight and of what an optimizer remembers about it.

    Args:
        dim: Shape of a row of the weight.
        dtype: The weight's elements.
        state: Names of state like the weight, or a mapping of names to (shape, dtype).

    Returns:
        The fields by name, "weight" first.

    Raises:
        TypeError: `state` is a single string.
        ValueError: A name occurs twice.

    Example:
        >>> weight_and_state(4, torch.float32, ["exp_avg"])["exp_avg"]
        ((4,), torch.float32)
    """
    shape = row_shape(dim)
    if isinstance(state, str):
        raise TypeError(f"state: expected several names, got one string; write ({state!r},)")
    if isinstance(state, Mapping):
        listed = [
            (name, row_shape(s, f"state {name!r}"), d) for name, s, d in _pairs("state", state)
        ]
    elif not isinstance(state, Iterable):
        raise TypeError(f"state: expected names or a mapping of them, got {state!r}")
    else:
        listed = [(name, shape, dtype) for name in state]
    fields = {"weight": (shape, dtype)}
    for name, its_shape, its_dtype in listed:
        if name in fields:
            raise ValueError(f"state: the name {name!r} occurs twice ('weight' is always there)")
        fields[name] = (its_shape, its_dtype)
    return fields


def lay_out(fields: Mapping[str, tuple[int | Sequence[int], torch.dtype]]) -> Record:
    """Places fields in a record.

    Args:
        fields: Name to (row shape, dtype).

    Returns:
        The layout.

    Raises:
        TypeError: A name, shape or dtype of the wrong type.
        ValueError: No field, or an unusable name or dtype.

    Example:
        >>> record = lay_out({"id": (1, torch.int8), "weight": (2, torch.float32)})
        >>> record.fields["weight"].offset, record.fields["id"].offset, record.record_bytes
        (0, 8, 12)
    """
    if not fields:
        raise ValueError("fields: a table needs at least one field")
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for name, shape, dtype in _pairs("field", fields):
        _check_name(name)
        shapes[name] = row_shape(shape, f"field {name!r}")
        check_dtype(f"field {name!r}", dtype)
        dtypes[name] = dtype
    offsets: dict[str, int] = {}
    end = 0
    for name in sorted(shapes, key=lambda name: -dtypes[name].itemsize):
        offsets[name] = end
        end += math.prod(shapes[name]) * dtypes[name].itemsize
    largest = max(dtype.itemsize for dtype in dtypes.values())
    record_bytes = -(-end // largest) * largest
    shared = next(iter(dtypes.values())) if len(set(dtypes.values())) == 1 else None
    placed = {name: Field(shapes[name], dtypes[name], offsets[name]) for name in shapes}
    return Record(placed, record_bytes, shared)


def _pairs(what: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name, pair in fields.items():
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise TypeError(f"{what} {name!r}: expected (row shape, dtype), got {pair!r}")
        yield name, *pair


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"fields: names are strings, got {name!r}")
    if not name or not name.isprintable() or set(name) & set("/\\") or name == "__metadata__":
        raise ValueError(
            f"fields: {name!r} cannot name a field: printable characters but / and \\ can, and "
            "'__metadata__' is taken"
        )
