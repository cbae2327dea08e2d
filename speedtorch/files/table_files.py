"""Saves and loads the fields (weight and optimizer state) of a table of any size.

Saving a table uses at most 32 MiB of buffers (see write_blocks()), and loading at most 4 MiB.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from speedtorch.files import npy_format, safetensors_format
from speedtorch.files.field_blocks import SelectedRows, byte_rows, write_blocks
from speedtorch.files.file_format import FileFormat, StoredArray, joined_names
from speedtorch.files.new_files import NewFile, replace_files
from speedtorch.files.system_calls import OpenFile, open_to_read, path_in_errors
from speedtorch.ops.shapes import check_span

__all__ = [
    "FORMATS",
    "StoredField",
    "open_fields",
    "save_fields",
    "write_safetensors",
]

FORMATS: dict[str, FileFormat] = {".safetensors": safetensors_format, ".npy": npy_format}

# Large enough for the disk's full speed, and small compared with a table.
_BLOCK_BYTES = 4 << 20

# A try fails only if another save ends meanwhile.
_TRIES = 1000

_Result = TypeVar("_Result")


@dataclass(slots=True)
class StoredField(StoredArray):
    """A field `[rows, ...]` in an open file."""

    file: OpenFile

    def part(self, rows: range) -> StoredField:
        """Returns a part of the field, `[len(rows), ...]`."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        offset = self.offset + rows.start * row_bytes
        return replace(self, shape=(len(rows), *self.shape[1:]), offset=offset)

    def read_into(self, field: Tensor) -> None:
        """Reads all rows into a field of this shape and dtype, with any row stride."""
        offset, rows = self.offset, byte_rows(field)
        count, row_bytes = rows.shape  # at least one byte, also for a field without elements
        whole = torch.empty(min(_BLOCK_BYTES, rows.numel()), dtype=torch.uint8, device="cpu")
        rows_per_block = max(1, _BLOCK_BYTES // row_bytes)
        for row in range(0, count, rows_per_block):
            for column in range(0, row_bytes, _BLOCK_BYTES):
                block = rows[row : row + rows_per_block, column : column + _BLOCK_BYTES]
                buffer = whole[: block.numel()]
                with path_in_errors(
                    self.file.path, "the table may have old and new rows now. Load it again"
                ):
                    self.file.read(buffer.numpy().data, offset)
                block.copy_(buffer.view(block.shape))
                offset += buffer.numel()


def _format_of(path: str) -> FileFormat:
    if (suffix := os.path.splitext(path)[1]) not in FORMATS:
        raise ValueError(f"{path}: expected a name that ends in {' or '.join(FORMATS)}")
    return FORMATS[suffix]


def save_fields(
    path: str | os.PathLike[str], fields: Mapping[str, Tensor], mapped: str | None = None
) -> None:
    """Saves all fields of a table or none: `[rows, ...]` and contiguous within a row.

    Raises ValueError for an unknown ending, fields that the format cannot hold, or a path that is
    the file `mapped`. For .npy, also raises ValueError if other files beside `path` would be loaded
    as part of this table.
    """
    name = os.fspath(path)
    with path_in_errors(name):  # realpath() raises if the current folder was deleted
        _check_not_mapped([name], mapped)
    files = _format_of(name).files_to_write(name, fields)
    targets = [target for target, _, _ in files]
    _check_not_mapped(targets, mapped)
    with replace_files(targets, name) as new_files:
        for file, (_, header, parts) in zip(new_files, files, strict=True):
            _write(file, header, parts)


def _check_not_mapped(targets: Sequence[str], mapped: str | None) -> None:
    if own := [target for target in targets if os.path.realpath(target) == mapped]:
        raise ValueError(f"{own[0]}: the rows of the table are in this file. Choose another name.")


def write_safetensors(
    file: NewFile,
    fields: Mapping[str, Tensor | SelectedRows],
    digests: list[int] | None = None,
    on_bytes: Callable[[int], object] = lambda count: None,
) -> None:
    """Writes fields, or the tensors of a state dict, as safetensors; see write_blocks()."""
    order = safetensors_format.in_file_order({name: field.dtype for name, field in fields.items()})
    arrays = {name: (field.shape, field.dtype) for name, field in fields.items()}
    header = safetensors_format.safetensors_header(arrays)
    _write(file, header, [fields[name] for name in order], digests, on_bytes)


def _write(
    file: NewFile,
    header: bytes,
    parts: Sequence[Tensor | SelectedRows],
    digests: list[int] | None = None,
    on_bytes: Callable[[int], object] = lambda count: None,
) -> None:
    file.reserve(len(header) + sum(part.nbytes for part in parts))
    write_blocks(file.write, header, parts, digests, on_bytes)


@contextmanager
def open_fields(
    path: str | os.PathLike[str],
    names: Collection[str] | None = None,
    field: str | None = None,
) -> Iterator[dict[str, StoredField]]:
    """Opens the fields of a saved table, "weight" first, and reads only the headers.

    If each field has its own file, `names` limits the opened files. If `field` is set, only that
    field is returned, as "weight". Raises ValueError for an unknown ending, a header that does not
    fit its file, or fields with different numbers of rows.
    """
    name = os.fspath(path)
    file_format = _format_of(name)
    stored: dict[str, StoredField] = {}
    with ExitStack() as stack:
        files = _open_files(name, lambda: file_format.files_to_read(name, names), stack)
        for before, file in files.items():
            with path_in_errors(file.path):
                for after, array in file_format.read_arrays(file.read, file.size).items():
                    key = before + after
                    check_span(repr(key), array.shape, array.dtype)
                    stored[key] = StoredField(array.shape, array.dtype, array.offset, file)
        with path_in_errors(name):
            if not stored:
                raise ValueError("the file has no field")
            if field is not None:
                if field not in stored:
                    names = joined_names([*map(repr, stored)])
                    raise ValueError(f"the file has no field {field!r}. Choose one of {names}.")
                stored = {"weight": stored[field]}
            counts = {array.shape[:1] for array in stored.values()}
            if len(counts) > 1 or () in counts:
                shapes = {key: array.shape for key, array in islice(stored.items(), 20)}
                raise ValueError(f"all fields need the same number of rows, got shapes {shapes}")
        yield dict(sorted(stored.items(), key=lambda item: item[0] != "weight"))


def _open_files(
    path: str, find: Callable[[], dict[str, list[str]]], stack: ExitStack
) -> dict[str, OpenFile]:
    """Opens the files that find() returns, all from one save, even if other saves end meanwhile."""
    for _ in range(_TRIES):
        with ExitStack() as tried:
            places = find()
            files = {name: _open_first(paths, tried) for name, paths in places.items()}
            # Files that still exist now existed when the last one was opened, because no new file
            # gets the inode number of an open file.
            if find() == places and all(
                os.path.samestat(file.status, _first(places[name], os.stat))
                for name, file in files.items()
            ):
                stack.push(tried.pop_all())
                return files
    raise OSError(
        errno.EBUSY, f"other saves replaced the file during each of {_TRIES:,} tries", path
    )


def _open_first(places: Sequence[str], stack: ExitStack) -> OpenFile:
    return _first(places, lambda path: stack.enter_context(open_to_read(path)))


def _first(places: Sequence[str], act: Callable[[str], _Result]) -> _Result:
    """Calls `act` with the first of these paths that exists.

    A .npy file has two paths: first in the switch folder of a save, then the file's own name.
    """
    for place in places[:-1]:
        with suppress(FileNotFoundError):
            return act(place)
    return act(places[-1])
