"""Digests of files, a CRC-32 for each chunk."""

from __future__ import annotations

import zlib

from speedtorch.files.file_format import Read

__all__ = ["CHUNK_BYTES", "chunk_count", "digests_of"]

CHUNK_BYTES = 1 << 20


def chunk_count(nbytes: int) -> int:
    """How many chunks a file of so many bytes has."""
    return -(-nbytes // CHUNK_BYTES)


def digests_of(read: Read, nbytes: int, chunks: range) -> list[int]:
    """The digests of some consecutive chunks of a file of `nbytes` bytes."""
    found, buffer = [], memoryview(bytearray(min(CHUNK_BYTES, nbytes)))
    for number in chunks:
        begin = number * CHUNK_BYTES
        data = buffer[: nbytes - begin]
        read(data, begin)
        found.append(zlib.crc32(data))
    return found
