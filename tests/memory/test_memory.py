"""Host memory: kinds, sizes and refusals, on a pretended driver where one is asked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_calls import PretendedDriver

import speedtorch
from speedtorch import empty, memory_kind, memory_stats
from speedtorch.memory.host_memory import check_owner, release

KINDS = ["plain", "registered", "managed"]


def resident_bytes() -> int:
    """VmRSS of this process."""
    return int(re.findall(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


# Kinds and sizes


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


def test_foreign_memory_is_identified_by_its_address(driver: PretendedDriver) -> None:
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


# What is refused


def test_sizes_may_be_numpys_integers() -> None:
    assert empty(np.int64(3)).shape == (3,)
    assert empty((np.int64(3), 2)).shape == (3, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_more_than_is_available_is_refused_in_numbers(
    driver: PretendedDriver, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.delenv("SPEEDTORCH_MEMORY_CHECK", raising=False)
    meminfo = Path("/proc/meminfo").read_text()
    total = int(re.findall(r"MemTotal:\s*(\d+) kB", meminfo)[0]) * 1024
    wanted = total + 1
    with pytest.raises(MemoryError):
        empty(wanted, dtype=torch.uint8, memory=kind)  # reads the pages of code that raises
    before = resident_bytes()
    message = f"^host memory: {wanted} bytes requested, (\\d+) bytes available.*MEMORY_CHECK=0"
    with pytest.raises(MemoryError, match=message) as caught:
        empty(wanted, dtype=torch.uint8, memory=kind)
    assert 0 < int(re.findall(message, str(caught.value))[0]) < total
    assert driver.named("malloc_managed", "host_register") == []
    assert resident_bytes() - before < 2 << 20


def test_the_check_of_available_memory_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEEDTORCH_MEMORY_CHECK", "0")
    with pytest.raises(MemoryError, match=f"mapping {1 << 50} bytes failed: Cannot allocate"):
        empty(1 << 50, dtype=torch.uint8, memory="plain")
