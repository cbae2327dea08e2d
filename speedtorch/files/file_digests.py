"""Digests of files, a CRC-32 for each chunk."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

from speedtorch.files.file_format import Read
from speedtorch.files.threads import MOST_THREADS, threads

__all__ = ["CHUNK_BYTES", "all_digests", "chunk_count", "digests_of"]

CHUNK_BYTES = 1 << 20


def chunk_count(nbytes: int) -> int:
    """How many chunks a file of so many bytes has."""
    return -(-nbytes // CHUNK_BYTES)


def digests_of(
    read: Read,
    nbytes: int,
    chunks: Iterable[int],
    told: Callable[[int], object] = lambda count: None,
) -> dict[int, int]:
    """The digests of some chunks of a file of `nbytes` bytes, by their numbers.

    `told` is called with each number of bytes that was read.
    """
    found, buffer = {}, memoryview(bytearray(min(CHUNK_BYTES, nbytes)))
    for number in chunks:
        begin = number * CHUNK_BYTES
        data = buffer[: nbytes - begin]
        read(data, begin)
        found[number] = zlib.crc32(data)
        told(len(data))
    return found


def all_digests(read: Read, nbytes: int, told: Callable[[int], object]) -> list[int]:
    """The digests of all chunks of a file, in their order; threads call `told`."""
    # Each thread takes the next chunk, so that the disk reads the file from its begin to its end.
    count = chunk_count(nbytes)
    numbers = iter(range(count))
    with threads(count) as pool:
        work = read, nbytes, numbers, told
        parts = [pool.begin(digests_of, *work) for _ in range(min(count, MOST_THREADS))]
        found = {number: digest for part in parts for number, digest in pool.result(part).items()}
    return [found[number] for number in range(count)]
