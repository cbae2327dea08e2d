"""pinned_gather: the rows of a table that a batch names, in the batch's order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import reference
import torch
from conftest import Place
from reference import DTYPES, WIDTHS, assert_same_bytes, dtype_name, layout_copy, random_rows
from torch import Tensor

import speedtorch
from speedtorch.ops.functions import rows_at

pytestmark = pytest.mark.dealt("place", "gpu_place")

IDS = [3, 0, 36, 3, 17, 5, 5, 21, 36, 1, 2, 8]

# How a batch's ids may lie in memory: `[12]` ids in, the index out.
INDEX_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "scalar": lambda ids: ids[2],
    "one_dim": lambda ids: ids,
    "matrix": lambda ids: ids.reshape(3, 4),
    "three_dims": lambda ids: ids.reshape(2, 1, 6),
    "transposed": lambda ids: ids.reshape(3, 4).t(),
    "every_second": lambda ids: ids[1::2],
    "column": lambda ids: ids.reshape(4, 3)[:, 1],
    "expanded": lambda ids: ids[4].expand(5, 2),
    "empty": lambda ids: ids[:0],
    "empty_matrix": lambda ids: ids[:0].reshape(3, 0),
}

# Elements between rows and in front of the first: aligned to 16 bytes, to the element, to nothing.
SPACINGS = {"tight": (0, 0), "gap": (5, 0), "offset": (0, 3), "gap_and_offset": (7, 1)}
SPACINGS |= {"aligned_gap_and_offset": (16, 16)}


def check(place: Place, values: Tensor, index: Tensor) -> None:
    """The op's rows are the reference's, and the table is as it was."""
    table = place.table(values)
    result = speedtorch.pinned_gather(table, index)
    assert result.device == index.device
    assert_same_bytes(result, reference.pinned_gather(values, index.cpu()))
    reference.assert_same_storage(table, values)


def test_rows_are_in_the_order_of_the_ids(place: Place) -> None:
    table = place.table(torch.tensor([[1, 2], [3, 4], [5, 6]]))
    result = speedtorch.pinned_gather(table, place.ids([2, 0, 2]))
    assert result.tolist() == [[5, 6], [1, 2], [5, 6]]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_every_dtype_moves_bit_for_bit(place: Place, dtype: torch.dtype) -> None:
    check(place, random_rows(37, (13,), dtype), place.ids(IDS))


@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_in_bytes_moves_bit_for_bit(place: Place, width: int) -> None:
    check(place, random_rows(37, (width,), torch.uint8), place.ids(IDS))


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.complex128])
@pytest.mark.parametrize("columns", [1, 4, 21, 128])
def test_rows_may_lie_apart_and_begin_anywhere(
    place: Place, spacing: str, dtype: torch.dtype, columns: int
) -> None:
    gap, offset = SPACINGS[spacing]
    check(place, random_rows(37, (columns,), dtype, gap=gap, offset=offset), place.ids(IDS))


@pytest.mark.parametrize("offset", range(1, 17))
def test_rows_may_begin_at_any_byte(place: Place, offset: int) -> None:
    check(place, random_rows(37, (48,), torch.uint8, gap=16, offset=offset), place.ids(IDS))


@pytest.mark.parametrize("row_shape", [(), (1,), (2, 3), (4, 1, 5), (1, 1), (2, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("gap", [0, 3])
def test_rows_may_have_any_number_of_dimensions(
    place: Place, row_shape: tuple[int, ...], gap: int
) -> None:
    check(place, random_rows(37, row_shape, torch.int16, gap=gap), place.ids(IDS))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=dtype_name)
@pytest.mark.parametrize("layout", INDEX_LAYOUTS)
def test_ids_may_have_any_shape_and_strides(place: Place, layout: str, dtype: torch.dtype) -> None:
    index = INDEX_LAYOUTS[layout](place.ids(IDS, dtype))
    check(place, random_rows(37, (5,)), index)


def test_more_ids_than_any_block_holds(place: Place) -> None:
    index = torch.randint(0, 3000, (100_003,), generator=torch.Generator().manual_seed(1))
    values = random_rows(3000, (7,))
    result = speedtorch.pinned_gather(place.table(values), index.to(place.device))
    assert_same_bytes(result, values[index])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=dtype_name)
@pytest.mark.parametrize("count", [512, 513, 1024, 1025, 4096, 4097, 20_000])
def test_batches_on_both_sides_of_every_change_of_path(
    place: Place, count: int, dtype: torch.dtype
) -> None:
    values = random_rows(3000, (9,), torch.int16)
    ids = torch.randint(3000, (count,), generator=torch.Generator().manual_seed(count))
    check(place, values, ids.to(place.device, dtype))


def test_a_table_that_torch_conjugates_later_has_conjugated_rows(place: Place) -> None:
    values = reference.small_numbers(5, (3,), torch.complex64)
    result = speedtorch.pinned_gather(place.table(values).conj(), place.ids([1, 4]))
    assert_same_bytes(result.resolve_conj(), values.conj().resolve_conj()[[1, 4]])


def test_the_same_row_under_every_id(place: Place) -> None:
    row = place.table(random_rows(1, (9,)))
    result = speedtorch.pinned_gather(row.expand(5, 9), place.ids([4, 0, 2]))
    assert_same_bytes(result, row.cpu().expand(3, 9))


# out= and plan=


@pytest.mark.parametrize("ids_on", ["cpu", "work"])
def test_out_is_filled_and_returned(place: Place, ids_on: str) -> None:
    values = random_rows(37, (13,), gap=2)
    index = torch.tensor(IDS).reshape(4, 3)
    out = torch.full((4, 3, 13), -1.0, device=place.device)
    ids = index if ids_on == "cpu" else index.to(place.device)
    result = speedtorch.pinned_gather(place.table(values), ids, out=out)
    assert result is out
    assert_same_bytes(out, reference.pinned_gather(values, index))


def test_a_plan_serves_tables_of_other_widths(place: Place) -> None:
    index = place.ids(IDS, torch.int32).reshape(2, 6)
    plan = speedtorch.plan_rows(index, 37)
    for width in (1, 16, 100, 1536):
        values = random_rows(37, (width,), torch.uint8, seed=width)
        result = speedtorch.pinned_gather(place.table(values), index, plan=plan)
        assert_same_bytes(result, reference.pinned_gather(values, index.cpu()))


# Tables that torch or the system made


@pytest.mark.parametrize("kind", ["shared", "mapped privately", "mapped and shared"])
def test_a_table_that_torch_or_the_system_made(device: str, kind: str, tmp_path: Path) -> None:
    values = random_rows(37, (13,))
    table = layout_copy(values).share_memory_()
    if kind != "shared":
        path = tmp_path / "table.bin"
        path.write_bytes(values.numpy().tobytes())
        shared = kind == "mapped and shared"
        table = torch.from_file(str(path), shared=shared, size=values.numel()).reshape(37, 13)
    result = speedtorch.pinned_gather(table, torch.tensor(IDS, device=device))
    assert_same_bytes(result, values[IDS])


@pytest.mark.parametrize("shape", [(0,), (7, 3), (1 << 16,), (300, 400)], ids=str)
def test_rows_in_memory_of_the_device_are_those_of_their_places(
    device: str, shape: tuple[int, ...]
) -> None:
    rows = random_rows(37, (5,)).to(device)
    places = torch.randint(37, shape, device=device)
    assert_same_bytes(rows_at(rows, places), rows[places])
