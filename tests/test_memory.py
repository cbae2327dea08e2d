"""Host memory: kinds, sizes, refusals, and what is done with CUDA, on a pretended driver."""

from __future__ import annotations

import math
import mmap
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from cuda_calls import INVALID_VALUE, OUT_OF_MEMORY, PretendedDriver, mapping_of
from torch import Tensor

import speedtorch
from speedtorch import empty, memory_kind, memory_stats, pin_memory_, unpin_memory_
from speedtorch.memory import check_owner, release

KINDS = ["plain", "registered", "managed"]
GIB = 1 << 30
NORESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # Python names MAP_NORESERVE late
SEEN_BY_TORCH = pytest.mark.filterwarnings("ignore:The given buffer is not writable")


@pytest.fixture
def driver() -> Iterator[PretendedDriver]:
    """One pretended GPU; a test must give back all that it took."""
    with PretendedDriver(True) as pretended:
        yield pretended
        assert pretended.nothing_left()


@pytest.fixture
def stats(driver: PretendedDriver) -> Callable[[], dict[str, int]]:
    """Bytes by kind, without what was there before the test."""
    before = memory_stats()
    return lambda: {name: count - before[name] for name, count in memory_stats().items()}


def without_managed(monkeypatch: pytest.MonkeyPatch) -> PretendedDriver:
    """A GPU that torch and the library find and that has no concurrentManagedAccess."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.speedtorch, "built_with_cuda", lambda: True)
    return PretendedDriver(False)


def resident_bytes() -> int:
    """VmRSS of this process."""
    return int(re.findall(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


# ------------------------------------------------------------------------------------------------
# Kinds and sizes
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(), 1, 7, (3, 5), (513, 1023), (3, 1 << 20)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.complex128], ids=str)
def test_memory_has_exactly_the_bytes_of_its_elements_and_is_zero(
    driver: PretendedDriver, kind: str, size: int | tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = empty(size, dtype=dtype, memory=kind)
    shape = (size,) if isinstance(size, int) else size
    assert (tensor.shape, tensor.dtype, tensor.device.type) == (shape, dtype, "cpu")
    assert tensor.untyped_storage().nbytes() == math.prod(shape) * dtype.itemsize
    assert tensor.is_contiguous()
    assert not tensor.any()
    assert memory_kind(tensor) == memory_kind(tensor.view(-1)[-1:]) == kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0, (0, 3), (4, 0)], ids=str)
def test_no_elements_take_no_memory(
    stats: Callable[[], dict[str, int]], kind: str, size: int | tuple[int, ...]
) -> None:
    tensor = empty(size, memory=kind)
    assert tensor.shape == ((size,) if isinstance(size, int) else size)
    assert set(stats().values()) == {0}


@pytest.mark.parametrize("kind", KINDS)
def test_the_statistics_count_exact_bytes_by_kind(
    stats: Callable[[], dict[str, int]], kind: str
) -> None:
    tensors = [empty(count, dtype=torch.uint8, memory=kind) for count in (1, 4097, 3 << 20)]
    nothing = dict.fromkeys(memory_stats(), 0)
    assert stats() == nothing | {kind: 1 + 4097 + (3 << 20)}
    view = tensors.pop()[5:7]
    tensors.clear()
    assert stats() == nothing | {kind: 3 << 20}
    del view
    assert stats() == nothing


@pytest.mark.parametrize("kind", ["plain", "registered"])
def test_resident_memory_is_the_payload_and_at_most_one_large_page(
    driver: PretendedDriver, kind: str
) -> None:
    payload = (200 << 20) + 4097
    empty(payload, dtype=torch.uint8, memory=kind)  # the stacks of its threads are kept
    before = resident_bytes()
    tensor = empty(payload, dtype=torch.uint8, memory=kind)
    assert payload <= resident_bytes() - before <= payload + (2 << 20)
    del tensor
    assert resident_bytes() - before <= 2 << 20


def test_large_memory_starts_at_a_large_page() -> None:
    assert empty(5 << 20, dtype=torch.uint8, memory="plain").data_ptr() % (2 << 20) == 0


def test_nothing_but_plain_memory_needs_the_driver(driver: PretendedDriver) -> None:
    tensor = empty(100, memory="plain")
    del tensor
    assert driver.calls == []


def test_memory_of_others_is_known_by_its_address(driver: PretendedDriver) -> None:
    tensor = torch.zeros(100)
    assert memory_kind(tensor) == "plain"
    driver.pinned_by_others.add(tensor.data_ptr())
    assert memory_kind(tensor) == "pinned"


@pytest.mark.parametrize("kind", KINDS)
def test_the_process_that_made_memory_may_use_it(driver: PretendedDriver, kind: str) -> None:
    tensor = empty((4, 2), memory=kind)
    check_owner(tensor)
    release(tensor)
    speedtorch.pinned_scatter(tensor, torch.tensor([3]), torch.ones(1, 2))
    assert speedtorch.pinned_gather(tensor, torch.tensor([3, 0])).tolist() == [[1, 1], [0, 0]]


# ------------------------------------------------------------------------------------------------
# What is refused
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [-1, (3, -1), (-2, -2)], ids=str)
def test_negative_sizes_are_refused(size: int | tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="size must not be negative, got .*-"):
        empty(size)


def test_unknown_kinds_are_refused() -> None:
    message = "'auto', 'managed', 'registered' or 'plain', got 'pinned'"
    with pytest.raises(ValueError, match=message):
        empty(3, memory="pinned")


def test_sizes_beyond_all_memory_are_refused_in_numbers() -> None:
    with pytest.raises((MemoryError, ValueError), match=str(2**64 * 4)):
        empty((2**32, 2**32), memory="plain")


def test_the_library_itself_refuses_bad_sizes_and_kinds() -> None:
    host_empty = torch.ops.speedtorch.host_empty
    with pytest.raises(ValueError, match="host memory: size must not be negative, got -5"):
        host_empty(-5, 0, True)
    for kind in (-1, 3, 4):
        with pytest.raises(ValueError, match=f"kind must be 0 .* got {kind}"):
            host_empty(5, kind, True)


@pytest.mark.parametrize("kind", KINDS)
def test_more_than_is_available_is_refused_in_numbers(
    driver: PretendedDriver, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.delenv("SPEEDTORCH_MEMORY_CHECK", raising=False)
    meminfo = Path("/proc/meminfo").read_text()
    total = int(re.findall(r"MemTotal:\s*(\d+) kB", meminfo)[0]) * 1024
    wanted, before = total + 1, resident_bytes()
    message = f"^host memory: {wanted} bytes asked for, (\\d+) bytes available.*MEMORY_CHECK=0"
    with pytest.raises(MemoryError, match=message) as caught:
        empty(wanted, dtype=torch.uint8, memory=kind)
    assert 0 < int(re.findall(message, str(caught.value))[0]) < total
    assert driver.named("malloc_managed", "host_register") == []
    assert resident_bytes() - before < 2 << 20


def test_the_check_of_available_memory_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPEEDTORCH_MEMORY_CHECK", "0")
    with pytest.raises(MemoryError, match=f"mapping {1 << 50} bytes failed: Cannot allocate"):
        empty(1 << 50, dtype=torch.uint8, memory="plain")


# ------------------------------------------------------------------------------------------------
# What is asked of CUDA, in which order
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_managed_memory_is_advised_for_every_gpu_before_the_first_touch(gpus: int) -> None:
    with PretendedDriver(*[True] * gpus) as driver:
        tensor = empty(3 << 20, dtype=torch.uint8, memory="managed")
        piece = (tensor.data_ptr(), 3 << 20)
        assert driver.named("malloc_managed", "advise_preferred_host", "advise_accessed_by") == [
            ("malloc_managed", 3 << 20),
            ("advise_preferred_host", *piece),
            *(("advise_accessed_by", *piece, gpu) for gpu in range(gpus)),
        ]
        assert driver.advised_untouched == [True] * (1 + gpus)
        assert not tensor.any()
        assert driver.named("host_register") == []
        del tensor
        assert driver.named("free_managed") == [("free_managed", piece[0])]
        assert driver.nothing_left()


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_registered_memory_is_unregistered_before_it_is_unmapped(
    driver: PretendedDriver, large: bool
) -> None:
    count = 64 << 20 if large else 100
    tensor = empty(count, dtype=torch.uint8, memory="registered")
    address = tensor.data_ptr()
    assert driver.named("host_register") == [("host_register", address, count, 0)]
    del tensor
    assert driver.named("host_unregister") == [("host_unregister", address)]
    assert driver.unregistered_mapped == [True]
    assert not large or mapping_of(address) is None


def test_a_gpu_without_concurrent_access_is_refused_by_name() -> None:
    with PretendedDriver(True, False) as driver:
        message = "GPU 1 has no concurrentManagedAccess.*memory='registered'"
        with pytest.raises(RuntimeError, match=message):
            empty(10, memory="managed")
        assert driver.named("malloc_managed") == []
        assert driver.nothing_left()


def test_auto_takes_managed_memory_where_every_gpu_can_use_it(driver: PretendedDriver) -> None:
    assert memory_kind(empty(10)) == "managed"


def test_auto_falls_back_to_registered_memory_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_managed(monkeypatch), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert memory_kind(empty(10)) == "registered"


def test_auto_falls_back_to_plain_memory_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with without_managed(monkeypatch) as driver:
        driver.fail("host_register")
        with pytest.warns(UserWarning) as caught:
            tensor = empty(10)
        (warning,) = caught
        text = "not pinned.* pinning 40 bytes .*pretended reason 2"
        assert re.search(text, str(warning.message))
        assert warning.filename == __file__
        assert memory_kind(tensor) == "plain"
        assert driver.nothing_left()


def test_auto_is_plain_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with PretendedDriver() as driver, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert memory_kind(empty(10)) == "plain"
        assert driver.nothing_left()


# ------------------------------------------------------------------------------------------------
# Every call may fail
# ------------------------------------------------------------------------------------------------

PINNING = r"pinning 4000 bytes .*pretended reason 2 \(CUDA error 2\).*available.*Remedy: "

# Every call that making managed memory for two GPUs consists of: name and number.
MANAGED_CALLS = pytest.mark.parametrize(
    ("call", "number"),
    [
        ("device_count", 1),
        ("concurrent_managed_access", 1),
        ("concurrent_managed_access", 2),
        ("malloc_managed", 1),
        ("advise_preferred_host", 1),
        ("advise_accessed_by", 1),
        ("advise_accessed_by", 2),
    ],
)


@MANAGED_CALLS
def test_a_failure_on_the_way_to_managed_memory_leaves_nothing_behind(
    stats: Callable[[], dict[str, int]], call: str, number: int
) -> None:
    with PretendedDriver(True, True) as driver:
        driver.fail(call, number)
        with pytest.raises(RuntimeError):
            empty(1000, memory="managed")
        assert driver.nothing_left()
        assert set(stats().values()) == {0}
        assert memory_kind(empty(1000, memory="managed")) == "managed"


@MANAGED_CALLS
def test_a_failure_on_the_way_to_managed_memory_says_how_much_why_and_what_to_do(
    call: str, number: int
) -> None:
    with PretendedDriver(True, True) as driver:
        driver.fail(call, number)
        with pytest.raises(RuntimeError) as caught:
            empty(1000, memory="managed")
    for part in (r"\b4000 bytes", r"pretended reason 2 \(CUDA error 2\)", r"memory='registered'"):
        assert re.search(part, str(caught.value))


def test_no_call_of_the_library_escapes_the_tests_above() -> None:
    with PretendedDriver(True, True) as driver:
        empty(1000, memory="managed")
    made = {name for name, *_ in driver.calls}
    failed = {name for name, _ in MANAGED_CALLS.args[1]}
    # Whether a graph is captured: asked for where torch has CUDA, and no reason to fail.
    made -= {"get_device", "stream_is_capturing", "relax_capture"}
    assert made == failed | {"free_managed"}


def test_a_failure_to_register_leaves_nothing_behind(
    driver: PretendedDriver, stats: Callable[[], dict[str, int]]
) -> None:
    driver.fail("host_register", 1)
    with pytest.raises(RuntimeError, match=PINNING):
        empty(1000, memory="registered")
    assert driver.nothing_left()
    assert mapping_of(driver.named("host_register")[0][1]) is None
    assert set(stats().values()) == {0}
    assert memory_kind(empty(1000, memory="registered")) == "registered"


def test_a_failure_to_pin_leaves_the_tensor_as_it_was(
    driver: PretendedDriver, stats: Callable[[], dict[str, int]]
) -> None:
    tensor = torch.ones(1000)
    driver.fail("host_register", 1, 2)
    with pytest.raises(RuntimeError, match=PINNING):
        pin_memory_(tensor)
    assert driver.nothing_left()
    assert (memory_kind(tensor), set(stats().values())) == ("plain", {0})
    with pytest.raises(ValueError, match="not pinned with pin_memory_"):
        unpin_memory_(tensor)
    assert memory_kind(pin_memory_(tensor)) == "registered"


@pytest.mark.parametrize("call", ["pointer_kind", "relax_capture", "get_device"])
def test_a_failed_question_is_no_failure_and_is_cleared(driver: PretendedDriver, call: str) -> None:
    driver.fail(call)
    tensor = pin_memory_(torch.ones(1000))
    assert driver.pending == 0
    assert (memory_kind(tensor), memory_kind(torch.ones(3))) == ("registered", "plain")
    assert driver.pending == 0
    unpin_memory_(tensor)
    empty(1000, memory="managed")
    assert driver.pending == 0


@pytest.mark.parametrize("call", ["device_count", "concurrent_managed_access"])
def test_auto_clears_the_error_of_a_driver_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with PretendedDriver(True) as driver:
        driver.fail(call)
        assert memory_kind(empty(10)) == "plain"
        assert driver.nothing_left()


@pytest.mark.parametrize("kind", ["registered", "managed"])
def test_a_failure_to_give_back_is_cleared_and_memory_is_forgotten(
    stats: Callable[[], dict[str, int]], kind: str
) -> None:
    with PretendedDriver(True) as driver:
        tensor = empty(1000, memory=kind)
        driver.fail("free_managed", error=INVALID_VALUE)
        driver.fail("host_unregister", error=INVALID_VALUE)
        del tensor
        assert driver.pending == 0
        assert set(stats().values()) == {0}


# ------------------------------------------------------------------------------------------------
# Pinning in place
# ------------------------------------------------------------------------------------------------


def reserved(count: int) -> Tensor:
    """That many bytes of address space with no memory behind them yet."""
    return torch.frombuffer(mmap.mmap(-1, count, flags=NORESERVE), dtype=torch.uint8)


def test_memory_is_registered_in_pieces_of_at_most_64_gib(driver: PretendedDriver) -> None:
    tensor = reserved(130 * GIB)
    pin_memory_(tensor)
    pieces = [(tensor.data_ptr() + 64 * k * GIB, size * GIB) for k, size in enumerate((64, 64, 2))]
    assert driver.named("host_register") == [("host_register", *piece, 0) for piece in pieces]
    assert memory_stats()["registered"] >= 130 * GIB
    unpin_memory_(tensor)
    unregistered = [("host_unregister", piece[0]) for piece in pieces]
    assert driver.named("host_unregister") == unregistered


@pytest.mark.parametrize("piece", [1, 2, 3])
def test_a_piece_that_fails_takes_the_pieces_before_it_back(
    driver: PretendedDriver, stats: Callable[[], dict[str, int]], piece: int
) -> None:
    tensor = reserved(130 * GIB)
    driver.fail("host_register", piece, piece + 1)  # for writing, then the retry for reading
    with pytest.raises(RuntimeError, match=f"pinning {130 * GIB} bytes .*pretended reason 2"):
        pin_memory_(tensor)
    assert driver.nothing_left()
    assert set(stats().values()) == {0}


def test_a_strided_tensor_is_pinned_from_its_first_to_its_last_byte(
    driver: PretendedDriver, stats: Callable[[], dict[str, int]]
) -> None:
    tensor = torch.zeros(100, 10)[5:50:3, 2:4]
    pin_memory_(tensor)
    span = (14 * 30 + 1 + 1) * 4
    assert driver.registered == {tensor.data_ptr(): (span, False)}
    assert stats()["registered"] == span


@pytest.mark.parametrize("made", [torch.Tensor.detach, lambda t: t.data], ids=["detach", "data"])
def test_memory_is_unpinned_with_its_tensor_though_an_alias_lives(
    driver: PretendedDriver, made: Callable[[Tensor], Tensor]
) -> None:
    tensor = pin_memory_(torch.full((1000,), 7.0))
    alias = made(tensor)
    assert memory_kind(alias) == "registered"
    del tensor
    assert driver.nothing_left()
    assert memory_kind(alias) == "plain"
    assert alias.eq(7).all()


def test_a_view_holds_its_tensor_and_keeps_it_pinned(driver: PretendedDriver) -> None:
    view = pin_memory_(torch.zeros(1000))[10:20]
    assert memory_kind(view) == "registered"
    del view
    assert driver.nothing_left()


@pytest.mark.parametrize("unpinned", [False, True], ids=["dies", "is_unpinned"])
def test_memory_that_a_tensor_gave_up_stays_until_it_is_unpinned(
    driver: PretendedDriver, unpinned: bool
) -> None:
    tensor = pin_memory_(torch.zeros(64 << 20, dtype=torch.uint8))
    address = tensor.data_ptr()
    tensor.data = torch.ones(3, dtype=torch.uint8)
    assert list(driver.registered) == [address]
    assert mapping_of(address) is not None
    assert memory_kind(tensor) == "plain"
    if unpinned:
        unpin_memory_(tensor)
    else:
        del tensor
    assert driver.unregistered_mapped == [True]
    assert driver.nothing_left()
    assert mapping_of(address) is None


def test_no_memory_goes_before_it_is_unpinned_when_new_memory_is_pinned_over_it(
    driver: PretendedDriver,
) -> None:
    tensor = pin_memory_(torch.zeros(64 << 20, dtype=torch.uint8))
    tensor.data = torch.ones(64 << 20, dtype=torch.uint8)
    with suppress(ValueError):  # it may be refused: the tensor object is pinned already
        pin_memory_(tensor)
    assert all(mapping_of(address) is not None for address in driver.registered)
    unpin_memory_(tensor)
    assert memory_kind(tensor) == "plain"
    del tensor
    assert all(driver.unregistered_mapped)
    assert driver.nothing_left()


def test_no_tensor_is_pinned_or_unpinned_twice(driver: PretendedDriver) -> None:
    tensor = pin_memory_(torch.zeros(1000))
    with pytest.raises(ValueError, match="pin_memory_: .*pinned (or allocated )?already"):
        pin_memory_(tensor)
    assert memory_kind(tensor) == "registered"
    assert unpin_memory_(tensor) is tensor
    with pytest.raises(ValueError, match="unpin_memory_: .*not pinned with pin_memory_"):
        unpin_memory_(tensor)
    assert memory_kind(pin_memory_(tensor)) == "registered"


@pytest.mark.parametrize("second", [slice(0, 11), slice(19, 21), slice(12, 15), slice(0, 30)])
def test_overlaps_are_refused(driver: PretendedDriver, second: slice) -> None:
    whole = torch.zeros(30)
    pinned = pin_memory_(whole[10:20])
    with pytest.raises(ValueError, match="overlaps memory that speedtorch has pinned"):
        pin_memory_(whole[second])
    assert list(driver.registered) == [pinned.data_ptr()]


def test_neighbours_may_both_be_pinned(driver: PretendedDriver) -> None:
    whole = torch.zeros(30)
    parts = [pin_memory_(whole[begin : begin + 10]) for begin in (10, 0, 20)]
    assert len(driver.registered) == 3
    unpin_memory_(parts[0])
    kinds = [memory_kind(whole[begin : begin + 10]) for begin in (0, 10, 20)]
    assert kinds == ["registered", "plain", "registered"]


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_speedtorch_made_is_not_pinned_again(
    driver: PretendedDriver, kind: str
) -> None:
    tensor = empty(100, memory=kind)
    with pytest.raises(ValueError, match="overlaps memory that speedtorch has .*allocated"):
        pin_memory_(tensor)
    with pytest.raises(ValueError, match="not pinned with pin_memory_"):
        torch.ops.speedtorch.host_unregister(tensor)


def test_memory_that_others_pinned_is_not_pinned_again(driver: PretendedDriver) -> None:
    tensor = torch.zeros(100)
    driver.pinned_by_others.add(tensor.data_ptr())
    with pytest.raises(ValueError, match="pinned already, by another library"):
        pin_memory_(tensor)
    assert driver.named("host_register") == []


def test_only_cpu_tensors_are_pinned() -> None:
    with pytest.raises(ValueError, match="pin_memory_: the tensor must be on the CPU"):
        pin_memory_(torch.zeros(3, device="meta"))


def test_a_tensor_without_elements_is_pinned_without_cuda(driver: PretendedDriver) -> None:
    tensor = torch.zeros(0, 3)
    unpin_memory_(pin_memory_(tensor))
    assert driver.named("host_register", "host_unregister") == []


@SEEN_BY_TORCH
def test_a_read_only_file_is_pinned_read_only_and_never_written(
    driver: PretendedDriver, tmp_path: Path
) -> None:
    path = tmp_path / "rows"
    path.write_bytes(bytes(range(64)))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    table = pin_memory_(torch.frombuffer(mapped, dtype=torch.uint8).view(16, 4))
    assert driver.registered == {table.data_ptr(): (64, True)}
    assert driver.pending == 0
    ids, rows = torch.tensor([3, 0]), torch.zeros(2, 4, dtype=torch.uint8)
    assert speedtorch.pinned_gather(table, ids).tolist() == [[12, 13, 14, 15], [0, 1, 2, 3]]
    message = "read-only mapping of a file; copy it into speedtorch.memory.empty"
    for view in (table, table[2:], table[:, 1:3]):
        with pytest.raises(ValueError, match=f"^pinned_scatter: table lies in a {message}"):
            speedtorch.pinned_scatter(view, ids, rows[:, : view.shape[1]].contiguous())
    with pytest.raises(ValueError, match=f"^optimizer_state_swap: host.* lies in a {message}"):
        speedtorch.optimizer_state_swap([table], [rows], ids, [rows.clone()], ids[:0])
    unpin_memory_(table)
    assert path.read_bytes() == bytes(range(64))


def test_pinning_for_reading_is_only_tried_after_pinning_for_writing_failed(
    driver: PretendedDriver,
) -> None:
    driver.fail("host_register", 1, error=OUT_OF_MEMORY)
    tensor = pin_memory_(torch.zeros(10))
    assert [call[3] for call in driver.named("host_register")] == [0, 1]
    assert driver.registered == {tensor.data_ptr(): (40, True)}
