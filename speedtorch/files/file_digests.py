"""Digests of files: one CRC-32C for each chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from speedtorch.files.file_format import ReadAt
from speedtorch.files.threads import MOST_THREADS, threads
from speedtorch.ops.functions import chunk_digests

__all__ = ["CHUNK_BYTES", "all_digests", "chunk_count", "crc32c", "crc32c_of_chunks", "digests_of"]

CHUNK_BYTES = 1 << 20


def chunk_count(nbytes: int) -> int:
    """The number of chunks in `nbytes` bytes."""
    return -(-nbytes // CHUNK_BYTES)


def crc32c_of_chunks(data: Tensor) -> list[int]:
    """The digests of all chunks of bytes, uint8 `[n]` on the CPU."""
    return chunk_digests(data, CHUNK_BYTES).tolist()


def crc32c(data: memoryview) -> int:
    """The digest of one nonempty chunk."""
    (digest,) = crc32c_of_chunks(torch.frombuffer(data, dtype=torch.uint8))
    return digest


def digests_of(
    read: ReadAt,
    nbytes: int,
    chunks: Iterable[int],
    on_bytes: Callable[[int], object] = lambda count: None,
    digest_of: Callable[[memoryview], int] = crc32c,
) -> dict[int, int]:
    """Returns the digests of `chunks`, by chunk number, of a file with `nbytes` bytes.

    After each chunk, `on_bytes` is called with the number of bytes read.
    """
    found, buffer = {}, memoryview(bytearray(min(CHUNK_BYTES, nbytes)))
    for number in chunks:
        begin = number * CHUNK_BYTES
        data = buffer[: nbytes - begin]
        read(data, begin)
        found[number] = digest_of(data)
        on_bytes(len(data))
    return found


def all_digests(
    read: ReadAt,
    nbytes: int,
    on_bytes: Callable[[int], object],
    digest_of: Callable[[memoryview], int] = crc32c,
) -> list[int]:
    """Returns the digests of all chunks of a file in order; `on_bytes` is called from threads."""
    # The threads share one iterator, so that the disk reads the file in order.
    count = chunk_count(nbytes)
    numbers = iter(range(count))
    with threads(most := min(count, MOST_THREADS)) as pool:
        work = read, nbytes, numbers, on_bytes, digest_of
        parts = [pool.begin(digests_of, *work) for _ in range(most)]
        found = {number: digest for part in parts for number, digest in pool.result(part).items()}
    return [found[number] for number in range(count)]
