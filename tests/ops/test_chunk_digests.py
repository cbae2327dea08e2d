"""chunk_digests: the CRC-32C of each chunk of bytes, by the CPU's instructions and by tables."""

from __future__ import annotations

import os
import random
import threading

import pytest
import torch
from checksums import crc32c
from torch.library import opcheck

chunk_digests = torch.ops.speedtorch.chunk_digests
VECTORS = {
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
    b"123456789": 0xE3069283,
}
RUN, RUNS = 16 << 10, 3 * (16 << 10)  # of csrc/core/checksum.cpp, which takes three runs at once
DATA = random.Random(0).randbytes(2 * RUNS + 100)


def bytes_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize("by_tables", [False, True])
@pytest.mark.parametrize(("data", "digest"), VECTORS.items(), ids=[*map(hex, VECTORS.values())])
def test_published_checksums(data: bytes, digest: int, by_tables: bool) -> None:
    assert crc32c(data) == digest
    assert chunk_digests(bytes_of(data), 1 << 20, by_tables).tolist() == [digest]


@pytest.mark.parametrize("by_tables", [False, True])
@pytest.mark.parametrize("begin", [0, 1, 7])
def test_sizes_at_which_the_way_changes(begin: int, by_tables: bool) -> None:
    data = bytes_of(DATA)
    for size in (1, 7, 8, 9, 15, RUN, RUNS - 1, RUNS, RUNS + 1, 2 * RUNS - 1, 2 * RUNS + 9):
        found = chunk_digests(data[begin : begin + size], 1 << 20, by_tables).tolist()
        assert found == [crc32c(DATA[begin : begin + size])], size


@pytest.mark.parametrize("by_tables", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 999, RUNS, 2**63 - 1])
def test_every_chunk_has_a_digest(chunk: int, by_tables: bool) -> None:
    data = DATA[:2000] if chunk < RUNS else DATA
    expected = [crc32c(data[at : at + chunk]) for at in range(0, len(data), chunk)]
    assert chunk_digests(bytes_of(data), chunk, by_tables).tolist() == expected


def test_no_bytes_have_no_digest() -> None:
    digests = chunk_digests(torch.empty(0, dtype=torch.uint8), 4)
    assert digests.shape == (0,) and digests.dtype == torch.int64


def test_bytes_that_were_freed_are_refused() -> None:
    data = torch.zeros(100, dtype=torch.uint8)
    data.untyped_storage().resize_(8)
    with pytest.raises(ValueError, match="data needs 100 bytes of storage, but its storage has 8,"):
        chunk_digests(data, 7)


def test_other_threads_run_meanwhile() -> None:
    data, counted, ends = torch.zeros(256 << 20, dtype=torch.uint8), 0, threading.Event()

    def work() -> None:
        chunk_digests(data, len(data), True)
        ends.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not ends.wait(0.002):
        counted += 1
    thread.join()
    assert counted > 3  # with the lock of Python there would be one at most


def test_the_op_is_as_torch_expects() -> None:
    opcheck(chunk_digests.default, (bytes_of(os.urandom(100)), 7))
