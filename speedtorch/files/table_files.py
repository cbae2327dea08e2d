"""Fields of a table to files and back, in blocks: a table of any size takes a few MB more.

A field may be strided (one of several in a record), on the CPU or on a GPU; its rows move as bytes.
Files are safetensors, which hold all fields, or .npy, one for each field.
"""

from __future__ import annotations

import errno
import glob
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from speedtorch.files import npy_format, safetensors_format, system_calls
from speedtorch.files.new_files import NewFile, replace_files
from speedtorch.files.stored_array import StoredArray
from speedtorch.ops.shapes import check_span

__all__ = ["StoredField", "open_fields", "save_fields", "write_safetensors"]

# Large enough for the disk's full speed; small beside any table.
_BLOCK_BYTES = 4 << 20


def _row_bytes(field: Tensor) -> Tensor:
    """The bytes of each row, uint8 `[rows, row_bytes]`, without a copy."""
    columns = math.prod(field.shape[1:])
    if not field[0].is_contiguous():
        raise ValueError(f"rows of shape {tuple(field.shape[1:])} must be contiguous")
    return (
        field.detach().as_strided((field.shape[0], columns), (field.stride(0), 1)).view(torch.uint8)
    )


def _blocks(field: Tensor) -> Iterator[Tensor]:
    """Consecutive pieces, uint8 `[rows, bytes]`, of at most _BLOCK_BYTES, in the file's order."""
    if field.numel() == 0:
        return
    rows = _row_bytes(field if field.dim() else field.view(1))
    count, row_bytes = rows.shape
    rows_per_block = max(1, _BLOCK_BYTES // row_bytes)
    for row in range(0, count, rows_per_block):
        for column in range(0, row_bytes, _BLOCK_BYTES):
            yield rows[row : row + rows_per_block, column : column + _BLOCK_BYTES]


def _buffer(field: Tensor) -> Tensor:
    count = min(_BLOCK_BYTES, field.numel() * field.itemsize)
    return torch.empty(count, dtype=torch.uint8, device="cpu")


def _write(file: NewFile, field: Tensor) -> None:
    buffer = _buffer(field)
    for block in _blocks(field):
        piece = buffer[: block.numel()]
        piece.view(block.shape).copy_(block)
        file.write(piece.numpy().data)


@dataclass(frozen=True)
class StoredField:
    """A field in an open file.

    Attributes:
        path: The file.
        array: Its shape `[rows, ...]`, dtype and place.
    """

    path: str
    array: StoredArray
    _read: Callable[..., None]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, rows first."""
        return self.array.shape

    @property
    def dtype(self) -> torch.dtype:
        """Its elements."""
        return self.array.dtype

    def read_into(self, field: Tensor) -> None:
        """Reads all rows.

        Args:
            field: Where to, of this shape and dtype; any row stride.

        Raises:
            OSError, ValueError: The file could not be read to its end; rows before that are new.
        """
        buffer = _buffer(field)
        offset = self.array.offset
        for block in _blocks(field):
            piece = buffer[: block.numel()]
            try:
                self._read(piece.numpy().data, offset)
            except OSError as error:
                text = f"{error.strerror}: the table holds old and new rows now; load it again"
                raise OSError(error.errno, text, self.path) from error
            block.copy_(piece.view(block.shape))
            offset += len(piece)


def _kind(path: str) -> str:
    suffix = os.path.splitext(path)[1]
    if suffix not in (".safetensors", ".npy"):
        raise ValueError(f"{path}: expected a name that ends in .safetensors or .npy")
    return suffix


def _npy_path(path: str, name: str, alone: bool) -> str:
    if alone and name == "weight":
        return path
    if "." in name:
        raise ValueError(f"field {name!r}: no dots in .npy files' names; save as .safetensors")
    return f"{path.removesuffix('.npy')}.{name}.npy"


def _refuse_others(path: str, targets: list[str]) -> None:
    """Files that open() would take for fields of this table must not stand beside the new ones."""
    if targets == [path]:
        return
    others = {path, *_npy_siblings(path).values()} - set(targets)
    beside = sorted(each for each in others if os.path.lexists(each))
    if beside:
        raise ValueError(
            f"{path}: {', '.join(beside)} would be read as part of this table; remove it, or save"
            " under another name or as .safetensors"
        )


def save_fields(path: str | os.PathLike[str], fields: Mapping[str, Tensor]) -> None:
    """Saves fields of a table, all or none.

    Args:
        path: `*.safetensors`, or `*.npy`: a table with only a weight goes to that very name, any
            other one file per field, `table.weight.npy`, `table.exp_avg.npy` for `table.npy`.
        fields: Name to rows, `[rows, ...]`, contiguous within a row.

    Raises:
        ValueError: Another ending, a dtype that the format cannot hold, or .npy files of the same
            name that are not of these fields; nothing is written.
        OSError: The files could not be written; what was there before is still there.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import load_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_fields(f"{folder}/t.safetensors", {"weight": torch.ones(2, 1)})
        ...     load_file(f"{folder}/t.safetensors")["weight"].tolist()
        [[1.0], [1.0]]
    """
    name = os.fspath(path)
    if _kind(name) == ".npy":
        planned = [
            (
                _npy_path(name, field_name, len(fields) == 1),
                npy_format.npy_header(field.shape, field.dtype),
                [field],
            )
            for field_name, field in fields.items()
        ]
        _refuse_others(name, [target for target, _, _ in planned])
    else:
        planned = [(name, *_safetensors(fields))]
    with replace_files([target for target, _, _ in planned]) as new_files:
        for file, (_, header, parts) in zip(new_files, planned, strict=True):
            _write_all(file, header, parts)


def write_safetensors(file: NewFile, fields: Mapping[str, Tensor]) -> None:
    """Writes fields, or the tensors of a state dict, as safetensors.

    Args:
        file: a new one.
        fields: name to rows, `[rows, ...]`, contiguous within a row, or to single numbers.

    Raises:
        ValueError: a dtype that the format cannot hold.
        OSError: the file cannot be written.
    """
    _write_all(file, *_safetensors(fields))


def _safetensors(fields: Mapping[str, Tensor]) -> tuple[bytes, list[Tensor]]:
    """A file's header, and what follows it, in order."""
    shapes = {name: (field.shape, field.dtype) for name, field in fields.items()}
    order = safetensors_format.in_file_order({name: dtype for name, (_, dtype) in shapes.items()})
    return safetensors_format.safetensors_header(shapes), [fields[name] for name in order]


def _write_all(file: NewFile, header: bytes, parts: Sequence[Tensor]) -> None:
    file.reserve(len(header) + sum(part.numel() * part.itemsize for part in parts))
    file.write(header)
    for part in parts:
        _write(file, part)


@contextmanager
def open_fields(
    path: str | os.PathLike[str], expected: tuple[str, ...] | None = None
) -> Iterator[dict[str, StoredField]]:
    """Opens the fields of a saved table; nothing is read yet but the header.

    Args:
        path: As given to save_fields.
        expected: Names of the fields that must be there; None: whatever there is.

    Yields:
        The fields, "weight" first; all have the same number of rows.

    Raises:
        ValueError: No such file format, a header that does not fit the file, or other names.
        OSError: A file cannot be opened or read.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_fields(f"{folder}/t.npy", {"weight": torch.ones(2, 1)})
        ...     with open_fields(f"{folder}/t.npy") as fields:
        ...         print(fields["weight"].shape)
        (2, 1)
    """
    name = os.fspath(path)
    with ExitStack() as stack:
        stored = {}
        if _kind(name) == ".npy":
            for field_name, target in _npy_files(name, expected).items():
                read, size = stack.enter_context(system_calls.open_to_read(target))
                start = bytearray(min(size, npy_format.NPY_HEADER_BYTES))
                read(memoryview(start), 0)
                with _about(target):
                    array = npy_format.read_npy_header(bytes(start), size)
                stored[field_name] = StoredField(target, array, read)
        else:
            read, size = stack.enter_context(system_calls.open_to_read(name))
            with _about(name):
                arrays = _read_safetensors(read, size)
            stored = {each: StoredField(name, arrays[each], read) for each in arrays}
        with _about(name):
            _check(stored, expected)
        yield dict(sorted(stored.items(), key=lambda item: item[0] != "weight"))


@contextmanager
def _about(path: str) -> Iterator[None]:
    """Names the file in errors about its content."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_safetensors(read: Callable[..., None], size: int) -> dict[str, StoredArray]:
    if size < 8:
        raise ValueError(f"a safetensors file has at least 8 bytes, this one {size}")
    length = bytearray(8)
    read(memoryview(length), 0)
    (header_bytes,) = struct.unpack("<Q", length)
    if header_bytes > safetensors_format.LARGEST_HEADER or header_bytes > size - 8:
        raise ValueError(
            f"it announces a header of {header_bytes:,} bytes; the file has {size:,} and the "
            f"limit is {safetensors_format.LARGEST_HEADER:,}"
        )
    header = bytearray(header_bytes)
    read(memoryview(header), 8)
    return safetensors_format.read_safetensors_header(bytes(header), size - 8 - header_bytes)


def _npy_files(path: str, expected: tuple[str, ...] | None) -> dict[str, str]:
    if expected is not None:
        return {name: _npy_path(path, name, len(expected) == 1) for name in expected}
    if os.path.lexists(path):
        return {"weight": path}
    if found := _npy_siblings(path):
        return found
    stem = path.removesuffix(".npy")
    raise FileNotFoundError(errno.ENOENT, f"neither this nor {stem}.<field>.npy exists", path)


def _npy_siblings(path: str) -> dict[str, str]:
    """Field name to file, of the files named as save_fields names those of several fields."""
    stem = path.removesuffix(".npy")
    found = {
        target[len(stem) + 1 : -len(".npy")]: target
        for target in sorted(glob.glob(f"{glob.escape(stem)}.*.npy"))
    }
    return {name: target for name, target in found.items() if "." not in name}


def _check(stored: Mapping[str, StoredField], expected: tuple[str, ...] | None) -> None:
    if expected is not None and set(stored) != set(expected):
        raise ValueError(f"it holds the fields {sorted(stored)}, the table {sorted(expected)}")
    if not stored:
        raise ValueError("it holds no field")
    for name, field in stored.items():
        check_span(repr(name), field.shape, field.dtype)
    counts = {name: field.shape[:1] for name, field in stored.items()}
    if len(set(counts.values())) > 1 or () in counts.values():
        raise ValueError(f"its fields need the same number of rows, they have {counts}")
