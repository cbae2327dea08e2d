"""Host memory on every kind of machine: WSL2, Grace, an old driver, several GPUs, huge tables."""

from __future__ import annotations

import mmap
import re
import threading
import weakref
from typing import Any

import pytest
import torch
from cuda_calls import (
    GLOBAL,
    INSUFFICIENT_DRIVER,
    OUT_OF_MEMORY,
    RELAXED,
    UNSAFE_IN_CAPTURE,
    PretendedDriver,
    mapping_of,
)
from test_pin_memory import GIB, reserved
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import speedtorch
from speedtorch import empty, memory_kind, memory_stats, pin_memory_, unpin_memory_
from speedtorch.info import info
from speedtorch.layers import Memory
from speedtorch.layers.host_buffer import copy_spans
from speedtorch.memory.host_memory import registration_boundaries, release
from speedtorch.ops.functions import _ops
from speedtorch.torch_internals import storage_at

MANAGED, MAPPED, ON_GPU, NOT = range(4)  # Access in csrc/memory/host_memory.h
STREAM = 7
EVENT_CALLS = ("event_create", "event_record", "event_synchronize", "event_destroy")


def use(table: Tensor, gpu: int = 0, stream: int = STREAM) -> int:
    """What an op on a GPU does with its table around its kernels: how the GPU reaches the table."""
    return int(_ops.use_on(table, gpu, stream))


def made(driver: PretendedDriver, kind: str) -> Tensor:
    """Memory of a kind; "in_place" and "foreign" are torch's own, which others pinned or we."""
    driver.registers_elsewhere = kind == "elsewhere"
    if kind not in ("in_place", "foreign"):
        return empty(1000, memory="registered" if kind == "elsewhere" else kind)
    tensor = torch.ones(1000)
    if kind == "in_place":
        return pin_memory_(tensor)
    driver.pinned_by_others = {tensor.data_ptr(), tensor.data_ptr() + 3999}
    return tensor


# Several GPUs


@pytest.fixture
def gpus(driver: PretendedDriver) -> PretendedDriver:
    driver.gpus = (True, True, True)
    return driver


def test_another_gpu_maps_a_managed_table_when_it_first_uses_it(gpus: PretendedDriver) -> None:
    table = empty(1000, memory="managed")
    span = (table.data_ptr(), 4000)
    for gpu in (0, 2, 2, 0):
        assert use(table[10:20], gpu) == MANAGED
    mapped = [("advise_accessed_by", *span, gpu) for gpu in (0, 2)]
    assert gpus.named("advise_accessed_by") == mapped
    names = [name for name, *_ in gpus.named("advise_accessed_by", "event_record")]
    assert names[:3] == ["advise_accessed_by", "event_record", "advise_accessed_by"]
    assert names[3:] == ["event_record"] * 3


def test_a_table_that_cannot_be_mapped_on_a_gpu_is_mapped_by_the_next_use(
    gpus: PretendedDriver,
) -> None:
    table = empty(1000, memory="managed")
    gpus.fail("advise_accessed_by", 1)
    with pytest.raises(RuntimeError, match="pretended reason 2"):
        use(table, 1)
    assert gpus.named("event_record") == []
    assert use(table, 1) == MANAGED
    assert [call[-1] for call in gpus.named("advise_accessed_by")] == [0, 1, 1]


def test_explaining_maps_nothing(gpus: PretendedDriver) -> None:
    table, ids = empty((16, 128), memory="managed"), torch.empty(8, dtype=torch.int64).to("meta")
    speedtorch.explain("pinned_gather", table, ids)
    assert len(gpus.named("advise_accessed_by")) == 1


# WSL2: registered memory lies elsewhere for kernels


@pytest.fixture
def wsl(driver: PretendedDriver) -> PretendedDriver:
    driver.registers_elsewhere = True
    return driver


def test_registered_memory_that_kernels_would_not_find_is_cudas_own(wsl: PretendedDriver) -> None:
    table = empty(1000, memory="registered")
    assert list(wsl.allocated) == [table.data_ptr()]
    assert wsl.registered == {}
    assert not table.any()
    assert memory_kind(table) == "registered"
    assert use(table) == MAPPED
    del table
    assert wsl.nothing_left()
    names = [name for name, *_ in wsl.named("event_synchronize", "host_free")]
    assert names == ["event_synchronize", "host_free"]


def test_a_failed_cuda_allocation_frees_everything(wsl: PretendedDriver) -> None:
    wsl.fail("host_alloc")
    message = r"pinning 4000 bytes with cudaHostAlloc failed: pretended reason 2"
    with pytest.raises(RuntimeError, match=message):
        empty(1000, memory="registered")
    assert wsl.nothing_left()
    assert mapping_of(wsl.named("host_register")[0][1]) is None


def test_pinning_in_place_is_refused_where_kernels_would_not_find_it(wsl: PretendedDriver) -> None:
    tensor = torch.ones(1000)
    wsl.other_captures = True
    with pytest.raises(RuntimeError, match=r"as on WSL2.*memory='registered'"):
        pin_memory_(tensor)
    assert wsl.nothing_left()
    assert memory_kind(tensor) == "plain"


def test_foreign_memory_with_another_gpu_address_is_staged(wsl: PretendedDriver) -> None:
    tensor = torch.ones(1000)
    wsl.registered[tensor.data_ptr()] = (4000, False)
    assert use(tensor) == NOT
    wsl.registers_elsewhere = False
    assert use(tensor) == MAPPED
    wsl.registered.clear()


# Grace: kernels reach pageable memory


@pytest.mark.parametrize("own", [False, True], ids=["torchs", "own"])
def test_pageable_tables_are_reached_through_the_hosts_page_tables(
    driver: PretendedDriver, own: bool
) -> None:
    table = empty((9, 4), memory="plain") if own else torch.zeros(9, 4)
    ids = torch.empty(8, dtype=torch.int64, device="meta")
    assert speedtorch.explain("pinned_gather", table, ids).path == "staged"
    driver.host_page_tables = True
    explanation = speedtorch.explain("pinned_gather", table, ids)
    assert explanation.path == "direct"
    assert "mapped memory" in explanation.why


def test_plain_memory_is_freed_after_the_gpu_has_read_it(driver: PretendedDriver) -> None:
    driver.host_page_tables = True
    table = empty(1 << 20, memory="plain")
    address = table.data_ptr()
    assert use(table) == MAPPED
    there: list[str | None] = []
    driver.on_call = lambda name: there.append(mapping_of(address))
    del table
    assert len(driver.named("event_synchronize")) == 1
    assert there
    assert all(there)
    assert mapping_of(address) is None
    assert driver.nothing_left()


@pytest.mark.parametrize("call", ["get_device", "host_page_tables"])
def test_a_driver_that_does_not_answer_stages_pageable_memory(
    driver: PretendedDriver, call: str
) -> None:
    driver.host_page_tables = True
    driver.fail(call)
    assert use(torch.zeros(10)) == NOT
    assert driver.pending == 0


# A driver that is too old

TOO_OLD = (
    r"NVIDIA's driver is too old: it supports CUDA 12\.4 at most. This speedtorch was built with "
    r"CUDA 13\.1 and needs a driver for CUDA 13\.0 or newer \(NVIDIA's driver 580 or newer\). "
    r"Update the driver, or build speedtorch with an nvcc of CUDA 12"
)


@pytest.fixture
def old(driver: PretendedDriver) -> PretendedDriver:
    driver.versions = (12040, 13010)
    for name in ("device_count", "host_register", "pointer_kind"):
        driver.fail(name, error=INSUFFICIENT_DRIVER)
    return driver


@pytest.mark.parametrize("kind", ["managed", "registered"])
def test_memory_for_a_gpu_names_the_driver_that_is_needed(old: PretendedDriver, kind: str) -> None:
    with pytest.raises(RuntimeError, match=rf"needs a GPU. {TOO_OLD}. Use memory='plain'"):
        empty(3, memory=kind)
    assert old.nothing_left()


def test_an_op_names_the_driver_that_is_needed(old: PretendedDriver) -> None:
    with pytest.raises(RuntimeError, match=rf"use_on failed: {TOO_OLD} \(CUDA error 35\)"):
        use(torch.zeros(3))
    assert old.pending == 0


WITH_KERNELS = pytest.mark.skipif(
    not torch.ops.speedtorch.built_with_cuda(), reason="the library is built without CUDA kernels"
)


@WITH_KERNELS
def test_info_names_the_driver_that_is_needed(old: PretendedDriver) -> None:
    with pytest.raises(RuntimeError, match=TOO_OLD):
        torch.ops.speedtorch.check_driver()
    assert info().kernels.startswith(
        "CPU (NVIDIA's driver is too old: it supports CUDA 12.4 at most"
    )


@WITH_KERNELS
@pytest.mark.parametrize("versions", [(13000, 13010), (13020, 13010), (14000, 13010), (0, 13010)])
def test_a_driver_of_the_same_major_version_is_new_enough(
    driver: PretendedDriver, versions: tuple[int, int]
) -> None:
    driver.versions = versions
    assert info().kernels == "CPU and CUDA"
    driver.fail("device_count", error=INSUFFICIENT_DRIVER)
    with pytest.raises(RuntimeError, match="No GPU or no driver was found"):
        empty(3, memory="managed")


# Seams of registrations


class CopiesWithinRegistrations(TorchDispatchMode):
    """Refuses copies across a seam of two registrations, as CUDA does."""

    def __init__(self, driver: PretendedDriver) -> None:
        super().__init__()
        self.driver, self.copied = driver, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is torch.ops.aten.copy_.default:
            self.copied += args[0].nbytes
            for side in args[:2]:
                begin = side.data_ptr()
                for first, (count, _) in self.driver.registered.items():
                    if first <= begin < first + count:
                        assert begin + side.nbytes <= first + count, "invalid argument"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def huge() -> Tensor:
    return reserved(600 * GIB)


def test_boundaries_are_offsets_from_the_first_byte_of_a_tensor(
    driver: PretendedDriver, huge: Tensor
) -> None:
    table = pin_memory_(huge[: 256 * GIB])
    assert len(driver.registered) == 1 and registration_boundaries(table) == []
    unpin_memory_(table)
    table = pin_memory_(huge)
    assert registration_boundaries(table) == [256 * GIB, 512 * GIB]
    assert registration_boundaries(table[GIB : 300 * GIB]) == [255 * GIB]
    assert registration_boundaries(table[256 * GIB : 512 * GIB]) == []
    assert registration_boundaries(torch.zeros(3)) == registration_boundaries(torch.zeros(0)) == []
    unpin_memory_(table)
    assert driver.nothing_left()


@pytest.mark.parametrize("comes", [True, False], ids=["comes", "goes"])
@pytest.mark.parametrize("seam", [64 * GIB, 256 * GIB, 512 * GIB], ids="{}".format)
def test_copies_of_units_end_at_registration_boundaries(
    driver: PretendedDriver, huge: Tensor, seam: int, comes: bool
) -> None:
    host = pin_memory_(huge)
    spans = [(0, 8), (seam - 4096, seam + 5000), (600 * GIB - 8, 600 * GIB)]
    device = reserved(600 * GIB)
    source, target = (host, device) if comes else (device, host)
    values = torch.randint(1, 256, (9096,), dtype=torch.uint8)
    source[seam - 4096 : seam + 5000] = values
    with CopiesWithinRegistrations(driver) as copies:
        copy_spans(host, device, spans, to=Memory.DEVICE if comes else Memory.HOST)
    assert copies.copied == 9096 + 16
    assert torch.equal(target[seam - 4096 : seam + 5000], values)
    unpin_memory_(host)


# Another thread captures a CUDA graph


@pytest.mark.parametrize("kind", ["managed", "registered", "elsewhere", "in_place", "foreign"])
def test_memory_is_allocated_and_freed_while_another_thread_captures(
    driver: PretendedDriver, kind: str
) -> None:
    driver.gpus = (True, True)
    driver.other_captures = True
    tensor = made(driver, kind)
    use(tensor, 1)
    _ops.throw_pending()
    del tensor
    assert driver.nothing_left()


def test_the_pretended_driver_refuses_unsafe_calls_of_threads_that_do_not_relax() -> None:
    with PretendedDriver(True) as driver:
        driver.other_captures = True
        driver.fail("relax_capture")
        with pytest.raises(RuntimeError, match="pretended reason 900"):
            empty(1000, memory="managed")
    assert (GLOBAL, RELAXED, OUT_OF_MEMORY) == (0, 2, 2)
    assert "malloc_managed" in UNSAFE_IN_CAPTURE


# Captured CUDA graphs keep memory until it is released


@pytest.mark.parametrize("gpu", [0, 1])
@pytest.mark.parametrize("is_gone", [False, True])
def test_released_memory_goes_behind_the_replays_of_its_graphs(
    gpus: PretendedDriver, gpu: int, is_gone: bool
) -> None:
    release()  # what earlier tests left
    gpus.calls.clear()
    table = [empty(1000, memory="registered")]
    gpus.capturing = {STREAM}
    use(table[0], gpu)
    gpus.capturing = set()
    if is_gone:
        table.clear()
        assert memory_stats()["captured"] == 4000 and gpus.registered
        release()
    else:
        release(table[0])
        release(table.pop())  # nothing is captured any more
    chosen, back = ([("set_device", to)] if gpu else [] for to in (gpu, 0))
    calls = gpus.named("set_device", "device_synchronize", "host_unregister")
    assert calls[:-1] == [*chosen, ("device_synchronize",), *back]
    assert calls[-1][0] == "host_unregister" and gpus.nothing_left()


@pytest.mark.parametrize("is_left", [False, True])
def test_memory_of_a_graph_is_pinned_until_it_is_released(
    driver: PretendedDriver, is_left: bool
) -> None:
    release()  # what earlier tests left
    tensor = pin_memory_(torch.zeros(1000))
    driver.capturing = {STREAM}
    use(tensor, 0)
    driver.capturing = set()
    if is_left:  # by the storage of the tensor, which has other memory now
        (address,) = driver.registered
        tensor.resize_(100_000)
        there = torch.empty(0, dtype=torch.uint8).set_(storage_at(address, tensor.device, 4000))
        assert (memory_kind(tensor), memory_kind(there)) == ("plain", "pinned")
        assert memory_stats()["captured"] == 4000
    remedy = "release()" if is_left else "release(tensor)"
    with pytest.raises(RuntimeError, match=re.escape(f"speedtorch.memory.{remedy} first")):
        unpin_memory_(tensor)
    assert driver.registered
    release() if is_left else release(tensor)
    unpin_memory_(tensor)
    assert not driver.registered


# Streams, and threads that the driver lets wait


@pytest.mark.parametrize(
    "uses",
    [[(0, STREAM, 70), (0, STREAM, 70), (0, STREAM, 71)], [(0, 0, 0), (1, 0, 0), (0, 0, 0)]],
    ids=["a handle that is used again", "default streams of two GPUs"],
)
def test_streams_of_other_numbers_and_gpus_are_others(
    gpus: PretendedDriver, uses: list[tuple[int, int, int]]
) -> None:
    table = empty(1000, memory="registered")
    for gpu, stream, number in uses:
        gpus.stream_ids[stream] = number
        use(table, gpu, stream)
    events = [event for _, event, _ in gpus.named("event_record")]
    assert len(set(events)) == len(gpus.named("event_create")) == 2
    del table
    waited = [event for _, event in gpus.named("event_synchronize")]
    assert waited == list(dict.fromkeys(events))


def test_an_op_asks_the_driver_three_times_about_its_table(driver: PretendedDriver) -> None:
    table = empty(1000, memory="managed")
    use(table)
    before = len(driver.calls)
    use(table)
    names = [name for name, *_ in driver.calls[before:]]
    assert names == ["stream_is_capturing", "stream_id", "event_record"]


@pytest.mark.parametrize("kind", ["managed", "registered", "in_place", "foreign", "plain"])
def test_no_lock_is_held_during_driver_calls(driver: PretendedDriver, kind: str) -> None:
    """Another thread gets at the registry during every call."""
    locked: list[str] = []

    def ask(name: str) -> None:
        other = threading.Thread(target=speedtorch.memory_stats)
        other.start()
        other.join(5)
        if other.is_alive():
            locked.append(name)

    driver.gpus = (True, True)
    driver.host_page_tables = True
    driver.on_call = ask
    tensor = made(driver, kind)
    for gpu in (0, 0, 1):
        use(tensor, gpu)
    _ops.throw_pending()
    del tensor
    assert locked == []
    assert driver.named("event_destroy")
    assert driver.nothing_left()


def test_memory_is_unpinned_after_another_threads_op_has_noted_its_use(
    driver: PretendedDriver,
) -> None:
    tensor = pin_memory_(torch.ones(1000))
    unpinning = threading.Thread(target=unpin_memory_, args=(tensor,))
    alone: list[bool] = []

    def unpin_meanwhile(name: str) -> None:
        if name == "event_record" and not unpinning.is_alive():
            unpinning.start()
            unpinning.join(0.2)
            alone.append(unpinning.is_alive())

    driver.on_call = unpin_meanwhile
    use(tensor)
    unpinning.join()
    assert alone == [True]
    names = [name for name, *_ in driver.calls]
    last = [name for name in names if name.startswith("event_") or name == "host_unregister"]
    assert last == [*EVENT_CALLS, "host_unregister"]
    assert driver.nothing_left()


def test_foreign_memory_is_kept_until_the_gpu_has_finished(driver: PretendedDriver) -> None:
    memory = mmap.mmap(-1, 4096)
    memory_lives = weakref.ref(memory)
    table = torch.frombuffer(memory, dtype=torch.uint8)
    driver.pinned_by_others = {table.data_ptr(), table.data_ptr() + 4095}
    driver.unfinished = set(range(10))
    use(table)
    del table, memory
    _ops.throw_pending()
    assert memory_lives() is not None
    driver.unfinished.clear()
    _ops.throw_pending()
    assert memory_lives() is None
    assert driver.nothing_left()


@pytest.mark.parametrize("call", ["event_create", "event_record", "stream_id"])
def test_a_failure_to_record_a_use_raises_and_frees_everything(
    driver: PretendedDriver, call: str
) -> None:
    table = empty(1000, memory="registered")
    driver.fail(call, 1)
    with pytest.raises(RuntimeError, match="pretended reason 2"):
        use(table)
    assert use(table) == MAPPED
    del table
    assert driver.nothing_left()


def test_threads_use_one_table_at_once(driver: PretendedDriver) -> None:
    errors: list[Exception] = []

    def work(table: Tensor, stream: int) -> None:
        try:
            for _ in range(50):
                use(table, 0, stream)
        except Exception as error:
            errors.append(error)

    table = empty(1000, memory="registered")
    threads = [threading.Thread(target=work, args=(table, k % 2 + 1)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(driver.named("event_record")) == 200
