"""Memory pinned in place: how long it stays pinned, and what is refused."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from cuda_calls import OUT_OF_MEMORY, PretendedDriver, mapping_of
from torch import Tensor

import speedtorch
from speedtorch import empty, memory_kind, memory_stats, pin_memory_, unpin_memory_

KINDS = ["plain", "registered", "managed"]
GIB = 1 << 30
NORESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # Python names MAP_NORESERVE late
SEEN_BY_TORCH = pytest.mark.filterwarnings("ignore:The given buffer is not writable")


# Pinning in place


def reserved(count: int) -> Tensor:
    """That many bytes of address space with no memory behind them yet."""
    return torch.frombuffer(mmap.mmap(-1, count, flags=NORESERVE), dtype=torch.uint8)


def test_memory_is_registered_in_chunks_of_at_most_256_gib(driver: PretendedDriver) -> None:
    tensor = reserved(520 * GIB)
    pin_memory_(tensor)
    chunks = [
        (tensor.data_ptr() + 256 * k * GIB, size * GIB) for k, size in enumerate((256, 256, 8))
    ]
    assert driver.named("host_register") == [("host_register", *chunk, 0) for chunk in chunks]
    assert memory_stats()["registered"] >= 520 * GIB
    unpin_memory_(tensor)
    unregistered = [("host_unregister", chunk[0]) for chunk in chunks]
    assert driver.named("host_unregister") == unregistered


@pytest.mark.parametrize("captures", [False, True], ids=["alone", "beside a capture"])
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_a_chunk_that_fails_unregisters_the_chunks_before_it(
    driver: PretendedDriver, stats: Callable[[], dict[str, int]], chunk: int, captures: bool
) -> None:
    tensor, driver.other_captures = reserved(520 * GIB), captures
    driver.fail("host_register", chunk, chunk + 1)  # for writing, then the retry for reading
    with pytest.raises(RuntimeError, match=f"pinning {520 * GIB} bytes .*pretended reason 2"):
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
def test_replaced_memory_of_a_tensor_is_kept_until_it_is_unpinned(
    driver: PretendedDriver, unpinned: bool
) -> None:
    # Not of the heap, which keeps what it is given back.
    tensor = pin_memory_(torch.frombuffer(mmap.mmap(-1, 64 << 20), dtype=torch.uint8))
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
    with pytest.raises(ValueError, match="overlaps memory that speedtorch has already pinned"):
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
        unpin_memory_(tensor)


def test_foreign_pinned_memory_is_not_pinned_again(driver: PretendedDriver) -> None:
    tensor = torch.zeros(100)
    driver.pinned_by_others.add(tensor.data_ptr())
    with pytest.raises(ValueError, match="already pinned by another library"):
        pin_memory_(tensor)
    assert driver.named("host_register") == []


def test_a_tensor_without_elements_is_pinned_without_cuda(driver: PretendedDriver) -> None:
    tensor = torch.zeros(0, 3)
    unpin_memory_(pin_memory_(tensor))
    assert driver.named("host_register", "host_unregister") == []


@pytest.mark.parametrize("unpinned", [True, False], ids=["unpinned", "gone"])
def test_a_tensor_without_elements_takes_no_other_memory_with_it(unpinned: bool) -> None:
    table = speedtorch.empty(1000, memory="plain").fill_(7)
    before = speedtorch.memory_stats()
    tensor = pin_memory_(torch.zeros(0, 3))
    if unpinned:
        unpin_memory_(tensor)
    del tensor
    assert speedtorch.memory_stats() == before
    assert table.unique().tolist() == [7]


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
    message = "read-only mapping of a file. Copy it into speedtorch.memory.empty"
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
