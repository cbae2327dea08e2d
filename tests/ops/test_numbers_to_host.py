"""numbers_to_host: a few numbers of a GPU are copied to the CPU behind what made them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
import torch
from conftest import NEEDS_GPU
from cuda_calls import Driver
from torch import Tensor

from speedtorch.ops.functions import (
    count_batch,
    drop_numbers,
    numbers_have_come,
    numbers_to_host,
    read_numbers,
)

_handles = itertools.count(-1, -1)  # the package's own ascend
UNKNOWN = 1 << 40


@pytest.fixture
def handle() -> Iterator[int]:
    made = next(_handles)
    yield made
    drop_numbers(made)


def ascending(count: int) -> Tensor:
    """Numbers that the GPU has yet to make."""
    numbers = torch.zeros(count, dtype=torch.int64, device="cuda")
    torch.cuda._sleep(10_000_000)
    numbers += torch.arange(count, device="cuda")
    return numbers


@NEEDS_GPU
@pytest.mark.parametrize("count", [0, 1, 12, 16, 17, 1000])
def test_the_numbers_are_those_of_the_stream(count: int, handle: int) -> None:
    numbers_to_host(ascending(count), handle)  # which frees the numbers before they are copied
    torch.full((max(count, 1),), -1, device="cuda")
    assert read_numbers(handle) == read_numbers(handle) == [*range(count)]
    assert numbers_have_come(handle)


@NEEDS_GPU
def test_nothing_waits_before_numbers_are_read(handle: int) -> None:
    torch.cuda._sleep(200_000_000)
    numbers_to_host(torch.ones(2, dtype=torch.int64, device="cuda"), handle)
    assert not numbers_have_come(handle)
    assert read_numbers(handle) == [1, 1]


@NEEDS_GPU
def test_memory_of_dropped_numbers_is_used_again_behind_their_copy() -> None:
    ahead, following = next(_handles), next(_handles)
    with Driver() as driver:
        numbers_to_host(ascending(5000), ahead)
        drop_numbers(ahead)
        numbers_to_host(torch.full((5000,), 7, device="cuda"), following)
        read_numbers(following)
        drop_numbers(following)
        allocated = len(driver.named("host_alloc"))
        for _ in range(3):
            numbers_to_host(torch.full((5000,), 8, device="cuda"), following)
            assert read_numbers(following) == [8] * 5000
            drop_numbers(following)
        assert len(driver.named("host_alloc")) == allocated


@NEEDS_GPU
def test_threads_read_and_drop_one_copy(handle: int) -> None:
    numbers_to_host(ascending(3), handle)
    found: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: found.append(read_numbers(handle))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[0, 1, 2]] * 4


class Failing(Driver):
    """The real driver, of which one call fails once."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.failed = name, False

    def answer(self, name: str, *arguments: object) -> int:
        if name == self.name and not self.failed:
            self.failed = True
            return 2
        return super().answer(name, *arguments)


CALLS = ["host_alloc", "event_create", "copy_to_host", "event_record", "event_synchronize"]


@NEEDS_GPU
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_fails_is_raised_and_the_next_works(name: str, handle: int) -> None:
    count = 1 << (14 + CALLS.index(name))  # so many that no memory is kept for them
    numbers = torch.arange(count, device="cuda")
    with Failing(name) as driver:
        with pytest.raises(RuntimeError, match="(numbers_to_host|read_numbers) failed"):
            numbers_to_host(numbers, handle)
            read_numbers(handle)
        assert driver.failed
    drop_numbers(handle)
    numbers_to_host(numbers, handle)
    assert read_numbers(handle) == [*range(count)]


@NEEDS_GPU
@pytest.mark.parametrize("name", ["copy_to_host", "event_record", "event_synchronize"])
def test_a_batch_whose_count_fails_is_counted_again(name: str) -> None:
    index = torch.tensor([3, 1, 3])
    on = torch.empty(0, device="cuda")
    with Failing(name) as driver:
        with pytest.raises(RuntimeError, match="count_batch failed"):
            count_batch(index, on, 9, -1)
        assert driver.failed
    assert count_batch(index, on, 9, -1)[5].tolist() == [1, 3]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (torch.zeros(6)[::2], "numbers must be contiguous"),
        (torch.zeros(3).long(), "numbers must be int64 on a GPU, got Long on cpu"),
    ],
)
def test_other_arguments_raise(numbers: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"numbers_to_host: {message}"):
        numbers_to_host(numbers, UNKNOWN)


@NEEDS_GPU
def test_a_handle_names_one_copy(handle: int) -> None:
    numbers = torch.zeros(1, dtype=torch.int64, device="cuda")
    numbers_to_host(numbers, handle)
    with pytest.raises(ValueError, match="already names another copy"):
        numbers_to_host(numbers, handle)
    with pytest.raises(ValueError, match="numbers must be int64 on a GPU, got Float"):
        numbers_to_host(numbers.float(), UNKNOWN)


def test_a_handle_of_no_copy_raises() -> None:
    for query in (read_numbers, numbers_have_come):
        with pytest.raises(ValueError, match=f"handle {UNKNOWN} names no copy"):
            query(UNKNOWN)
    drop_numbers(UNKNOWN)
