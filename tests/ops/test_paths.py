"""Every path of the cost model, forced: the same bits, the same errors, whatever the path."""

from __future__ import annotations

import pytest
import reference
import torch
from conftest import Place
from reference import assert_same_bytes, random_rows
from torch import Tensor

import speedtorch
from speedtorch.memory.cost_model import forced_path

pytestmark = pytest.mark.dealt("gpu_place", "mapped_place")

# Bytes: narrow, odd, one access short of a line, across lines, bulk copies, several pieces.
WIDTHS = [1, 3, 4, 12, 16, 47, 64, 94, 188, 256, 376, 512, 514, 1028, 1536, 2048, 4112, 8192]
# In one block, in the moving kernel, beyond it.
COUNTS = [1, 300, 2048, 4096, 4097, 9000]
ROWS = 6000


def batch(count: int, rows: int = ROWS) -> Tensor:
    """Ids of which every third is one and the same, and many others stand twice."""
    ids = torch.randint(rows, (count,), generator=torch.Generator().manual_seed(count))
    ids[::3] = rows - 1
    return ids


def possible(path: str, op: str, count: int, memory: str) -> bool:
    if path != "direct":
        return True
    return count <= (2048 if op == "scatter" else 4096) or (op, memory) == ("gather", "cuda")


PATHS = pytest.mark.parametrize("path", ["direct", "distinct", "ordered"])


@PATHS
@pytest.mark.parametrize("op", ["gather", "scatter"])
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_have_the_same_bits_on_every_path(
    mapped_place: Place, path: str, op: str, width: int
) -> None:
    values = random_rows(ROWS, (width,), torch.uint8)
    table = mapped_place.table(values)
    for count in COUNTS:
        if not possible(path, op, count, mapped_place.memory):
            continue
        ids = batch(count)
        if op == "gather":
            with forced_path(path):
                result = speedtorch.pinned_gather(table, ids.to("cuda"))
            assert_same_bytes(result, values[ids])
            continue
        src = random_rows(count, (width,), torch.uint8)
        expected = values.clone()
        reference.pinned_scatter(expected, ids, src)
        table = mapped_place.table(values)
        with forced_path(path):
            speedtorch.pinned_scatter(table, ids.to("cuda"), src.to("cuda"))
        speedtorch.synchronize()
        assert_same_bytes(table, expected)


@PATHS
@pytest.mark.parametrize("shift", [1, 2, 4, 8, 15])
@pytest.mark.parametrize("width", [48, 94, 512, 1028])
def test_rows_may_begin_anywhere_on_every_path(
    mapped_place: Place, path: str, shift: int, width: int
) -> None:
    values = random_rows(700, (width,), torch.uint8, gap=shift, offset=shift)
    ids, src = batch(2000, 700), random_rows(2000, (width,), torch.uint8)
    table = mapped_place.table(values)
    with forced_path(path):
        assert_same_bytes(speedtorch.pinned_gather(table, ids.to("cuda")), values[ids])
        speedtorch.pinned_scatter(table, ids.to("cuda"), src.to("cuda"))
    speedtorch.synchronize()
    reference.pinned_scatter(values, ids, src)
    reference.assert_same_storage(table, values)


@PATHS
@pytest.mark.parametrize("count", [700, 1500, 4096, 9000])
@pytest.mark.parametrize("bad", [-1, ROWS, 2**40])
def test_bad_ids_are_found_on_every_path(
    mapped_place: Place, path: str, count: int, bad: int
) -> None:
    values = random_rows(ROWS, (512,), torch.uint8)
    table = mapped_place.table(values)
    ids = batch(count)
    ids[count // 2] = ids[count - 1] = bad
    ids = ids.to("cuda")
    message = f"id {bad} at position {count // 2} of index .*2 of {count} ids are out of range"
    with forced_path(path):
        if possible(path, "gather", count, mapped_place.memory):
            rows = speedtorch.pinned_gather(table, ids)
            with pytest.raises(IndexError, match="pinned_gather: " + message):
                speedtorch.synchronize()
            assert not rows.any()
        if possible(path, "scatter", count, mapped_place.memory):
            speedtorch.pinned_scatter(
                table, ids, torch.ones_like(values[:1]).cuda().repeat(count, 1)
            )
            with pytest.raises(IndexError, match="pinned_scatter: " + message):
                speedtorch.synchronize()
    assert_same_bytes(table, values)


@pytest.mark.parametrize("sms", [1, 3, 132])
@pytest.mark.parametrize("width", [12, 188, 512, 1536])
def test_the_number_of_multiprocessors_changes_no_bit(
    gpu_place: Place, sms: int, width: int
) -> None:
    values = random_rows(ROWS, (width,), torch.uint8)
    table, ids = gpu_place.table(values), batch(9000)
    usual = speedtorch.get_num_sms()
    try:
        speedtorch.set_num_sms(sms)
        result = speedtorch.pinned_gather(table, ids.cuda())
        speedtorch.pinned_scatter(table, ids.cuda(), result.flip(1))
    finally:
        speedtorch.set_num_sms(usual)
    speedtorch.synchronize()
    assert_same_bytes(result, values[ids])
    reference.pinned_scatter(values, ids, values[ids].flip(1))
    assert_same_bytes(table, values)


def test_a_path_that_is_not_possible_is_refused_by_name(mapped_place: Place) -> None:
    table = mapped_place.table(random_rows(ROWS, (16,), torch.uint8))
    ids = batch(5000).cuda()
    src = torch.zeros(5000, 16, dtype=torch.uint8, device="cuda")
    with forced_path("direct"), pytest.raises(ValueError, match="not possible for 5000 ids"):
        speedtorch.pinned_scatter(table, ids, src)


def test_only_the_paths_of_the_gpu_can_be_forced() -> None:
    with (
        pytest.raises(ValueError, match="path must be direct, distinct or ordered, got 'staged'"),
        forced_path("staged"),
    ):
        pass
