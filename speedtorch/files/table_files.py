"""Fields of a table to files and back, in blocks: a table of any size takes a few MB more.

A field may be strided (one of several in a record), on the CPU or on a GPU; its rows move as bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from speedtorch.files import npy_format, safetensors_format
from speedtorch.files.chunk_digests import DigestedFile
from speedtorch.files.file_format import FileFormat, Read, StoredArray
from speedtorch.files.new_files import NewFile, replace_files
from speedtorch.files.system_calls import about, open_to_read
from speedtorch.ops.shapes import check_span

__all__ = [
    "FORMATS",
    "StoredField",
    "blocks_of_bytes",
    "open_fields",
    "save_fields",
    "write_safetensors",
]

FORMATS: dict[str, FileFormat] = {".safetensors": safetensors_format, ".npy": npy_format}

# Large enough for the disk's full speed; small beside any table.
_BLOCK_BYTES = 4 << 20


def blocks_of_bytes(field: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Consecutive bytes, uint8 `[rows, bytes]`, in the file's order, _BLOCK_BYTES at most.

    Each comes with a contiguous buffer on the CPU, which is the next one's, too.
    """
    if field.numel() == 0:
        return
    rows = field.detach() if field.dim() else field.detach().view(1)
    if not rows[0].is_contiguous():
        raise ValueError(f"rows of shape {tuple(rows.shape[1:])} must be contiguous")
    rows = rows.as_strided((len(rows), rows[0].numel()), (rows.stride(0), 1)).view(torch.uint8)
    count, row_bytes = rows.shape
    buffer = torch.empty(min(_BLOCK_BYTES, rows.numel()), dtype=torch.uint8, device="cpu")
    rows_per_block = max(1, _BLOCK_BYTES // row_bytes)
    for row in range(0, count, rows_per_block):
        for column in range(0, row_bytes, _BLOCK_BYTES):
            block = rows[row : row + rows_per_block, column : column + _BLOCK_BYTES]
            yield block, buffer[: block.numel()].view(block.shape)


@dataclass(frozen=True)
class StoredField(StoredArray):
    """A field `[rows, ...]` in an open file."""

    path: str
    read: Read

    def part(self, rows: range) -> StoredField:
        """Some of its rows, `[len(rows), ...]`."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        offset = self.offset + rows.start * row_bytes
        return replace(self, shape=(len(rows), *self.shape[1:]), offset=offset)

    def read_into(self, field: Tensor) -> None:
        """Reads all rows into a field of this shape and dtype, of any row stride."""
        offset = self.offset
        for block, buffer in blocks_of_bytes(field):
            with about(self.path, "the table holds old and new rows now; load it again"):
                self.read(buffer.view(-1).numpy().data, offset)
            block.copy_(buffer)
            offset += buffer.numel()


def _format_of(path: str) -> FileFormat:
    if (suffix := os.path.splitext(path)[1]) not in FORMATS:
        raise ValueError(f"{path}: expected a name that ends in {' or '.join(FORMATS)}")
    return FORMATS[suffix]


def save_fields(
    path: str | os.PathLike[str], fields: Mapping[str, Tensor], mapped: str | None = None
) -> None:
    """Saves fields of a table, `[rows, ...]` and contiguous within a row: all or none.

    ValueError for another ending, what the format cannot hold, files beside it that would be read
    as fields of this table, or the file `mapped`.
    """
    name = os.fspath(path)
    _refuse_own([name], mapped)
    files = _format_of(name).files_to_write(name, fields)
    _refuse_own([target for target, _, _ in files], mapped)
    with replace_files([target for target, _, _ in files]) as new_files:
        for file, (_, header, parts) in zip(new_files, files, strict=True):
            _write(file, header, parts)


def _refuse_own(targets: Sequence[str], mapped: str | None) -> None:
    if own := [target for target in targets if os.path.realpath(target) == mapped]:
        raise ValueError(f"{own[0]}: is the file that the rows are in; choose another")


def write_safetensors(file: NewFile | DigestedFile, fields: Mapping[str, Tensor]) -> None:
    """Writes fields, or the tensors of a state dict, to a new file as safetensors."""
    for _, header, parts in safetensors_format.files_to_write(file.path, fields):
        _write(file, header, parts)


def _write(file: NewFile | DigestedFile, header: bytes, parts: Sequence[Tensor]) -> None:
    file.reserve(len(header) + sum(part.nbytes for part in parts))
    file.write(header)
    for part in parts:
        for block, buffer in blocks_of_bytes(part):
            buffer.copy_(block)
            file.write(buffer.view(-1).numpy().data)


@contextmanager
def open_fields(
    path: str | os.PathLike[str],
    names: Collection[str] | None = None,
    opened: Callable[[str], AbstractContextManager[tuple[Read, int]]] = open_to_read,
) -> Iterator[dict[str, StoredField]]:
    """Opens the fields of a saved table, "weight" first; nothing is read yet but the headers.

    With `names` those files alone are opened that have these fields, where each has its own.
    `opened` opens a file, as open_to_read does.
    ValueError for another ending, a header that does not fit its file, or fields whose numbers of
    rows differ.
    """
    name = os.fspath(path)
    file_format = _format_of(name)
    stored: dict[str, StoredField] = {}
    with ExitStack() as stack:
        for before, target in file_format.files_to_read(name, names).items():
            read, size = stack.enter_context(opened(target))
            with about(target):
                for after, array in file_format.read_arrays(read, size).items():
                    check_span(repr(before + after), array.shape, array.dtype)
                    field = StoredField(array.shape, array.dtype, array.offset, target, read)
                    stored[before + after] = field
        counts = {each: field.shape[:1] for each, field in stored.items()}
        with about(name):
            if not stored:
                raise ValueError("it holds no field")
            if len(set(counts.values())) > 1 or () in counts.values():
                raise ValueError(f"its fields need the same number of rows, they have {counts}")
        yield dict(sorted(stored.items(), key=lambda item: item[0] != "weight"))
