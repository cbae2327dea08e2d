"""Streams: ops follow torch's current stream, wait for nothing, and keep their table alive."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

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


def test_streams_that_wait_for_each_other_see_each_others_rows(gpu_place: Place) -> None:
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
    asleep = torch.cuda.Event()
    torch.cuda._sleep(LONG)
    asleep.record()
    call()
    assert not asleep.query()


@pytest.mark.parametrize("memory", ["managed", "registered", "torch_pinned"])
@pytest.mark.parametrize("streams", [1, 3], ids="streams_{}".format)
def test_a_table_may_be_deleted_while_the_gpu_reads_it(memory: str, streams: int) -> None:
    place, values = Place("cuda", memory), random_rows(ROWS, (WIDTH,))
    table, index = place.table(values), torch.arange(ROWS, device="cuda").flip(0)
    speedtorch.pinned_gather(table, index)
    torch.cuda.synchronize()
    results = []
    for _ in range(streams):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(LONG)
            results.append(speedtorch.pinned_gather(table, index))
    del table
    gc.collect()
    others = [place.table(torch.full((ROWS, WIDTH), float("nan"))) for _ in range(4)]
    torch.cuda.synchronize()
    for result in results:
        assert_same_bytes(result, values.flip(0))
    assert len(others) == 4


@pytest.mark.parametrize("memory", ["managed", "registered", "torch_pinned"])
def test_a_table_may_be_deleted_while_the_gpu_writes_it(memory: str) -> None:
    place, index = Place("cuda", memory), torch.arange(ROWS, device="cuda")
    src = torch.full((ROWS, WIDTH), 7.0, device="cuda")
    table = place.table(torch.zeros(ROWS, WIDTH))
    speedtorch.pinned_scatter(table, index, src)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    speedtorch.pinned_scatter(table, index, src)
    del table
    gc.collect()
    others = [place.table(torch.zeros(ROWS, WIDTH)) for _ in range(4)]
    speedtorch.synchronize()
    assert not any(other.any() for other in others)


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
    for turn in range(2):
        for stream, table, (index, rows) in zip(streams, tables, work, strict=True):
            with torch.cuda.stream(stream):
                speedtorch.pinned_scatter(table, index, rows, accumulate=turn == 1)
                results.append(speedtorch.pinned_gather(table, index))
    speedtorch.synchronize()
    for turn in range(2):
        for k in range(8):
            reference.pinned_scatter(values[k], ids[k], src[k], accumulate=turn == 1)
            assert_same_bytes(results[8 * turn + k], values[k][ids[k]])
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

    threads = [threading.Thread(target=gather, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    for seed, rows in results.items():
        assert_same_bytes(rows, values[pinned_ids(300, seed)])
