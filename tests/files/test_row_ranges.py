"""Some rows of a table are saved, and some of a file's loaded, bit for bit and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from file_faults import fail, snapshot
from reference import (
    DTYPES,
    as_bytes,
    assert_same_bytes,
    assert_same_storage,
    dtype_name,
    layout_copy,
)
from test_table_files import FIELDS, GPU_KINDS, filled

from speedtorch import HostTable
from speedtorch.files import system_calls
from speedtorch.files.npy_format import NPY_DTYPES, npy_header
from speedtorch.files.safetensors_format import safetensors_header

DTYPES_OF = {
    "safetensors": [dtype for dtype in DTYPES if dtype != torch.complex128],
    "npy": [dtype for dtype in DTYPES if dtype in NPY_DTYPES.values()],
}
KINDS = [
    pytest.param(suffix, dtype, id=f"{suffix}-{dtype_name(dtype)}")
    for suffix, dtypes in DTYPES_OF.items()
    for dtype in dtypes
]


def table_of(rows: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> HostTable:
    """Interleaved weight and state, random bits."""
    return filled(HostTable(rows, 3, dtype, ("exp_avg",), "plain"), seed)


# Round trips


@pytest.mark.usefixtures("small_file_blocks")
@pytest.mark.parametrize(("suffix", "dtype"), KINDS)
def test_some_rows_are_saved_as_a_table_of_so_many(
    tmp_path: Path, suffix: str, dtype: torch.dtype
) -> None:
    table, small = table_of(10, dtype), table_of(5, dtype, seed=1)
    small.record.copy_(table.record[2:7])
    for folder in ("part", "small"):
        (tmp_path / folder).mkdir()
    table.save(tmp_path / "part" / f"t.{suffix}", rows=slice(2, 7))
    small.save(tmp_path / "small" / f"t.{suffix}")
    assert snapshot(tmp_path / "part") == snapshot(tmp_path / "small")


@pytest.mark.usefixtures("small_file_blocks")
@pytest.mark.parametrize(("suffix", "dtype"), KINDS)
def test_some_rows_are_loaded_and_the_rest_remain(
    tmp_path: Path, suffix: str, dtype: torch.dtype
) -> None:
    saved, table = table_of(8, dtype), table_of(10, dtype, seed=1)
    saved.save(tmp_path / f"t.{suffix}")
    expected = layout_copy(table.record)
    expected[3:8] = saved.record[1:6]
    table.load(tmp_path / f"t.{suffix}", rows=slice(3, 8), stored=slice(1, 6))
    assert_same_storage(table.record, expected)


@pytest.mark.parametrize("kind", ["plain", "auto", *GPU_KINDS])
def test_two_tables_read_and_write_halves_of_one(tmp_path: Path, kind: str) -> None:
    table, other = (HostTable.from_fields(9, FIELDS, kind) for _ in range(2))
    filled(table)
    table.save(tmp_path / "t.safetensors")
    for rows in (slice(4), slice(4, None)):
        half = HostTable.from_fields(len(table.record[rows]), FIELDS, kind)
        half.load(tmp_path / "t.safetensors", stored=rows)
        half.save(tmp_path / "half.safetensors")
        other.load(tmp_path / "half.safetensors", rows=rows)
        for name in FIELDS:
            assert_same_bytes(half[name], table[name][rows])
    for name in FIELDS:
        assert_same_bytes(other[name], table[name])


@pytest.mark.parametrize(
    "rows",
    [
        slice(None),
        slice(0, 10, 1),
        slice(-3, None),
        slice(None, -1),
        slice(-10, 10),
        slice(np.int64(2), torch.tensor(5)),
        slice(4, 4),
        slice(10, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("suffix", ["safetensors", "npy"])
def test_a_slice_means_what_it_means_to_python(tmp_path: Path, suffix: str, rows: slice) -> None:
    table, path = table_of(10), tmp_path / f"t.{suffix}"
    table.save(path, rows=rows)
    opened = HostTable.open(path, "plain")
    assert_same_bytes(opened.record, table.record[rows])
    other, expected = table_of(10, seed=1), table_of(10, seed=1).record
    expected[rows] = table.record[rows]
    other.load(path, rows=rows)
    assert_same_bytes(other.record, expected)
    table.save(path)
    opened.load(path, stored=rows)
    assert_same_bytes(opened.record, expected[rows])


@pytest.mark.parametrize("suffix", ["safetensors", "npy"])
def test_nothing_else_of_a_huge_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    # 64 GiB by its size, with holes but for three rows beyond every 32-bit offset.
    shape, first = (1 << 32, 4), (1 << 32) - 7
    header = {
        "safetensors": safetensors_header({"weight": (shape, torch.float32)}),
        "npy": npy_header(shape, torch.float32),
    }[suffix]
    with (tmp_path / f"t.{suffix}").open("wb") as file:
        file.write(header)
        file.seek(len(header) + 16 * first)
        file.write(np.arange(12, dtype=np.float32).tobytes())
        file.truncate(len(header) + 16 * shape[0])
    counts, real = [], system_calls.calls.read

    def read(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        counts.append(real(descriptor, views, offset))
        return counts[-1]

    monkeypatch.setattr(system_calls.calls, "read", read)
    table = HostTable(5, 4, memory="plain")
    table.load(tmp_path / f"t.{suffix}", rows=slice(1, 4), stored=slice(first, first + 3))
    assert table["weight"].flatten().tolist() == [0] * 4 + list(range(12)) + [0] * 4
    assert counts[-1] == 3 * 16
    assert sum(counts[:-1]) <= 16_384


# What is refused

REFUSED: list[tuple[Any, type[Exception], str]] = [
    (3, TypeError, "{}: expected a slice, got 3"),
    (range(3), TypeError, r"{}: expected a slice, got range\(0, 3\)"),
    (slice(0.5, 2), TypeError, "slice indices must be integers"),
    (slice(None, None, 2), ValueError, r"{}: expected a step of 1, got slice\(None, None, 2\)"),
    (slice(None, None, -1), ValueError, "{}: expected a step of 1"),
    (slice(5, 2), ValueError, r"{}: slice\(5, 2, None\) is not a range of 10 rows"),
    (slice(-2, 0), ValueError, r"{}: slice\(-2, 0, None\) is not a range of 10 rows"),
    (
        slice(8, 11),
        ValueError,
        r"{}: slice\(8, 11, None\) is not a range of 10 rows. Both ends must",
    ),
    (slice(-11, None), ValueError, "{}: .* is not a range of 10 rows"),
    (slice(11, 11), ValueError, "{}: .* is not a range of 10 rows"),
]
CALLS: dict[str, tuple[str, Callable[[HostTable, Path, Any], None]]] = {
    "save rows": ("rows", lambda table, path, rows: table.save(path, rows=rows)),
    "load rows": ("rows", lambda table, path, rows: table.load(path, rows=rows)),
    "load stored": ("t.npy: stored", lambda table, path, rows: table.load(path, stored=rows)),
}


@pytest.mark.parametrize(("rows", "error", "message"), REFUSED, ids=str)
@pytest.mark.parametrize(("name", "call"), CALLS.values(), ids=CALLS)
def test_a_slice_of_rows_that_are_not_there_changes_nothing(
    tmp_path: Path,
    name: str,
    call: Callable[[HostTable, Path, Any], None],
    rows: Any,
    error: type[Exception],
    message: str,
) -> None:
    table_of(10).save(tmp_path / "t.npy")
    before, table = snapshot(tmp_path), table_of(10, seed=1)
    with pytest.raises(error, match=message.format(name)):
        call(table, tmp_path / "t.npy", rows)
    assert snapshot(tmp_path) == before
    assert_same_storage(table.record, table_of(10, seed=1).record)


@pytest.mark.parametrize(
    ("rows", "stored", "message"),
    [
        (slice(2, 6), slice(3), "[3, 3], but the table needs torch.float32 [4, 3] (rows 2:6 of "),
        (slice(2, 6), slice(3), "10 from rows 0:3 of 8 in the file)"),
        (slice(2, 6), slice(None), "[8, 3], but the table needs torch.float32 [4, 3] (rows 2:6 of"),
        (slice(None), slice(3), "[3, 3], but the table needs torch.float32 [10, 3] (rows 0:10 of"),
        (slice(2, 6), slice(8, 8), "[0, 3], but the table needs torch.float32 [4, 3]"),
    ],
)
@pytest.mark.parametrize("suffix", ["safetensors", "npy"])
def test_another_number_of_rows_changes_nothing(
    tmp_path: Path, suffix: str, rows: slice, stored: slice, message: str
) -> None:
    table_of(8).save(tmp_path / f"t.{suffix}")
    table = table_of(10, seed=1)
    with pytest.raises(ValueError, match=re.escape(message)):
        table.load(tmp_path / f"t.{suffix}", rows=rows, stored=stored)
    assert_same_storage(table.record, table_of(10, seed=1).record)


@pytest.mark.parametrize("suffix", ["safetensors", "npy"])
def test_another_dtype_changes_nothing(tmp_path: Path, suffix: str) -> None:
    fields = {"weight": (3, torch.float32), "exp_avg": (3, torch.float64)}
    HostTable.from_fields(8, fields, "plain").save(tmp_path / f"t.{suffix}")
    table = table_of(10, seed=1)
    message = (
        r"'exp_avg' is torch.float64 \[2, 3\], but the table needs torch.float32 \[2, 3\] \(rows"
    )
    with pytest.raises(ValueError, match=message):
        table.load(tmp_path / f"t.{suffix}", rows=slice(2), stored=slice(2))
    assert_same_storage(table.record, table_of(10, seed=1).record)


@pytest.mark.usefixtures("small_file_blocks")
@pytest.mark.parametrize("suffix", ["safetensors", "npy"])
def test_a_read_that_fails_half_way_leaves_the_other_rows_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    path, saved, table = tmp_path / f"t.{suffix}", table_of(8), table_of(10, seed=1)
    saved.save(path)
    expected = layout_copy(table.record)
    with monkeypatch.context() as patch:
        fail(patch, "read", 4)
        with pytest.raises(OSError, match="the table may have old and new rows now. Load it again"):
            table.load(path, rows=slice(3, 8), stored=slice(1, 6))
    assert not torch.equal(as_bytes(table.record[3:8]), as_bytes(expected[3:8]))
    for others in (slice(3), slice(8, None)):
        assert_same_bytes(table.record[others], expected[others])
    table.load(path, rows=slice(3, 8), stored=slice(1, 6))
    expected[3:8] = saved.record[1:6]
    assert_same_storage(table.record, expected)
