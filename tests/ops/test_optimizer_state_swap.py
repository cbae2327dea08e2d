"""optimizer_state_swap: rows leave for the host while others arrive, all fields at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import reference
import torch
from conftest import Place
from reference import (
    DTYPES,
    WIDTHS,
    assert_same_storage,
    dtype_name,
    layout_copy,
    random_rows,
    record_fields,
)
from torch import Tensor

import speedtorch

pytestmark = pytest.mark.dealt("place", "gpu_place")

Fields = Sequence[tuple[Sequence[int], torch.dtype]]

EVICT, LOAD = [3, 0, 36, 17, 5, 21, 9], [21, 8, 2, 3, 30, 11]

# Weight, moments and a step count; the sizes of the elements fall, so that each field is aligned.
RECORDS: dict[str, Fields] = {
    "one_field": [((13,), torch.float32)],
    "weight_and_moments": [((16,), torch.float32)] * 3,
    "odd_columns": [((3,), torch.float32), ((3,), torch.float32), ((1,), torch.float32)],
    "mixed": [((2,), torch.float64), ((5,), torch.float32), ((3,), torch.bfloat16)],
    "bytes": [((7,), torch.uint8), ((1,), torch.int8), ((129,), torch.uint8)],
    "no_columns": [((4,), torch.float32), ((0,), torch.float32), ((4,), torch.float32)],
    "scalars_and_matrices": [((2, 3), torch.int32), ((), torch.int32), ((1, 2, 2), torch.int32)],
}


def check(
    place: Place,
    host: list[Tensor],
    evict: Tensor,
    load: Tensor,
    *,
    spare: int = 0,
    planned: bool = False,
    fields_of: Callable[[list[Tensor]], list[Tensor]] = list,
) -> None:
    """Host and arriving rows become the reference's; leaving and spare rows stay as they were.

    `spare` rows of either side take no part, and `host` are the buffers whose fields are swapped.
    """
    expected_host = [layout_copy(buffer) for buffer in host]
    fields = fields_of(expected_host)
    shapes = [(tuple(field.shape[1:]), field.dtype) for field in fields]
    leaving, arriving = (
        [
            random_rows(len(ids) + spare, shape, dtype, seed=first + k)
            for k, (shape, dtype) in enumerate(shapes)
        ]
        for first, ids in ((10, evict), (20, load))
    )
    actual_host = [place.table(buffer) for buffer in host]
    actual_leaving = [place.work(rows) for rows in leaving]
    actual_arriving = [place.work(rows) for rows in arriving]
    names = {"evict_plan": evict, "load_plan": load} if planned else {}
    plans = {name: speedtorch.plan_rows(ids, len(fields[0])) for name, ids in names.items()}
    speedtorch.optimizer_state_swap(
        fields_of(actual_host), actual_leaving, evict, actual_arriving, load, **plans
    )
    speedtorch.synchronize()
    reference.optimizer_state_swap(fields, leaving, evict.cpu(), arriving, load.cpu())
    for actual, expected in zip(
        [*actual_host, *actual_leaving, *actual_arriving],
        [*expected_host, *leaving, *arriving],
        strict=True,
    ):
        assert_same_storage(actual, expected)


def record_check(
    place: Place, fields: Fields, evict: Tensor, load: Tensor, *, spare: int = 0
) -> None:
    """As `check`, with the fields side by side in records padded to 8 bytes."""
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in fields)
    record = random_rows(37, (-(-size // 8) * 8,), torch.uint8)
    check(
        place,
        [record],
        evict,
        load,
        spare=spare,
        fields_of=lambda buffers: record_fields(buffers[0], fields),
    )


def test_rows_change_places_and_a_row_in_both_lists_never_crosses(place: Place) -> None:
    host = place.table(torch.tensor([[10], [11], [12], [13]]))
    leaving, arriving = place.work(torch.tensor([[1], [3]])), place.work(torch.zeros(2, 1).long())
    result = speedtorch.optimizer_state_swap(
        [host], [leaving], place.ids([1, 3]), [arriving], place.ids([2, 1])
    )
    speedtorch.synchronize()
    assert result is None
    assert host.flatten().tolist() == [10, 11, 12, 3]
    assert arriving.flatten().tolist() == [12, 1]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_every_dtype_moves_bit_for_bit(place: Place, dtype: torch.dtype) -> None:
    check(place, [random_rows(37, (13,), dtype)], place.ids(EVICT), place.ids(LOAD))


@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_in_bytes_moves_bit_for_bit(place: Place, width: int) -> None:
    check(place, [random_rows(37, (width,), torch.uint8)], place.ids(EVICT), place.ids(LOAD))


@pytest.mark.parametrize("spare", [0, 3], ids="spare_{}".format)
@pytest.mark.parametrize("fields", RECORDS)
def test_fields_of_one_record_move_together(place: Place, fields: str, spare: int) -> None:
    record_check(place, RECORDS[fields], place.ids(EVICT), place.ids(LOAD), spare=spare)


@pytest.mark.parametrize(
    ("record", "size", "taken"),
    [("mixed", 48, slice(None, None, -1)), ("weight_and_moments", 192, slice(None, None, 2))],
    ids=["in another order", "without the one between"],
)
def test_fields_of_a_record_may_be_any_of_them(
    place: Place, record: str, size: int, taken: slice
) -> None:
    check(
        place,
        [random_rows(37, (size,), torch.uint8)],
        place.ids(EVICT),
        place.ids(LOAD),
        fields_of=lambda buffers: record_fields(buffers[0], RECORDS[record])[taken],
    )


def test_many_fields(place: Place) -> None:
    host = [random_rows(37, (1 + seed % 5,), seed=seed) for seed in range(40)]
    check(place, host, place.ids(EVICT), place.ids(LOAD))


@pytest.mark.parametrize(
    ("evict", "load"),
    [
        ([], []),
        ([], LOAD),
        (EVICT, []),
        (EVICT, EVICT),
        (EVICT, EVICT[::-1]),
        (EVICT, [1, 2, 4]),
        (list(range(37)), list(range(36, -1, -1))),
        ([0], [0]),
    ],
    ids=["none", "arrive", "leave", "same", "reversed", "disjoint", "all", "one"],
)
@pytest.mark.parametrize("planned", [False, True], ids=["unplanned", "planned"])
def test_the_lists_may_overlap_in_any_way(
    place: Place, evict: list[int], load: list[int], planned: bool
) -> None:
    host = [random_rows(37, (9,)), random_rows(37, (4,), torch.float64, gap=1, seed=1)]
    check(place, host, place.ids(evict), place.ids(load), planned=planned)


@pytest.mark.parametrize("evict_dtype", [torch.int32, torch.int64], ids=dtype_name)
@pytest.mark.parametrize("load_dtype", [torch.int32, torch.int64], ids=dtype_name)
def test_ids_may_be_of_either_dtype_and_lie_apart(
    place: Place, evict_dtype: torch.dtype, load_dtype: torch.dtype
) -> None:
    evict, load = place.ids(EVICT, evict_dtype), place.ids(LOAD, load_dtype)
    check(place, [random_rows(37, (9,))], evict[::2], load[1::2])


def test_ids_may_be_on_the_cpu(place: Place) -> None:
    check(place, [random_rows(37, (9,))], torch.tensor(EVICT), torch.tensor(LOAD))


def test_thousands_of_rows(place: Place) -> None:
    order = torch.randperm(9000, generator=torch.Generator().manual_seed(5)).to(place.device)
    host = [random_rows(9000, (5,)), random_rows(9000, (2,), torch.float64, seed=1)]
    check(place, host, order[:5000], order[3000:])


def test_a_table_without_rows_is_legal(place: Place) -> None:
    check(place, [random_rows(0, (4,))], place.ids([]), place.ids([]), spare=1)
