"""Streams: ops follow torch's current stream, wait for nothing, and keep their table alive."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator

import pytest
import reference
import torch
from conftest import NEEDS_GPU, Place
from reference import assert_same_bytes, assert_same_storage, layout_copy, random_rows
from torch import Tensor

import speedtorch

pytestmark = NEEDS_GPU

ROWS, WIDTH = 1000, 256
LONG = 300_000_000  # GPU cycles, over a tenth of a second: the calls after it return long before


def pinned_ids(count: int, seed: int) -> Tensor:
    """Ids in memory that a copy to the GPU need not wait for."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, ROWS, (count,), generator=generator).pin_memory()


def run_at_once(work: Callable[[int], None], numbers: Iterable[int]) -> None:
    """Runs the work for each number, all in threads of their own."""
    threads = [threading.Thread(target=work, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture
def mapped(gpu_place: Place) -> Iterator[Place]:
    """The kinds of memory that need no staged copy, which waits for the GPU."""
    if not gpu_place.mapped:
        pytest.skip("the staged path of pageable tables synchronises")
    yield gpu_place
    torch.cuda.synchronize()


def test_ops_run_on_the_current_stream(gpu_place: Place) -> None:
    values = random_rows(ROWS, (WIDTH,))
    table, ids = gpu_place.table(values), pinned_ids(500, 1)
    side = torch.cuda.Stream()
    index = torch.zeros(500, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        index.copy_(ids, non_blocking=True)
        rows = speedtorch.pinned_gather(table, index)
        speedtorch.pinned_scatter(table, index, rows.flip(1))
        again = speedtorch.pinned_gather(table, index)
    side.synchronize()
    assert_same_bytes(rows, values[ids])
    assert_same_bytes(again, values[ids].flip(1))


def test_streams_that_wait_for_one_another_see_all_rows(gpu_place: Place) -> None:
    values = random_rows(ROWS, (WIDTH,))
    table, ids = gpu_place.table(values), pinned_ids(500, 2)
    index = ids.cuda()
    src = random_rows(500, (WIDTH,), seed=1)
    rows = src.cuda()
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(writer):
        torch.cuda._sleep(LONG)
        speedtorch.pinned_scatter(table, index, rows)
    reader.wait_stream(writer)
    with torch.cuda.stream(reader):
        result = speedtorch.pinned_gather(table, index)
    reader.synchronize()
    expected = layout_copy(values)
    reference.pinned_scatter(expected, ids, src)
    assert_same_bytes(result, expected[ids])


@pytest.mark.parametrize("op", ["gather", "planned", "scatter", "add", "swap"])
def test_no_op_waits_for_the_gpu(mapped: Place, op: str) -> None:
    table = mapped.table(reference.small_numbers(ROWS, (WIDTH,)))
    index = torch.randperm(ROWS)[:500].cuda()
    rows, arriving = (torch.zeros(500, WIDTH, device="cuda") for _ in range(2))

    def call() -> None:
        if op == "gather":
            speedtorch.pinned_gather(table, index)
        elif op == "planned":
            plan = speedtorch.plan_rows(index, ROWS)
            speedtorch.pinned_gather(table, index, plan=plan, out=rows)
        elif op == "swap":
            speedtorch.optimizer_state_swap([table], [rows], index, [arriving], index)
        else:
            speedtorch.pinned_scatter(table, index, rows, accumulate=op == "add")

    call()  # whatever is made once, is made here
    speedtorch.synchronize()
    sleep_ended = torch.cuda.Event()
    torch.cuda._sleep(LONG)
    sleep_ended.record()
    call()
    assert not sleep_ended.query()


def test_a_view_keeps_the_memory_too(mapped: Place) -> None:
    values = random_rows(ROWS, (WIDTH,))
    view = mapped.table(values)[100:200, :7]
    gc.collect()
    result = speedtorch.pinned_gather(view, mapped.ids([99, 0]))
    assert_same_bytes(result, values[[199, 100], :7])


def test_ids_and_results_may_travel_without_blocking(gpu_place: Place) -> None:
    values = random_rows(ROWS, (WIDTH,))
    table, ids = gpu_place.table(values), pinned_ids(2000, 3)
    back = torch.empty(2000, WIDTH, pin_memory=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        index = ids.to("cuda", non_blocking=True)
        back.copy_(speedtorch.pinned_gather(table, index), non_blocking=True)
    stream.synchronize()
    assert_same_bytes(back, values[ids])


def test_ids_on_the_cpu_may_change_as_soon_as_the_call_returns(mapped: Place) -> None:
    values = random_rows(ROWS, (WIDTH,))
    table, src = mapped.table(values), random_rows(500, (WIDTH,), seed=1)
    rows, out = src.cuda(), torch.zeros(500, WIDTH, device="cuda")
    for pin in (False, True):
        ids = torch.randint(0, ROWS, (500,), generator=torch.Generator().manual_seed(4))
        changing = ids.clone().pin_memory() if pin else ids.clone()
        torch.cuda._sleep(LONG)
        speedtorch.pinned_gather(table, changing, out=out)
        changing.fill_(0)
        torch.cuda.synchronize()
        assert_same_bytes(out, values[ids])
        torch.cuda._sleep(LONG)
        changing.copy_(ids)
        speedtorch.pinned_scatter(table, changing, rows)
        changing.fill_(0)
        speedtorch.synchronize()
        reference.pinned_scatter(values, ids, src)
        assert_same_storage(table, values)


def test_many_streams_give_the_bits_of_one(gpu_place: Place) -> None:
    streams = [torch.cuda.Stream() for _ in range(8)]
    values = [reference.small_numbers(ROWS, (33,), seed=seed) for seed in range(8)]
    src = [reference.small_numbers(4000, (33,), seed=100 + seed) for seed in range(8)]
    ids = [pinned_ids(4000, seed) for seed in range(8)]
    tables = [gpu_place.table(table) for table in values]
    work = [(index.cuda(), rows.cuda()) for index, rows in zip(ids, src, strict=True)]
    torch.cuda.synchronize()
    results = []
    for round_ in range(2):
        for stream, table, (index, rows) in zip(streams, tables, work, strict=True):
            with torch.cuda.stream(stream):
                speedtorch.pinned_scatter(table, index, rows, accumulate=round_ == 1)
                results.append(speedtorch.pinned_gather(table, index))
    speedtorch.synchronize()
    for round_ in range(2):
        for k in range(8):
            reference.pinned_scatter(values[k], ids[k], src[k], accumulate=round_ == 1)
            assert_same_bytes(results[8 * round_ + k], values[k][ids[k]])
    for table, expected in zip(tables, values, strict=True):
        assert_same_storage(table, expected)


def test_several_threads_may_call_at_once(gpu_place: Place) -> None:
    values = random_rows(ROWS, (WIDTH,))
    table, results = gpu_place.table(values), {}

    def gather(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            index = pinned_ids(300, seed).cuda()
            for _ in range(20):
                results[seed] = speedtorch.pinned_gather(table, index)
            torch.cuda.current_stream().synchronize()

    run_at_once(gather, range(8))
    assert len(results) == 8
    for seed, rows in results.items():
        assert_same_bytes(rows, values[pinned_ids(300, seed)])


def test_threads_move_rows_of_different_lengths_at_once() -> None:
    """Bulk copies of rows of 256 bytes take less shared memory than those of 512."""
    errors: list[str] = []

    def work(columns: int) -> None:
        values = random_rows(65_536, (columns,), seed=columns)
        table = speedtorch.empty(values.shape, memory="managed").copy_(values)
        ids = torch.randint(65_536, (8192,))
        with torch.cuda.stream(torch.cuda.Stream()):
            index, out = ids.cuda(), torch.empty(8192, columns, device="cuda")
            try:
                for _ in range(4000):
                    speedtorch.pinned_gather(table, index, out=out)
                assert_same_bytes(out, values[ids])
            except (RuntimeError, AssertionError) as error:
                errors.append(str(error))

    run_at_once(work, (64, 128))
    assert errors == []


def test_bad_ids_of_two_streams_are_reported_by_one_of_them(mapped: Place) -> None:
    """All numbers of a message are those of one launch, whichever comes first."""
    tables = [mapped.table(torch.zeros(rows, 8)) for rows in (1000, 300)]
    ids = [torch.arange(count, device="cuda") % 300 for count in (900, 250)]
    ids[0][[11, 22, 33]] = 5000
    ids[1][[7, 8]] = -3
    src = torch.zeros(250, 8, device="cuda")
    words = {
        "pinned_gather: id 5000 at position 11 of index is out of range for a table of 1000 rows "
        "(3 of 900 ids are out of range); no row was moved",
        "pinned_scatter: id -3 at position 7 of index is out of range for a table of 300 rows "
        "(2 of 250 ids are out of range); no row was moved",
    }
    streams = [torch.cuda.Stream() for _ in range(2)]
    reported = set()
    for round_ in range(100):
        torch.cuda._sleep(1_000_000)  # both begin at the end of this
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        with pytest.raises(IndexError) as caught:
            for which in (0, 1) if round_ % 2 else (1, 0):
                with torch.cuda.stream(streams[which]):
                    if which == 0:
                        speedtorch.pinned_gather(tables[0], ids[0])
                    else:
                        speedtorch.pinned_scatter(tables[1], ids[1], src)
            speedtorch.synchronize()
        reported.add(str(caught.value))
        speedtorch.synchronize()  # the other one is told by none
    assert reported <= words
