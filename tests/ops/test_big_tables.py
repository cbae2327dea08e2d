"""Tables beyond 2^31 and 2^32 elements: every offset is computed in 64 bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import Place
from torch import Tensor

import speedtorch

SIZES = {"2^31+1": 2**31 + 1, "2^32+1": 2**32 + 1}


def free_bytes() -> int:
    """Host memory that is free or can be freed."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


@pytest.fixture(scope="module", params=list(SIZES.values()), ids=list(SIZES))
def big(request: pytest.FixtureRequest, place: Place) -> Iterator[Tensor]:
    """Bytes `[2^31 + 1]` or `[2^32 + 1]` in the place's memory; a test writes what it reads."""
    elements: int = request.param
    # torch's own pinned memory comes in powers of two.
    need = 2 * elements if place.memory == "torch_pinned" else elements
    if place.memory != "cuda" and free_bytes() < need + 2**30:
        pytest.skip(f"needs {need + 2**30:,} bytes of free memory, has {free_bytes():,}")
    yield place.allocate(elements).view(torch.int8)
    if place.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def corners(count: int) -> list[int]:
    """The rows next to the powers of two where a narrower offset would wrap around."""
    edges = [0, 2, 2**16, 2**20, 2**21, 2**22, 2**31, 2**32, count]
    return sorted({row for edge in edges for row in (edge - 1, edge) if 0 <= row < count})


def shapes(flat: Tensor) -> dict[str, Tensor]:
    """The same bytes as single bytes, as rows of 1,024, and as few rows that lie far apart."""
    rows, apart = flat.numel() // 1024, flat.numel() // 3
    return {
        "bytes": flat,
        "rows": flat[1:].reshape(rows, 1024),
        "apart": flat.as_strided((3, 5), (apart, 1), 1),
    }


def numbered(table: Tensor, ids: list[int], first: int) -> Tensor:
    """A different row for every id."""
    row_shape = table.shape[1:]
    rows = torch.arange(first, first + len(ids)).reshape(-1, *[1] * len(row_shape))
    steps = torch.arange(row_shape.numel()).reshape(row_shape)
    return (rows * 7 + steps).to(torch.int8)


def write(table: Tensor, ids: list[int], rows: Tensor) -> None:
    """Sets rows without the ops."""
    for row, values in zip(ids, rows, strict=True):
        table[row].copy_(values)


def read(table: Tensor, ids: list[int]) -> Tensor:
    """Rows without the ops."""
    return torch.stack([table[row].cpu() for row in ids])


SHAPES = pytest.mark.parametrize("shape", ["bytes", "rows", "apart"])


@SHAPES
def test_gather_reads_the_far_rows(big: Tensor, place: Place, shape: str) -> None:
    table = shapes(big)[shape]
    ids = corners(len(table))
    rows = numbered(table, ids, 1)
    write(table, ids, rows)
    index = place.ids(ids[::-1] + ids[:2])
    expected = torch.cat([rows.flip(0), rows[:2]])
    assert torch.equal(speedtorch.pinned_gather(table, index).cpu(), expected)
    plan = speedtorch.plan_rows(index, len(table))
    assert torch.equal(speedtorch.pinned_gather(table, index, plan=plan).cpu(), expected)


@SHAPES
@pytest.mark.parametrize("accumulate", [False, True], ids=["write", "add"])
def test_scatter_writes_the_far_rows_alone(
    big: Tensor, place: Place, shape: str, accumulate: bool
) -> None:
    table = shapes(big)[shape]
    ids = corners(len(table))
    rows = numbered(table, ids, 2)
    write(table, ids, rows)
    index = ids[::2] + ids[:1]
    src = numbered(table, index, 50)
    speedtorch.pinned_scatter(table, place.ids(index), src.to(place.device), accumulate=accumulate)
    speedtorch.synchronize()
    for position, row in enumerate(index):
        at = ids.index(row)
        rows[at] = rows[at] + src[position] if accumulate else src[position]
    assert torch.equal(read(table, ids), rows)


@SHAPES
def test_swap_moves_the_far_rows_alone(big: Tensor, place: Place, shape: str) -> None:
    table = shapes(big)[shape]
    ids = corners(len(table))
    rows = numbered(table, ids, 3)
    write(table, ids, rows)
    evict, load = ids[1::2], ids[::-2]
    leaving = numbered(table, evict, 80)
    arriving = torch.zeros_like(numbered(table, load, 0)).to(place.device)
    speedtorch.optimizer_state_swap(
        [table], [leaving.to(place.device)], place.ids(evict), [arriving], place.ids(load)
    )
    speedtorch.synchronize()
    for position, row in enumerate(load):
        expected = leaving[evict.index(row)] if row in evict else rows[ids.index(row)]
        assert torch.equal(arriving[position].cpu(), expected)
    for position, row in enumerate(evict):
        if row not in load:
            rows[ids.index(row)] = leaving[position]
    assert torch.equal(read(table, ids), rows)


def test_one_id_past_the_end_is_refused(big: Tensor, place: Place) -> None:
    rows = big.numel()
    with pytest.raises(IndexError, match=f"id {rows} at position 1 .* table of {rows} rows"):
        speedtorch.pinned_gather(big, place.ids([0, rows]))
        speedtorch.synchronize()


@pytest.mark.slow
def test_a_result_beyond_32_bits(place: Place) -> None:
    count, width = 2**21 + 1, 1024
    if place.device == "cpu" and free_bytes() < 2**32:
        pytest.skip(f"needs 4 GiB of free memory, has {free_bytes():,} bytes")
    values = (torch.arange(3).reshape(3, 1) + torch.arange(width)).to(torch.int8)
    ids = torch.arange(count, device=place.device) % 3
    result = speedtorch.pinned_gather(place.table(values), ids)
    for position in (0, 2**20, 2**21 - 1, 2**21):
        assert torch.equal(result[position].cpu(), values[position % 3])
