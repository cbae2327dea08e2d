"""A captured CUDA graph keeps the memory of its tables until it is told that they are released."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from conftest import NEEDS_GPU, Place
from cuda_calls import Driver
from graph_capture import captured
from reference import assert_same_bytes, random_rows
from torch import Tensor

import speedtorch
from speedtorch.memory.host_memory import release

pytestmark = NEEDS_GPU

ROWS, WIDTH, IDS = 1000, 256, [999, 0, 500]


def capture_gather(table: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
    """A graph that gathers three rows, their ids and the result; nothing here holds the table."""
    index = torch.tensor(IDS, device="cuda")
    out = torch.zeros(len(IDS), WIDTH, device="cuda")

    def work() -> None:
        speedtorch.pinned_gather(table, index, out=out)

    return captured(work), index, out


@pytest.mark.parametrize("kind", ["managed", "registered", "torch_pinned"])
def test_a_graph_keeps_the_memory_of_its_table(kind: str) -> None:
    values = random_rows(ROWS, (WIDTH,))
    graph, index, out = capture_gather(Place("cuda", kind).table(values))
    gc.collect()
    more_tables = [
        Place("cuda", kind).table(random_rows(ROWS, (WIDTH,), seed=seed)) for seed in (1, 2, 3)
    ]
    out.zero_()
    graph.replay()
    speedtorch.synchronize()
    assert_same_bytes(out, values[IDS])
    assert (len(more_tables), index.tolist()) == (3, IDS)


@pytest.mark.parametrize("kind", ["managed", "registered"])
def test_memory_of_dead_tables_is_captured_and_goes_when_no_graph_will_use_it(kind: str) -> None:
    gc.collect()
    release()  # what earlier tests left
    before = speedtorch.memory_stats()
    kept = capture_gather(Place("cuda", kind).table(random_rows(ROWS, (WIDTH,))))
    gc.collect()
    after = speedtorch.memory_stats()
    assert after["captured"] == before["captured"] + ROWS * WIDTH * 4
    assert after[kind] == before[kind]
    assert len(kept) == 3
    del kept
    release()
    assert speedtorch.memory_stats() == before


@pytest.mark.parametrize("kind", ["managed", "registered"])
def test_released_memory_goes_with_its_table(kind: str) -> None:
    place, nbytes = Place("cuda", kind), ROWS * WIDTH * 4
    gc.collect()
    before = speedtorch.memory_stats()
    table = place.table(random_rows(ROWS, (WIDTH,)))
    kept = capture_gather(table)
    assert speedtorch.memory_stats()[kind] == before[kind] + nbytes
    release(table)
    del table
    gc.collect()
    assert speedtorch.memory_stats() == before
    assert len(kept) == 3


@pytest.mark.parametrize("kind", ["managed", "registered"])
def test_a_table_may_go_while_a_graph_is_captured(kind: str) -> None:
    place, values = Place("cuda", kind), random_rows(ROWS, (WIDTH,))
    table, index = place.table(values), place.ids([3, 4])
    more_tables = [place.table(random_rows(ROWS, (WIDTH,)))]
    speedtorch.pinned_gather(more_tables[0], index)
    out = torch.zeros(2, WIDTH, device="cuda")
    speedtorch.pinned_gather(table, index, out=out)
    speedtorch.synchronize()
    out.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        speedtorch.pinned_gather(table, index, out=out)
        more_tables.clear()
    graph.replay()
    speedtorch.synchronize()
    assert_same_bytes(out, values[[3, 4]])
    release(table)


@pytest.mark.parametrize("kind", ["managed", "registered", "torch_pinned"])
def test_release_waits_for_replays(kind: str) -> None:
    table = Place("cuda", kind).table(random_rows(ROWS, (WIDTH,)))
    kept = capture_gather(table)
    with Driver() as driver:
        release(table)
        assert driver.named("device_synchronize") == [("device_synchronize",)]
        release(table)  # nothing is captured any more
        assert len(driver.named("device_synchronize")) == 1
    assert len(kept) == 3


def test_release_of_a_whole_lets_its_fields_go() -> None:
    record = torch.zeros(ROWS, 2 * WIDTH, pin_memory=True)
    kept = capture_gather(record[:, WIDTH:])
    with Driver() as driver:
        release(record)
        assert len(driver.named("device_synchronize")) == 1
    assert len(kept) == 3


INVALIDATES = pytest.mark.xfail(run=False, reason="a table that torch pinned ends the capture")


@pytest.mark.parametrize(
    "kind", ["managed", "registered", "in_place", pytest.param("torch_pinned", marks=INVALIDATES)]
)
def test_another_thread_may_make_and_drop_tables_while_a_graph_is_captured(kind: str) -> None:
    values = random_rows(ROWS, (WIDTH,))
    index = torch.tensor(IDS, device="cuda")
    speedtorch.pinned_gather(Place("cuda", "managed").table(values), index)
    speedtorch.synchronize()
    # Of another pool of streams than that of the capture, which torch hands out in turns.
    side = torch.cuda.Stream(priority=-1)
    inside, done = threading.Event(), threading.Event()
    results: list[object] = []

    def make_use_and_drop() -> None:
        inside.wait()
        try:
            with torch.cuda.stream(side):
                if kind == "in_place":
                    table = speedtorch.pin_memory_(values.clone())
                elif kind == "torch_pinned":
                    table = pinned
                else:
                    table = Place("cuda", kind).table(values)
                results.append(speedtorch.pinned_gather(table, index, out=out))
                del table
        except Exception as error:
            results.append(error)
        finally:
            done.set()

    pinned, out = values.pin_memory(), torch.zeros(len(IDS), WIDTH, device="cuda")
    other = threading.Thread(target=make_use_and_drop)
    other.start()
    graph, x = torch.cuda.CUDAGraph(), torch.ones(8, device="cuda")
    with torch.cuda.graph(graph):
        y = x + 1
        inside.set()
        done.wait()
        z = y * 2
    other.join()
    graph.replay()
    speedtorch.synchronize()
    assert z.tolist() == [4.0] * 8
    assert [result for result in results if isinstance(result, Exception)] == []
    assert_same_bytes(out, values[IDS])
