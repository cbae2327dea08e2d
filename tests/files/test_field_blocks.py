"""Blocks of new files: all bytes in their order, with a digest for each MiB, by several threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checksums import digests_by_tables
from file_faults import fail
from torch import Tensor

from speedtorch.files import field_blocks
from speedtorch.files.field_blocks import SelectedRows, have_same_bytes, write_blocks
from speedtorch.files.file_digests import CHUNK_BYTES
from speedtorch.files.new_files import replace_files
from speedtorch.files.table_files import write_safetensors


def numbers(*shape: int, device: str = "cpu") -> Tensor:
    """Rows of int16, of which no two within a few MiB are alike."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, device=device) * 7919 % 65_521 - 32_768).to(torch.int16).view(shape)


def content(field: Tensor | SelectedRows) -> bytes:
    """The bytes that a field is to have in a file."""
    rows = (
        field.field[field.ids.to(field.field.device)] if isinstance(field, SelectedRows) else field
    )
    return rows.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def fields_of(device: str) -> list[Tensor | SelectedRows]:
    """Whole fields, strided ones, rows longer than a block, a number, none, and some rows."""
    records = numbers(9_000, 300, device=device)
    ids = torch.arange(0, 9_000, 7)
    return [
        numbers(3, 5, device=device),
        records[:, :200],
        records[:, 200:],
        numbers(2, 700_000, device=device),
        numbers(1, device=device).view(()),
        torch.empty(0, 4, device=device),
        SelectedRows(records[:, 100:], ids),
        SelectedRows(numbers(4, 700_000, device=device), torch.tensor([3, 1])),
        torch.nn.Parameter(torch.ones(3, device=device)),
        numbers(7, device=device),
    ]


@pytest.mark.parametrize("header", [1, 8, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 3])
def test_a_file_has_all_bytes_in_their_order_and_a_digest_for_each_chunk(
    tmp_path: Path, header: int, device: str
) -> None:
    fields, digests, counts = fields_of(device), list[int](), list[int]()
    begin = bytes(each % 251 for each in range(header))
    with replace_files([tmp_path / "a"]) as (file,):
        write_blocks(file.write, begin, fields, digests, counts.append)
    data = (tmp_path / "a").read_bytes()
    assert data == begin + b"".join(map(content, fields))
    assert digests == digests_by_tables(data)
    assert sum(counts) == len(data)


@pytest.mark.parametrize("block", [1, 3, 24, 1000])
def test_blocks_of_any_size_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(field_blocks, "_BLOCK_BYTES", block)
    records = numbers(50, 7)
    some = SelectedRows(records[:, 1:4], torch.tensor([49, 0, 7, 7]))
    fields = [records[:, :3], some, records[:, 6:]]
    with replace_files([tmp_path / "a"]) as (file,):
        write_blocks(file.write, b"head", fields)
    assert (tmp_path / "a").read_bytes() == b"head" + b"".join(map(content, fields))


@pytest.mark.parametrize("width", [1, 100, 5_000])
def test_some_rows_are_copied_before_by_no_more_than_a_block_and_a_part(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(field_blocks, "_BLOCK_BYTES", 4_000)
    copied, real = list[int](), SelectedRows.gather

    def gather(some: SelectedRows, ids: Tensor) -> Tensor:
        copied.append(some.field[0].nbytes * len(ids))
        return real(some, ids)

    monkeypatch.setattr(SelectedRows, "gather", gather)
    written: list[bytes] = []
    some = SelectedRows(numbers(60, width + 1)[:, :width], torch.tensor([59, 7, 7, 0]).repeat(20))
    write_blocks(lambda data: written.append(bytes(data)), b"head", [some, some])
    assert b"".join(written) == b"head" + 2 * content(some)
    assert max(copied, default=0) <= 4_500


@pytest.mark.parametrize("call", ["reserve", "write"])
def test_a_call_that_fails_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    fail(monkeypatch, call, 1 if call == "reserve" else 2)
    with (
        pytest.raises(OSError, match="Input/output error"),
        replace_files([tmp_path / "a"]) as (file,),
    ):
        write_safetensors(file, {"a": torch.zeros(5 << 20, dtype=torch.uint8)})
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_of_nothing() -> None:
    written: list[memoryview] = []
    write_blocks(written.append, b"", [torch.zeros(0, 3)])
    assert written == []


@pytest.mark.parametrize("at", [(0, 0), (4_999, 199), (5_000, 0), (8_999, 199)])
def test_one_different_element_makes_the_bytes_differ(at: tuple[int, int], device: str) -> None:
    rows, records = numbers(9_000, 200), numbers(9_000, 300, device=device)
    records[:, :200] = rows
    assert have_same_bytes([(records[:, :200], rows)])
    records[at] ^= 1
    assert not have_same_bytes([(records[:, :200], rows)])


def test_bytes_are_compared_and_not_numbers() -> None:
    assert have_same_bytes([(torch.tensor([float("nan")]), torch.tensor([float("nan")]))])
    assert not have_same_bytes([(torch.tensor([0.0]), torch.tensor([-0.0]))])
    assert have_same_bytes([(torch.tensor(3), torch.tensor(3))])
    assert have_same_bytes([(torch.empty(0, 4), torch.empty(0, 4))])
