"""CRC-32C, byte by byte, and the digests that files of checkpoints have."""

from __future__ import annotations

import torch

from speedtorch.files.file_digests import CHUNK_BYTES

__all__ = ["crc32c", "digests_by_tables"]


def _after_byte(state: int) -> int:
    for _ in range(8):
        state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state


_TABLE = [_after_byte(byte) for byte in range(256)]


def crc32c(data: bytes) -> int:
    """The checksum of RFC 3720."""
    state = 0xFFFF_FFFF
    for byte in data:
        state = state >> 8 ^ _TABLE[(state ^ byte) & 0xFF]
    return state ^ 0xFFFF_FFFF


def digests_by_tables(data: bytes) -> list[int]:
    """Of each chunk, without the CPU's instructions; tests/ops/test_chunk_digests.py checks it."""
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    found: list[int] = torch.ops.speedtorch.chunk_digests(flat, CHUNK_BYTES, True).tolist()
    return found
