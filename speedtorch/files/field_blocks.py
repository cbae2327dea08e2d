"""Writes and compares fields as blocks of bytes; threads gather and hash the next blocks.

A field may be strided (one of several in a record), and is on the CPU or on a GPU.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speedtorch.files.file_digests import CHUNK_BYTES, crc32c_of_chunks
from speedtorch.files.threads import MOST_THREADS, threads

__all__ = ["SelectedRows", "byte_rows", "have_same_bytes", "write_blocks"]

# A block has whole chunks, because each chunk has a digest. Blocks are large, because a thread
# needs the GIL for each block, and a training thread may hold the GIL for 5 ms.
_BLOCK_BYTES = 4 * CHUNK_BYTES
# Blocks in memory at one time. The calling thread writes blocks faster than one thread prepares
# them, so several threads prepare the following blocks.
_BLOCKS = 8

_COMPARED_BYTES = 1 << 20  # bytes that a thread compares at once

_Bytes: TypeAlias = npt.NDArray[np.uint8]
_Copy: TypeAlias = tuple[Tensor, int, _Bytes]
"""Rows as bytes, the first byte to copy, and the memory to copy to."""


def byte_rows(field: Tensor) -> Tensor:
    """Returns the rows of a field as a byte view, uint8 `[rows, bytes]`, of the field's memory.

    Raises ValueError unless each row is contiguous.
    """
    if field.numel() == 0:
        return torch.empty(0, 1, dtype=torch.uint8, device="cpu")
    rows = field.detach() if field.dim() else field.detach().view(1)
    if not rows[0].is_contiguous():
        raise ValueError(
            f"each row, of shape {tuple(rows.shape[1:])}, must be contiguous. Pass"
            " field.contiguous()."
        )
    return rows.as_strided((len(rows), rows[0].numel()), (rows.stride(0), 1)).view(torch.uint8)


def have_same_bytes(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Whether the fields of each pair, of equal shape and dtype, are bitwise identical.

    GPU work on the fields must have finished.
    """
    parts: list[tuple[Tensor, Tensor]] = []
    for rows, compared in (map(byte_rows, pair) for pair in pairs):
        count = max(1, _COMPARED_BYTES // rows.shape[1])
        parts += zip(torch.split(rows, count), torch.split(compared, count), strict=True)
    rest = iter(parts)  # all threads share this iterator

    with threads(MOST_THREADS) as pool:
        found = [pool.begin(_all_equal, rest) for _ in range(MOST_THREADS)]
        return all(map(pool.result, found))


def _all_equal(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    return all(np.array_equal(rows.cpu().numpy(), other.cpu().numpy()) for rows, other in pairs)


@dataclass(frozen=True)
class SelectedRows:
    """Rows of a field `[rows, ...]` by ids `[n]` on the CPU, gathered when they are written."""

    field: Tensor
    ids: Tensor

    @property
    def shape(self) -> torch.Size:
        """`[n, ...]`."""
        return torch.Size((len(self.ids), *self.field.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the field."""
        return self.field.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the selected rows."""
        return math.prod(self.shape) * self.dtype.itemsize

    def gather(self, ids: Tensor) -> Tensor:
        """Copies rows by their ids to new memory on the CPU."""
        return self.field.index_select(0, ids.to(self.field.device)).cpu()

    def part(self, begin: int, count: int) -> tuple[Tensor, int]:
        """Returns the rows with bytes `begin` to `begin + count`, and the offset of `begin`."""
        row_bytes = self.nbytes // len(self.ids)
        first, end = begin // row_bytes, -(-(begin + count) // row_bytes)
        return byte_rows(self.gather(self.ids[first:end])), begin - first * row_bytes


def _gather(rows: Tensor, begin: int, to: _Bytes) -> None:
    """Fills `to` with the bytes of `rows` from byte `begin` on; uses only the calling thread."""
    row_bytes, at = rows.shape[1], 0
    while at < len(to):
        row, column = divmod(begin + at, row_bytes)
        count = min(len(to) - at, row_bytes - column)
        whole = (len(to) - at) // row_bytes
        if column == 0 and whole:
            count, part = whole * row_bytes, rows[row : row + whole]
        else:
            part = rows[row : row + 1, column : column + count]
        target = to[at : at + count].reshape(part.shape)
        if part.is_cpu:
            np.copyto(target, part.numpy())
        else:
            torch.from_numpy(target).copy_(part)
        at += count


def write_blocks(
    write: Callable[[memoryview], object],
    header: bytes,
    fields: Sequence[Tensor | SelectedRows],
    digests: list[int] | None = None,
    on_bytes: Callable[[int], object] = lambda count: None,
) -> None:
    """Writes a header, and then the bytes of fields, whose rows must be contiguous.

    The digests of all chunks are appended to `digests`. `on_bytes` is called after each write with
    the number of bytes written. If `write` raises, an unknown part of the bytes has been written,
    and `digests` may include bytes that were not written. The caller must discard both.
    """
    nbytes = len(header) + sum(field.nbytes for field in fields)
    if not nbytes:
        return
    count = min(_BLOCKS, -(-nbytes // _BLOCK_BYTES))
    buffers = [np.empty(min(_BLOCK_BYTES, nbytes), dtype=np.uint8) for _ in range(count)]
    prepared: deque[tuple[_Bytes, Future[list[int]]]] = deque()

    def write_next() -> None:
        """Waits for the oldest block, writes it and frees its buffer."""
        block, found = prepared.popleft()
        numbers = pool.result(found)
        if digests is not None:
            digests.extend(numbers)
        write(block.data)
        on_bytes(len(block))

    begin = torch.tensor(list(header), dtype=torch.uint8, device="cpu")
    with threads(count) as pool:
        for block, copies in _blocks(chain([begin], _long_rows_apart(fields)), buffers):
            prepared.append((block, pool.begin(_prepare, block, copies, digests is not None)))
            if len(prepared) == count:  # the next block reuses the first buffer
                write_next()
        while prepared:
            write_next()


def _long_rows_apart(fields: Iterable[Tensor | SelectedRows]) -> Iterator[Tensor | SelectedRows]:
    """Replaces SelectedRows with long rows by a view of each row, to copy rows without a gather."""
    for field in fields:
        if isinstance(field, SelectedRows) and field.nbytes > len(field.ids) * _BLOCK_BYTES // 16:
            yield from (field.field[row : row + 1] for row in field.ids.tolist())
        else:
            yield field


def _blocks(
    fields: Iterable[Tensor | SelectedRows], buffers: Sequence[_Bytes]
) -> Iterator[tuple[_Bytes, list[_Copy]]]:
    """Yields blocks, each in the next buffer, with the copies that threads must make."""
    copies: list[_Copy] = []
    number = filled = 0
    for field in fields:
        rows = field if isinstance(field, SelectedRows) else byte_rows(field)
        begin = 0
        while begin < field.nbytes:
            buffer = buffers[number % len(buffers)]
            count = min(field.nbytes - begin, len(buffer) - filled)
            part = rows.part(begin, count) if isinstance(rows, SelectedRows) else (rows, begin)
            copy = (*part, buffer[filled : filled + count])
            if part[0].is_cpu:
                copies.append(copy)
            else:  # at once, so that the copy is on this thread's current stream
                _gather(*copy)
            begin, filled = begin + count, filled + count
            if filled == len(buffer):
                yield buffer, copies
                copies, filled, number = [], 0, number + 1
    if filled:
        yield buffers[number % len(buffers)][:filled], copies


def _prepare(block: _Bytes, copies: Sequence[_Copy], digested: bool) -> list[int]:
    """Gathers a block and returns the digests of its chunks, or an empty list."""
    for copy in copies:
        _gather(*copy)
    return crc32c_of_chunks(torch.from_numpy(block)) if digested else []
