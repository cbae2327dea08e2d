"""Digests of a file: one for each MiB, which threads read in the file's order."""

from __future__ import annotations

import os
import threading
import zlib
from pathlib import Path

import pytest
from checksums import digests_by_tables
from file_faults import fail

from speedtorch.files import system_calls
from speedtorch.files.file_digests import CHUNK_BYTES, all_digests, digests_of
from speedtorch.files.system_calls import open_to_read


def made(path: Path, nbytes: int) -> list[bytes]:
    """The chunks of a new file."""
    data = os.urandom(nbytes)
    path.write_bytes(data)
    return [data[at : at + CHUNK_BYTES] for at in range(0, nbytes, CHUNK_BYTES)]


@pytest.mark.parametrize("nbytes", [1, CHUNK_BYTES - 1, CHUNK_BYTES, 21 * CHUNK_BYTES + 5])
def test_all_chunks_have_digests(tmp_path: Path, nbytes: int) -> None:
    chunks, counts = made(tmp_path / "a", nbytes), list[int]()
    with open_to_read(tmp_path / "a") as file:
        expected, last = digests_by_tables(b"".join(chunks)), len(chunks) - 1
        assert all_digests(file.read, file.size, counts.append) == expected
        assert digests_of(file.read, file.size, [last, 0]) == {n: expected[n] for n in (last, 0)}
        by_zlib = all_digests(file.read, file.size, lambda count: None, zlib.crc32)
        assert by_zlib == [zlib.crc32(each) for each in chunks]
    assert sorted(counts) == sorted(map(len, chunks))


def test_threads_read_consecutive_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "a", 64 * CHUNK_BYTES)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    offsets, all_read, real = list[int](), threading.Barrier(4), system_calls.calls.read

    def read_together(file: int, views: list[memoryview], offset: int) -> int:
        offsets.append(offset // CHUNK_BYTES)
        all_read.wait(timeout=60)
        return real(file, views, offset)

    monkeypatch.setattr(system_calls.calls, "read", read_together)
    with open_to_read(tmp_path / "a") as file:
        all_digests(file.read, file.size, lambda count: None)
    assert sorted(offsets) == [*range(64)]
    # The calling thread is a fifth one, if a thread has not begun when its result is awaited.
    assert max(abs(chunk - place) for place, chunk in enumerate(offsets)) <= 5


def test_a_read_that_fails_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "a", 5 * CHUNK_BYTES)
    fail(monkeypatch, "read", 3)
    with (
        open_to_read(tmp_path / "a") as file,
        pytest.raises(OSError, match=r"Input/output error: '.*/a'"),
    ):
        all_digests(file.read, file.size, lambda count: None)
