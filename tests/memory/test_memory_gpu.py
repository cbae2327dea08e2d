"""Host memory on a GPU: each kind at work, and memory pinned in place."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from conftest import NEEDS_GPU
from reference import assert_same_bytes, random_rows
from test_memory_processes import lines_of
from torch import Tensor

import speedtorch
from speedtorch import empty, memory_kind, pin_memory_, unpin_memory_

pytestmark = NEEDS_GPU

ROWS, WIDTH = 1000, 256
NBYTES = ROWS * WIDTH * 4
LONG = 300_000_000  # GPU cycles, over a tenth of a second: the calls after it return long before
OWN = ["managed", "registered"]


def table_of(kind: str, values: Tensor) -> Tensor:
    """The values in memory of a kind; "in_place" is torch's own memory, pinned where it is."""
    if kind == "in_place":
        return pin_memory_(values.clone())
    if kind == "torch_pinned":
        return values.pin_memory()
    return empty(values.shape, dtype=values.dtype, memory=kind).copy_(values)


def all_rows() -> Tensor:
    """The ids of all rows, last first, on the GPU; the kernels are loaded by then."""
    index = torch.arange(ROWS, device="cuda").flip(0)
    for kind in OWN:
        speedtorch.pinned_gather(table_of(kind, torch.zeros(ROWS, WIDTH)), index)
    speedtorch.synchronize()
    return index


# Each kind at work


@pytest.mark.parametrize("kind", [*OWN, "plain"])
def test_memory_for_the_gpu_is_zero_and_exact(kind: str) -> None:
    table = empty((ROWS, WIDTH), memory=kind)
    assert memory_kind(table) == kind
    assert table.untyped_storage().nbytes() == NBYTES
    assert not speedtorch.pinned_gather(table, torch.arange(ROWS, device="cuda")).any()


def test_auto_is_the_kind_that_every_gpu_reaches_fastest() -> None:
    managed = torch.ops.speedtorch.managed_supported()
    assert memory_kind(empty(10)) == ("managed" if managed else "registered")


def test_kinds_of_torchs_own_memory() -> None:
    assert memory_kind(torch.ones(10, pin_memory=True)) == "pinned"
    assert memory_kind(torch.ones(10)) == "plain"
    assert memory_kind(torch.ones(10, device="cuda")) == "cuda"


def test_what_the_cpu_writes_is_what_the_next_kernel_reads() -> None:
    index = all_rows()
    for kind in [*OWN, "in_place"]:
        table = table_of(kind, torch.zeros(ROWS, WIDTH))
        for value in range(20):
            table.fill_(value)
            assert speedtorch.pinned_gather(table, index).eq(value).all()


@pytest.mark.parametrize("kind", [*OWN, "plain"])
def test_a_gib_takes_a_gib_of_resident_memory(kind: str) -> None:
    program = f"""
import speedtorch

def resident():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

speedtorch.empty(1 << 30, dtype=torch.uint8, memory="plain")  # the stacks of its threads are kept
index = torch.arange(1000, device="cuda")
first = speedtorch.empty((1 << 17, 128), memory={kind!r})
speedtorch.pinned_gather(first, index)
speedtorch.synchronize()
before = resident()
table = speedtorch.empty((1 << 21, 128), memory={kind!r})
print(json.dumps(resident() - before))
speedtorch.pinned_gather(table, index)
speedtorch.synchronize()
del table
print(json.dumps(resident() - before))
"""
    grown, left = lines_of(program)
    slack = 2 << 20
    assert (1 << 30) - slack <= grown <= (1 << 30) + slack
    assert left <= 8 * slack  # the driver keeps some of its own books


# Pinned in place


def test_a_tensor_pinned_in_place_is_pinned_for_torch_too() -> None:
    torch.cuda.init()  # before that torch takes no tensor for pinned
    tensor = torch.ones(ROWS, WIDTH)
    address = tensor.data_ptr()
    assert pin_memory_(tensor).data_ptr() == address
    assert tensor.is_pinned()
    unpin_memory_(tensor)
    assert not tensor.is_pinned()
    assert memory_kind(tensor) == "plain"


def test_a_tensor_that_torch_pinned_is_refused() -> None:
    with pytest.raises(ValueError, match="already pinned by another library"):
        pin_memory_(torch.ones(10, pin_memory=True))


def test_a_gpu_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="must be on the CPU, it is on cuda:0"):
        pin_memory_(torch.ones(10, device="cuda"))


def test_neighbours_in_one_page_are_both_pinned() -> None:
    values = torch.arange(300.0)
    whole = values.clone()
    parts = [pin_memory_(whole[begin : begin + 100]) for begin in (0, 100, 200)]
    index = torch.tensor([99, 0], device="cuda")
    unpin_memory_(parts[1])
    for begin in (0, 200):
        result = speedtorch.pinned_gather(parts[begin // 100], index)
        assert result.tolist() == [begin + 99, begin]


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_a_read_only_file_is_read_in_place_or_refused_in_words(tmp_path: Path) -> None:
    path, values = tmp_path / "rows", random_rows(ROWS, (WIDTH,))
    path.write_bytes(values.numpy().tobytes())
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    table = torch.frombuffer(mapped, dtype=torch.float32).view(ROWS, WIDTH)
    try:
        pin_memory_(table)
    except RuntimeError as error:
        assert f"pinning {NBYTES} bytes" in str(error)
        assert "Load the data into speedtorch.memory.empty" in str(error)
    index, rows = torch.tensor([5, 999], device="cuda"), torch.zeros(2, WIDTH, device="cuda")
    assert_same_bytes(speedtorch.pinned_gather(table, index), values[[5, 999]])
    if memory_kind(table) == "registered":
        with pytest.raises(ValueError, match="table lies in a read-only mapping of a file"):
            speedtorch.pinned_scatter(table, index, rows)
        unpin_memory_(table)
    assert path.read_bytes() == values.numpy().tobytes()


def test_unpinning_waits_for_the_gpu() -> None:
    index, values = all_rows(), random_rows(ROWS, (WIDTH,))
    table = table_of("in_place", values)
    torch.cuda._sleep(LONG)
    result = speedtorch.pinned_gather(table, index)
    unpin_memory_(table).fill_(float("nan"))
    assert_same_bytes(result, values.flip(0))
