"""pinned_copy: ranges of rows and whole tables, either way."""

from __future__ import annotations

import pytest
import torch
from conftest import Place
from reference import assert_same_bytes, assert_same_storage, random_rows
from torch import Tensor

import speedtorch

pytestmark = pytest.mark.dealt("place", "gpu_place")

# Bytes: below, at and above the length that memory is cut into, and not a multiple of anything.
SIZES = [1, 15, 2047, 2048, 2049, 100_001, 10_000_016]


def other_side(place: Place, values: Tensor) -> Tensor:
    return values.to(place.device, copy=True)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_contiguous_memory_is_copied_bit_for_bit_either_way(
    place: Place, size: int, offset: int
) -> None:
    values = random_rows(size + offset, (), torch.uint8)[offset:]
    table, there = place.table(values), other_side(place, torch.zeros_like(values))
    speedtorch.pinned_copy(there, table)
    assert_same_bytes(there, values)
    table = place.table(torch.zeros(size + 2 * offset, dtype=torch.uint8)[offset:])
    speedtorch.pinned_copy(table[:size], there)
    speedtorch.synchronize()
    assert_same_bytes(table[:size], values)
    assert not table[size:].any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 47, 128])
@pytest.mark.parametrize("gap", [1, 16])
def test_bytes_between_rows_do_not_change(
    place: Place, dtype: torch.dtype, columns: int, gap: int
) -> None:
    values, fresh = (random_rows(5000, (columns,), dtype, gap=gap) for _ in range(2))
    table = place.table(values)
    there = torch.zeros(5000, columns, dtype=dtype, device=place.device)
    speedtorch.pinned_copy(there, table)
    assert_same_bytes(there, values)
    speedtorch.pinned_copy(table, other_side(place, fresh.contiguous()))
    speedtorch.synchronize()
    values.copy_(fresh)
    assert_same_storage(table, values)


def test_a_slice_of_a_record_field(place: Place) -> None:
    memory = place.memory if place.memory in ("managed", "registered") else "plain"
    table = speedtorch.HostTable(100, 8, state=("exp_avg",), memory=memory)
    rows = torch.arange(80.0).reshape(10, 8)
    speedtorch.pinned_copy(table["exp_avg"][20:30], other_side(place, rows))
    speedtorch.synchronize()
    assert torch.equal(table["exp_avg"][20:30], rows)
    assert table["exp_avg"].count_nonzero() == 79
    assert not table["weight"].any()


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)], ids=str)
def test_nothing_is_legal(place: Place, shape: tuple[int, ...]) -> None:
    speedtorch.pinned_copy(place.table(torch.zeros(shape)), other_side(place, torch.ones(shape)))


def test_a_backward_that_needs_the_old_rows_raises(place: Place) -> None:
    rows = torch.ones(3, 2, device=place.device, requires_grad=True)
    weights = torch.ones(3, 2, device=place.device)
    loss = (rows * weights).sum()
    speedtorch.pinned_copy(weights, place.table(torch.zeros(3, 2)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_captured_copy_is_replayed(gpu_place: Place) -> None:
    table, rows = gpu_place.table(torch.zeros(5000, 128)), torch.rand(5000, 128, device="cuda")
    graph = torch.cuda.CUDAGraph()
    if not gpu_place.mapped:
        with pytest.raises(RuntimeError, match="pageable memory"), torch.cuda.graph(graph):
            speedtorch.pinned_copy(table, rows)
        return
    with torch.cuda.graph(graph):
        speedtorch.pinned_copy(table, rows)
    rows.add_(1)
    graph.replay()
    speedtorch.synchronize()
    assert torch.equal(table.cpu(), rows.cpu())
    del graph
    if gpu_place.memory != "cuda":
        speedtorch.memory.release(table)
