"""pinned_scatter: a batch's rows written to the table, the last of equal ids wins or all add up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import reference
import torch
from conftest import Place
from reference import (
    DTYPES,
    DTYPES_WITH_ADDITION,
    FLOAT8,
    WIDTHS,
    assert_same_storage,
    dtype_name,
    layout_copy,
    random_rows,
    small_numbers,
)
from test_pinned_gather import IDS, INDEX_LAYOUTS, SPACINGS
from torch import Tensor

import speedtorch

pytestmark = pytest.mark.dealt("place", "gpu_place")

ops = torch.ops.speedtorch


def check(
    place: Place, values: Tensor, index: Tensor, src: Tensor, *, accumulate: bool = False
) -> None:
    """The table becomes the reference's, gaps between its rows included; `src` stays as it was."""
    expected = layout_copy(values)
    reference.pinned_scatter(expected, index.cpu(), src, accumulate=accumulate)
    table, rows = place.table(values), place.work(src)
    speedtorch.pinned_scatter(table, index, rows, accumulate=accumulate)
    speedtorch.synchronize()
    assert_same_storage(table, expected)
    assert_same_storage(rows, src)


def test_rows_are_written_where_the_ids_say(place: Place) -> None:
    table = place.table(torch.zeros(4, 2, dtype=torch.int64))
    src = place.work(torch.tensor([[1, 2], [3, 4], [5, 6]]))
    assert speedtorch.pinned_scatter(table, place.ids([2, 0, 2]), src) is None
    speedtorch.synchronize()
    assert table.tolist() == [[3, 4], [0, 0], [5, 6], [0, 0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_every_dtype_moves_bit_for_bit(place: Place, dtype: torch.dtype) -> None:
    values, src = random_rows(37, (13,), dtype), random_rows(12, (13,), dtype, seed=1)
    check(place, values, place.ids(IDS), src)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_in_bytes_moves_bit_for_bit(place: Place, width: int) -> None:
    values = random_rows(37, (width,), torch.uint8)
    check(place, values, place.ids(IDS), random_rows(12, (width,), torch.uint8, seed=1))


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("src_spacing", SPACINGS)
@pytest.mark.parametrize("columns", [1, 21, 128])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=dtype_name)
def test_bytes_between_the_rows_do_not_change(
    place: Place, spacing: str, src_spacing: str, columns: int, dtype: torch.dtype
) -> None:
    gap, offset = SPACINGS[spacing]
    src_gap, src_offset = SPACINGS[src_spacing]
    values = random_rows(37, (columns,), dtype, gap=gap, offset=offset)
    src = random_rows(12, (columns,), dtype, gap=src_gap, offset=src_offset, seed=1)
    check(place, values, place.ids(IDS), src)


@pytest.mark.parametrize("row_shape", [(), (1,), (2, 3), (4, 1, 5), (2, 2, 2, 2)], ids=str)
def test_rows_may_have_any_number_of_dimensions(place: Place, row_shape: tuple[int, ...]) -> None:
    values = random_rows(37, row_shape, torch.int16, gap=3)
    check(place, values, place.ids(IDS), random_rows(12, row_shape, torch.int16, seed=1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=dtype_name)
@pytest.mark.parametrize("layout", INDEX_LAYOUTS)
def test_ids_may_have_any_shape_and_strides(place: Place, layout: str, dtype: torch.dtype) -> None:
    index = INDEX_LAYOUTS[layout](place.ids(IDS, dtype))
    src = random_rows(index.numel(), (5,), seed=1).reshape(*index.shape, 5)
    check(place, random_rows(37, (5,)), index, src)


# Equal ids


def test_the_last_of_equal_ids_wins(place: Place) -> None:
    table = place.table(torch.zeros(3))
    src = place.work(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    speedtorch.pinned_scatter(table, place.ids([1, 1, 0, 1]), src)
    speedtorch.synchronize()
    assert table.tolist() == [3.0, 4.0, 0.0]


@pytest.mark.parametrize("columns", [1, 33, 200])
@pytest.mark.parametrize("different", [1, 2, 50], ids="ids_{}".format)
def test_the_last_of_thousands_wins(place: Place, columns: int, different: int) -> None:
    count = 5000
    ids = torch.randint(0, different, (count,), generator=torch.Generator().manual_seed(2))
    src = torch.arange(count, dtype=torch.int32).reshape(-1, 1).expand(count, columns).contiguous()
    check(place, random_rows(50, (columns,), torch.int32), ids.to(place.device), src)


@pytest.mark.parametrize("dtype", DTYPES_WITH_ADDITION, ids=dtype_name)
def test_equal_ids_add_up_in_the_order_of_the_ids(place: Place, dtype: torch.dtype) -> None:
    ids = torch.randint(0, 4, (64,), generator=torch.Generator().manual_seed(3)) * 9
    values = small_numbers(37, (13,), dtype, gap=2, offset=1)
    src = small_numbers(64, (13,), dtype, seed=1)
    check(place, values, ids.to(place.device), src, accumulate=True)


def test_every_addition_rounds(place: Place) -> None:
    table = place.table(torch.tensor([1.0, 0.0], dtype=torch.bfloat16))
    src = place.work(torch.tensor([2.0**-8] * 4, dtype=torch.bfloat16))
    speedtorch.pinned_scatter(table, place.ids([0, 0, 0, 0]), src, accumulate=True)
    speedtorch.synchronize()
    assert table.tolist() == [1.0, 0.0]


def test_integers_wrap_around(place: Place) -> None:
    table = place.table(torch.tensor([127, -128], dtype=torch.int8))
    src = place.work(torch.tensor([1, -1], dtype=torch.int8))
    speedtorch.pinned_scatter(table, place.ids([0, 1]), src, accumulate=True)
    speedtorch.synchronize()
    assert table.tolist() == [-128, 127]


def test_infinities_and_nans_add_as_ieee_says(place: Place) -> None:
    inf, nan = float("inf"), float("nan")
    table = place.table(torch.tensor([inf, 1.0, -0.0, 3e38]))
    src = place.work(torch.tensor([-inf, nan, -0.0, 3e38]))
    speedtorch.pinned_scatter(table, place.ids([0, 1, 2, 3]), src, accumulate=True)
    speedtorch.synchronize()
    assert table.isnan().tolist() == [True, True, False, False]
    assert table.signbit()[2]
    assert table[3] == inf


def test_the_smallest_numbers_add_up(place: Place) -> None:
    tiny = torch.tensor([1, 3], dtype=torch.int32).view(torch.float32)
    check(place, tiny, place.ids([0, 0, 1]), tiny.repeat(2)[:3].clone(), accumulate=True)


@pytest.mark.parametrize("columns", [1, 33])
def test_thousands_of_equal_ids_add_up(place: Place, columns: int) -> None:
    ids = torch.randint(0, 3, (5000,), generator=torch.Generator().manual_seed(4))
    values, src = small_numbers(3, (columns,)), small_numbers(5000, (columns,), seed=1)
    check(place, values, ids.to(place.device), src, accumulate=True)


@pytest.mark.parametrize("dtype", FLOAT8, ids=dtype_name)
def test_dtypes_without_addition_are_refused(place: Place, dtype: torch.dtype) -> None:
    values = random_rows(4, (3,), dtype)
    table, src = place.table(values), place.work(random_rows(2, (3,), dtype, seed=1))
    with pytest.raises(ValueError, match=r"pinned_scatter: .*accumulate.*Float8"):
        speedtorch.pinned_scatter(table, place.ids([0, 1]), src, accumulate=True)
    assert_same_storage(table, values)


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "scatter": lambda leaf, ids, rows: ops.pinned_scatter(leaf, ids, rows),
    "copy": lambda leaf, ids, rows: ops.pinned_copy(leaf, rows.repeat(3, 1)),
    "gather_out": lambda leaf, ids, rows: ops.pinned_gather.out(rows, ids.expand(3) - 1, leaf),
    "swap": lambda leaf, ids, rows: ops.optimizer_state_swap(
        [leaf], [rows], ids, [rows.clone()], ids
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_leaf_that_requires_grad_is_refused_before_anything_moves(device: str, call: str) -> None:
    leaf = torch.zeros(3, 2, device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match="requires grad"):
        CALLS[call](leaf, torch.tensor([1], device=device), torch.ones(1, 2, device=device))
    speedtorch.synchronize()
    assert not leaf.any()
