"""Digests of files, a CRC-32 for each chunk: while a file is written, and of one that is there."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from multiprocessing.pool import AsyncResult

from speedtorch.files.file_format import Read
from speedtorch.files.new_files import NewFile
from speedtorch.files.threads import ThreadPool

__all__ = ["CHUNK_BYTES", "DigestedFile", "chunk_count", "digests_of"]

CHUNK_BYTES = 1 << 20


def chunk_count(nbytes: int) -> int:
    """How many chunks a file of so many bytes has."""
    return -(-nbytes // CHUNK_BYTES)


def digests_of(read: Read, nbytes: int, chunks: range) -> list[int]:
    """The digests of some consecutive chunks of a file of `nbytes` bytes."""
    found = []
    for number in chunks:
        begin = number * CHUNK_BYTES
        data = bytearray(min(CHUNK_BYTES, nbytes - begin))
        read(memoryview(data), begin)
        found.append(zlib.crc32(data))
    return found


class DigestedFile:
    """A new file whose chunks get digests while they are written.

    Args:
        file: the file.
        pool: computes the digests.
        told: is called with each number of bytes that was written.

    Attributes:
        path: of the file.
        count: bytes that were written.
        digests: of all chunks so far.
    """

    def __init__(self, file: NewFile, pool: ThreadPool, told: Callable[[int], object]) -> None:
        self._file, self._pool, self._told = file, pool, told
        self.path = file.path
        self.count = 0
        self.digests: list[int] = []

    def reserve(self, count: int) -> None:
        """As of the file."""
        self._file.reserve(count)

    def write(self, data: bytes | memoryview) -> None:
        """Appends all of `data`, which may change afterwards."""
        view = memoryview(data)
        digests: list[AsyncResult[int]] = []
        at, begin = self.count, 0
        while begin < len(view):
            within = (at + begin) % CHUNK_BYTES
            part = view[begin : begin + CHUNK_BYTES - within]
            before = self.digests.pop() if within else 0
            digests.append(self._pool.apply_async(zlib.crc32, (part, before)))
            if within:  # a chunk goes on; the rest of them begin
                self.digests.append(digests.pop().get())
            begin += len(part)
        self._file.write(view)
        self.digests += [each.get() for each in digests]
        self.count += len(view)
        self._told(len(view))
