"""Ranges of a GPU's addresses: what is asked of CUDA, and that nothing is left behind."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from ctypes import c_int, c_size_t, c_void_p
from pathlib import Path

import pytest
import torch
from cuda_calls import INVALID_VALUE, PretendedDriver, library_path
from warm_python import run_warm

from speedtorch.memory import address_range
from speedtorch.memory.address_range import AddressRange
from speedtorch.ops.functions import _ops

MIB = 1 << 20
GPU = torch.device("cuda", 1)
CALLS = "reserve_addresses", "map_memory", "unmap_memory", "free_addresses"


def _function(name: str, result: type | None, *arguments: type) -> Callable[..., int | None]:
    function = getattr(ctypes.CDLL(str(library_path())), name)
    function.restype, function.argtypes = result, arguments
    return function  # type: ignore[no-any-return]


def allocate(count: int) -> int | None:
    """As torch's allocator asks for a segment."""
    return _function("speedtorch_range_allocate", c_void_p, c_size_t, c_int, c_void_p)(
        count, GPU.index, None
    )


def free(segment: int | None, count: int) -> None:
    """As it gives one back."""
    function = _function("speedtorch_range_free", None, c_void_p, c_size_t, c_int, c_void_p)
    function(segment, count, GPU.index, None)


def allocated(into: AddressRange, *counts: int) -> list[int | None]:
    """Segments of a range."""
    _ops.open_range(into.base)
    made = [allocate(count) for count in counts]
    _ops.open_range(0)
    return made


def test_physical_memory_is_unmapped_and_mapped_behind_allocations(driver: PretendedDriver) -> None:
    made = AddressRange(7 * MIB, GPU)
    assert driver.named("reserve_addresses") == [("reserve_addresses", 8 * MIB)]
    assert made.end == made.base + 7 * MIB
    made.map()  # there is nothing yet
    made.unmap()
    assert driver.named("map_memory", "unmap_memory") == []
    assert allocated(made, 3 * MIB, 2 * MIB, 3 * MIB) == [made.base, made.base + 4 * MIB, None]
    assert (made.nbytes, made.is_mapped) == (6 * MIB, False)
    for _ in range(2):
        for _ in range(2):
            made.map()
            assert made.is_mapped
        assert driver.mapped[made.base][:2] == (6 * MIB, 1)
        for _ in range(2):
            made.unmap()
            assert not made.is_mapped and not driver.mapped
    assert len(driver.named("map_memory")) == len(driver.named("unmap_memory")) == 2
    free(made.base, 3 * MIB)
    assert made.nbytes == 2 * MIB
    free(made.base + 4 * MIB, 2 * MIB)
    assert made.nbytes == 0


def test_only_the_thread_that_opened_it_gets_segments(driver: PretendedDriver) -> None:
    made, seen = AddressRange(8 * MIB, GPU), []
    assert allocate(MIB) is None
    _ops.open_range(made.base)
    other = threading.Thread(target=lambda: seen.append(allocate(MIB)))
    other.start()
    other.join()
    assert seen == [None]
    assert allocate(MIB) == made.base
    made.map()
    assert allocate(MIB) is None  # memory would not be behind it
    _ops.open_range(0)
    free(made.base, MIB)


def test_torchs_pool_is_one_of_the_gpu(
    driver: PretendedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, of_pools = [0], []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda _: of_pools.append(current[-1]))
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda *_: nullcontext())
    monkeypatch.setattr(address_range, "_allocator", lambda: None)
    with AddressRange(MIB, GPU).allocating():
        pass
    assert of_pools == [GPU.index]


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("owner_first", [False, True])
def test_a_range_goes_with_its_owner_and_its_last_segment(
    owner_first: bool, is_mapped: bool, driver: PretendedDriver
) -> None:
    made = AddressRange(8 * MIB, GPU)
    base = made.base
    segments = allocated(made, 2 * MIB, 2 * MIB)
    if is_mapped:
        made.map()
    free(segments[0], 2 * MIB)
    if owner_first:
        del made
        gc.collect()
        assert base in driver.reserved and len(driver.mapped) == is_mapped
        free(segments[1], 2 * MIB)
    else:
        free(segments[1], 2 * MIB)
        assert base in driver.reserved and not driver.mapped
        del made
        gc.collect()
    assert not driver.reserved and not driver.mapped
    names = [name for name, *_ in driver.named(*CALLS)]
    assert names == [name for name in CALLS if is_mapped or "map" not in name]
    free(segments[1], 2 * MIB)  # of nothing


def test_memory_that_torch_frees_goes_when_the_gpu_has_done_its_work(
    driver: PretendedDriver,
) -> None:
    made = AddressRange(MIB, GPU)
    (segment,) = allocated(made, MIB)
    made.map()
    driver.calls.clear()
    free(segment, MIB)
    names = "set_device", "device_synchronize", "unmap_memory"
    assert [call[:2] for call in driver.named(*names)] == [
        ("set_device", GPU.index),
        ("device_synchronize",),
        ("set_device", 0),
        ("unmap_memory", made.base),
    ]


def test_a_call_that_fails_changes_nothing(driver: PretendedDriver) -> None:
    driver.fail("reserve_addresses", 1, error=INVALID_VALUE)
    with pytest.raises(RuntimeError, match="address range: cuMemAddressReserve failed: pretended"):
        AddressRange(MIB, GPU)
    made = AddressRange(MIB, GPU)
    (segment,) = allocated(made, MIB)
    driver.fail("map_memory", 1, 2)
    with pytest.raises(torch.OutOfMemoryError, match="GPU 1 has fewer than 2097152 free bytes"):
        made.map()
    driver.fail("map_memory", 1)  # and torch's allocator had some to give back
    made.map()
    driver.fail("unmap_memory", 1, error=INVALID_VALUE)
    with pytest.raises(RuntimeError, match="address range: cuMemUnmap failed: pretended reason 1"):
        made.unmap()
    assert not made.is_mapped and made.base in driver.mapped and driver.pending == 0
    made.map()
    driver.fail("map_memory", 2, error=INVALID_VALUE)
    made.unmap()
    made.map()
    made.unmap()
    with pytest.raises(RuntimeError, match="address range: cuMemMap failed: pretended reason 1"):
        made.map()
    assert not made.is_mapped and driver.pending == 0
    free(segment, MIB)


def test_memory_moves_while_another_thread_captures_a_graph(driver: PretendedDriver) -> None:
    driver.other_captures = True
    made = AddressRange(MIB, GPU)
    (segment,) = allocated(made, MIB)
    made.map()
    made.unmap()
    made.map()
    free(segment, MIB)
    del made
    gc.collect()
    assert not driver.reserved and not driver.mapped


@pytest.mark.parametrize("last", ["_ops.stop()", "os.fork() == 0 or os._exit(os.wait()[1])"])
def test_no_cuda_call_is_made_by_a_fork_or_once_the_process_exits(last: str) -> None:
    program = f"""
import os
from test_address_range import *
from test_address_range import _ops

with PretendedDriver(True, True) as driver:
    made = AddressRange(MIB, GPU)
    (segment,) = allocated(made, MIB)
    made.map()
    driver.calls.clear()
    {last}
    free(segment, MIB)
    del made
    gc.collect()
    print([call for call in driver.calls if call[0] in CALLS], flush=True)
    os._exit(0)
"""
    assert run_warm("-c", program, cwd=Path(__file__).parent).stdout == "[]\n"
