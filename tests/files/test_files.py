"""Reads are exact or an error; a mapped file has its disk space before it is used."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from file_faults import fail, snapshot

from speedtorch.files import system_calls


def test_a_read_takes_the_bytes_from_its_place(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    part = bytearray(4)
    with system_calls.open_to_read(tmp_path / "a") as file:
        file.read(memoryview(part), 3)
    assert (part, file.size) == (b"3456", 10)


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    monkeypatch.setattr(
        system_calls.calls, "read", lambda file, views, at: os.preadv(file, [views[0][:3]], at)
    )
    part = bytearray(8)
    with system_calls.open_to_read(tmp_path / "a") as file:
        file.read(memoryview(part), 1)
    assert part == b"12345678"


def test_a_failing_read_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"0123")
    fail(monkeypatch, "read")
    with (
        system_calls.open_to_read(tmp_path / "a") as file,
        pytest.raises(OSError, match=r"Input/output error: '.*/a'"),
    ):
        file.read(memoryview(bytearray(2)), 0)


def test_a_mapped_file_takes_its_space_and_holds_what_is_written(tmp_path: Path) -> None:
    data, descriptor = system_calls.map_new_file(tmp_path / "a", 100_000)
    assert os.fstat(descriptor).st_blocks * 512 >= 100_000
    data[99_999] = 7
    os.close(descriptor)
    assert (tmp_path / "a").read_bytes() == bytes(99_999) + b"\x07"


def test_a_mapped_file_may_be_empty(tmp_path: Path) -> None:
    data, descriptor = system_calls.map_new_file(tmp_path / "a", 0)
    os.close(descriptor)
    assert (data.shape, data.dtype) == ((0,), torch.uint8)


@pytest.mark.parametrize("call", ["reserve", "map", "fsync"])
def test_a_mapping_that_fails_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    before = os.listdir("/proc/self/fd")
    fail(monkeypatch, call)
    with pytest.raises(OSError, match="Input/output error"):
        system_calls.map_new_file(tmp_path / "a", 4)
    assert snapshot(tmp_path) == {}
    assert set(os.listdir("/proc/self/fd")) <= set(before)


def test_a_mapping_that_the_disk_cannot_hold_is_refused_in_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "reserve", code=errno.ENOSPC)
    with pytest.raises(OSError, match=r"No space.*4,096 bytes are needed and [\d,]+ are free"):
        system_calls.map_new_file(tmp_path / "a", 4096)


def test_a_disk_that_is_too_small_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "reserve")
    small = SimpleNamespace(f_blocks=10, f_bavail=2, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda folder: small)
    with pytest.raises(OSError, match="No space left on device: 8,193 bytes are needed and 8,192"):
        system_calls.map_new_file(tmp_path / "a", 8193)
    assert snapshot(tmp_path) == {}
