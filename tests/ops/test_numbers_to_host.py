"""numbers_to_host: a few numbers of a GPU are copied to the CPU behind what made them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from conftest import NEEDS_GPU
from cuda_calls import Driver
from test_argument_faults import in_a_fork
from torch import Tensor

from speedtorch._C import NumbersHandle
from speedtorch.ops.functions import count_batch, numbers_to_host, plan_batch, plan_parts


@pytest.fixture
def handle() -> NumbersHandle:
    return NumbersHandle()


def ascending(count: int) -> Tensor:
    """Numbers that the GPU has yet to make."""
    numbers = torch.zeros(count, dtype=torch.int64, device="cuda")
    torch.cuda._sleep(10_000_000)
    numbers += torch.arange(count, device="cuda")
    return numbers


@NEEDS_GPU
@pytest.mark.parametrize("count", [0, 1, 12, 16, 17, 1000])
def test_the_numbers_are_those_of_the_stream(count: int, handle: NumbersHandle) -> None:
    numbers_to_host(
        ascending(count), handle.number()
    )  # which frees the numbers before they are copied
    torch.full((max(count, 1),), -1, device="cuda")
    assert handle.read() == handle.read() == [*range(count)]
    assert handle.is_complete()


@NEEDS_GPU
def test_nothing_waits_before_numbers_are_read(handle: NumbersHandle) -> None:
    torch.cuda._sleep(200_000_000)
    numbers_to_host(torch.ones(2, dtype=torch.int64, device="cuda"), handle.number())
    assert not handle.is_complete()
    assert handle.read() == [1, 1]


@NEEDS_GPU
def test_memory_of_dropped_numbers_is_used_again_behind_their_copy() -> None:
    with Driver() as driver:
        dropped = NumbersHandle()
        numbers_to_host(ascending(5000), dropped.number())
        del dropped
        handle = NumbersHandle()
        numbers_to_host(torch.full((5000,), 7, device="cuda"), handle.number())
        handle.read()
        del handle
        allocated = len(driver.named("host_alloc"))
        for _ in range(3):
            handle = NumbersHandle()
            numbers_to_host(torch.full((5000,), 8, device="cuda"), handle.number())
            assert handle.read() == [8] * 5000
            del handle
        assert len(driver.named("host_alloc")) == allocated


@NEEDS_GPU
def test_threads_read_one_copy(handle: NumbersHandle) -> None:
    numbers_to_host(ascending(3), handle.number())
    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(handle.read())) for _ in range(4)]
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
def test_a_call_that_fails_is_raised_and_the_next_works(name: str, handle: NumbersHandle) -> None:
    count = 1 << (14 + CALLS.index(name))  # so many that no memory is kept for them
    numbers = torch.arange(count, device="cuda")
    with Failing(name) as driver:
        with pytest.raises(RuntimeError, match="(numbers_to_host|read_numbers) failed"):
            numbers_to_host(numbers, handle.number())
            handle.read()
        assert driver.failed
    other = NumbersHandle()
    numbers_to_host(numbers, other.number())
    assert other.read() == [*range(count)]


@NEEDS_GPU
@pytest.mark.parametrize("name", ["copy_to_host", "event_record", "event_synchronize"])
def test_a_batch_whose_count_fails_is_counted_again(name: str) -> None:
    index = torch.tensor([3, 1, 3])
    on = torch.empty(0, device="cuda")
    with Failing(name) as driver:
        with pytest.raises(RuntimeError, match="count_batch failed"):
            count_batch([index], on, 9, -1)
        assert driver.failed
    assert count_batch([index], on, 9, -1)[5].tolist() == [1, 3]


@NEEDS_GPU
def test_a_handle_names_one_copy(handle: NumbersHandle) -> None:
    numbers = torch.zeros(1, dtype=torch.int64, device="cuda")
    numbers_to_host(numbers, handle.number())
    with pytest.raises(ValueError, match="already names another copy"):
        numbers_to_host(numbers, handle.number())
    with pytest.raises(ValueError, match="numbers must be int64 on a GPU, got Float"):
        numbers_to_host(numbers.float(), NumbersHandle().number())


def test_a_handle_of_no_copy_raises(handle: NumbersHandle) -> None:
    for query in (handle.read, handle.is_complete):
        with pytest.raises(RuntimeError, match="no copy was queued under this handle"):
            query()


def test_a_forked_child_reads_no_copy_of_its_parent(handle: NumbersHandle) -> None:
    with pytest.raises(RuntimeError, match="no copy was queued"):
        handle.read()

    def child() -> None:
        for query in (handle.read, handle.is_complete):
            with pytest.raises(RuntimeError, match="a forked child cannot read copies of the pro"):
                query()

    assert in_a_fork(child) == 0


@NEEDS_GPU
@pytest.mark.parametrize("op", [numbers_to_host, lambda ids, to: plan_parts([ids], 9, -1, to)])
def test_a_graph_cannot_hold_a_copy_for_the_host(
    op: Callable[[Tensor, int], object], handle: NumbersHandle
) -> None:
    numbers = torch.arange(3, device="cuda")
    expected = pytest.raises(RuntimeError, match="not supported while a CUDA graph is captured")
    with expected, torch.cuda.graph(torch.cuda.CUDAGraph()):
        op(numbers, handle.number())
    numbers_to_host(numbers, handle.number())
    assert handle.read() == [0, 1, 2]


def test_handles_differ() -> None:
    assert len({NumbersHandle().number() for _ in range(10)}) == 10


@pytest.mark.parametrize(
    "dtypes", [(torch.int64,) * 3, (torch.int32,) * 3, (torch.int32, torch.int64)]
)
def test_parts_are_planned_as_one_batch(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    shapes = [(4, 3), (0,), (7,)]
    draw = torch.Generator().manual_seed(1)
    parts = [
        torch.randint(20, shape, generator=draw).to(device, dtype)
        for shape, dtype in zip(shapes, (*dtypes, dtypes[0]), strict=False)
    ]
    parts[0] = parts[0].t()  # not contiguous
    handle = NumbersHandle()
    made = plan_parts(parts, 20, 3, handle.number())
    expected = plan_batch(torch.cat([part.reshape(-1) for part in parts]), 20, 3, -1)
    for mine, theirs in zip(made, expected, strict=True):
        assert torch.equal(mine, theirs)
    if device == "cuda":
        assert handle.read() == made[4].tolist()
