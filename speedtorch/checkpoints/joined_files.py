"""JoinedFile: a file with all rows of some sharded tensors, which all ranks write together.

The first rank creates the file. Each rank writes its rows to their places, and then computes the
digests of one part. The file has the same bytes as one that a single process writes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from speedtorch.files.field_blocks import SelectedRows, write_blocks
from speedtorch.files.file_digests import chunk_count, digests_of
from speedtorch.files.new_files import replace_files
from speedtorch.files.safetensors_format import in_file_order, safetensors_header
from speedtorch.files.system_calls import calls, open_to_read, opened, path_in_errors, write_all
from speedtorch.parallel.collectives import Collectives
from speedtorch.table.row_shard import RowShard

__all__ = ["JoinedFile", "JoinedRows"]


@dataclass(frozen=True)
class JoinedRows:
    """Rows `[rows, ...]` that are sharded among ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    own: Mapping[int, Tensor | SelectedRows]
    """This rank's runs of consecutive rows, by the index of their first row."""

    @classmethod
    def of(cls, rows: RowShard) -> JoinedRows:
        """All rows of a tensor."""
        own = {whole.start: rows.field[local.start : local.stop] for whole, local in rows.blocks}
        return cls(tuple(rows.shape), rows.dtype, own)

    @property
    def nbytes(self) -> int:
        """Bytes of all ranks' rows."""
        return math.prod(self.shape) * self.dtype.itemsize


def _writer_of_runs(descriptor: int, runs: Mapping[int, int]) -> Callable[[memoryview], None]:
    """A function that writes consecutive bytes to runs of a file, given as {offset: bytes}."""
    rest, left = iter(runs.items()), 0

    def write(data: memoryview) -> None:
        """Writes bytes after those of the previous call."""
        nonlocal left
        while len(data):
            if not left:
                begin, left = next(rest)
                os.lseek(descriptor, begin, os.SEEK_SET)
            count = min(len(data), left)
            write_all(descriptor, data[:count])
            data, left = data[count:], left - count

    return write


class JoinedFile:
    """A file of sharded rows that all ranks write together."""

    def __init__(self, name: str, tensors: Mapping[str, JoinedRows]) -> None:
        self.name = name
        self._header = safetensors_header({key: (t.shape, t.dtype) for key, t in tensors.items()})
        self.own: dict[int, Tensor | SelectedRows] = {}
        """The rows that this rank writes, by their byte offset in the file."""
        self.nbytes = len(self._header)
        for key in in_file_order({key: tensor.dtype for key, tensor in tensors.items()}):
            tensor = tensors[key]
            row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
            for first, rows in tensor.own.items():
                if rows.nbytes:
                    self.own[self.nbytes + first * row_bytes] = rows
            self.nbytes += tensor.nbytes

    def make(self, folder: str) -> None:
        """Creates the file with its header, and reserves space for all rows."""
        with replace_files([os.path.join(folder, self.name)]) as (file,):
            file.reserve(self.nbytes)
            file.write(self._header)

    def write(self, folder: str, own: Mapping[int, Tensor | SelectedRows]) -> None:
        """Writes this rank's rows, or copies of them, and syncs the file to the disk."""
        path = os.path.join(folder, self.name)
        runs = {begin: rows.nbytes for begin, rows in own.items()}
        with opened(path, os.O_WRONLY) as descriptor, path_in_errors(path):
            write_blocks(_writer_of_runs(descriptor, runs), b"", [*own.values()])
            calls.fsync(descriptor)

    def own_digests(self, folder: str, ranks: Collectives) -> list[int]:
        """Reads this rank's part of the file's chunks and returns their digests."""
        count = chunk_count(self.nbytes)
        first, end = (at * count // ranks.size for at in (ranks.rank, ranks.rank + 1))
        with open_to_read(os.path.join(folder, self.name)) as file:
            return list(digests_of(file.read, self.nbytes, range(first, end)).values())
