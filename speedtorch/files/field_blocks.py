"""Fields as blocks of bytes: threads gather and hash the next ones while one is written.

A field may be strided (one of several in a record), on the CPU or on a GPU; its rows move as bytes.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speedtorch.files.chunk_digests import CHUNK_BYTES
from speedtorch.files.new_files import NewFile
from speedtorch.files.threads import threads

__all__ = ["SomeRows", "byte_rows", "write_blocks"]

# A block has one digest, and fits a core's cache between its gathering and its hashing.
_BLOCK_BYTES = CHUNK_BYTES
# Blocks in memory: several threads prepare as many bytes as one writes.
_BLOCKS = 8

_Bytes: TypeAlias = npt.NDArray[np.uint8]


def byte_rows(field: Tensor) -> Tensor:
    """The rows of a field that has some as bytes, uint8 `[rows, bytes]`, in the field's memory.

    ValueError unless each row is contiguous.
    """
    rows = field.detach() if field.dim() else field.detach().view(1)
    if not rows[0].is_contiguous():
        raise ValueError(f"rows of shape {tuple(rows.shape[1:])} must be contiguous")
    return rows.as_strided((len(rows), rows[0].numel()), (rows.stride(0), 1)).view(torch.uint8)


@dataclass(frozen=True)
class SomeRows:
    """Rows of a field `[rows, ...]` by their ids `[n]`, on the CPU, which are read when written."""

    field: Tensor
    ids: Tensor

    @property
    def shape(self) -> torch.Size:
        """`[n, ...]`."""
        return torch.Size((len(self.ids), *self.field.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        """The field's."""
        return self.field.dtype

    @property
    def nbytes(self) -> int:
        """Of these rows."""
        return math.prod(self.shape) * self.dtype.itemsize

    def at(self, ids: Tensor) -> Tensor:
        """Rows by their ids, on the CPU, in memory of their own."""
        return self.field.index_select(0, ids.to(self.field.device)).cpu()

    def part(self, begin: int, count: int) -> tuple[Tensor, int]:
        """Rows that have `count` of all bytes, from `begin` on, and where these begin in them."""
        row_bytes = self.nbytes // len(self.ids)
        first, end = begin // row_bytes, -(-(begin + count) // row_bytes)
        return self.at(self.ids[first:end]), begin - first * row_bytes


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a block: bytes of a field, and the memory where they are gathered."""

    field: Tensor
    begin: int
    to: _Bytes

    def gather(self) -> None:
        """Copies them in this thread alone, as other blocks have the other cores."""
        rows, at = byte_rows(self.field), 0
        row_bytes = rows.shape[1]
        while at < len(self.to):
            row, column = divmod(self.begin + at, row_bytes)
            count = min(len(self.to) - at, row_bytes - column)
            whole = (len(self.to) - at) // row_bytes
            if column == 0 and whole:
                count, part = whole * row_bytes, rows[row : row + whole]
            else:
                part = rows[row : row + 1, column : column + count]
            to = self.to[at : at + count].reshape(part.shape)
            if part.is_cpu:
                np.copyto(to, part.numpy())
            else:
                torch.from_numpy(to).copy_(part)
            at += count


def write_blocks(
    file: NewFile,
    header: bytes,
    fields: Sequence[Tensor | SomeRows],
    digests: list[int] | None = None,
    told: Callable[[int], object] = lambda count: None,
) -> None:
    """Writes a header, and then the bytes of fields that are contiguous within a row.

    Args:
        file: The file.
        header: What it begins with.
        fields: What follows, in this order.
        digests: Takes the digests of all chunks.
        told: Is called with each number of bytes that was written.
    """
    nbytes = len(header) + sum(each.nbytes for each in fields)
    file.reserve(nbytes)
    count = min(_BLOCKS, -(-nbytes // _BLOCK_BYTES))
    buffers = [np.empty(min(_BLOCK_BYTES, nbytes), dtype=np.uint8) for _ in range(count)]
    prepared: deque[tuple[_Bytes, AsyncResult[int]]] = deque()

    def write_next() -> None:
        block, digest = prepared.popleft()
        number = digest.get()
        if digests is not None:
            digests.append(number)
        file.write(block.data)
        told(len(block))

    begin = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    with threads(count) as pool:
        for block, pieces in _blocks([begin, *fields], buffers):
            work = block, pieces, digests is not None
            prepared.append((block, pool.apply_async(_prepare, work)))
            if len(prepared) == count:  # the next one has the buffer of the first
                write_next()
        while prepared:
            write_next()


def _blocks(
    fields: Sequence[Tensor | SomeRows], buffers: Sequence[_Bytes]
) -> Iterator[tuple[_Bytes, list[_Piece]]]:
    """Blocks, each in the next buffer, and what of them threads are to gather."""
    pieces: list[_Piece] = []
    number = filled = 0
    for field in fields:
        begin = 0
        while begin < field.nbytes:
            buffer = buffers[number % len(buffers)]
            count = min(field.nbytes - begin, len(buffer) - filled)
            to = buffer[filled : filled + count]
            if isinstance(field, SomeRows):
                pieces.append(_Piece(*field.part(begin, count), to))
            elif field.is_cpu:
                pieces.append(_Piece(field, begin, to))
            else:  # on the stream of this thread
                _Piece(field, begin, to).gather()
            begin, filled = begin + count, filled + count
            if filled == len(buffer):
                yield buffer, pieces
                pieces, filled, number = [], 0, number + 1
    if filled:
        yield buffers[number % len(buffers)][:filled], pieces


def _prepare(block: _Bytes, pieces: Sequence[_Piece], digested: bool) -> int:
    for each in pieces:
        each.gather()
    return zlib.crc32(block.data) if digested else 0
