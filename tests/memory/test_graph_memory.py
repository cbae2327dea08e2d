"""A captured CUDA graph keeps the memory of its tables until it is told that they are released."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from conftest import NEEDS_GPU
from cuda_calls import Driver
from graph_capture import captured
from reference import assert_same_bytes, assert_same_storage, random_rows
from test_memory_gpu import NBYTES, OWN, ROWS, WIDTH, table_of
from torch import Tensor

import speedtorch
from speedtorch import HostTable, memory_kind, memory_stats, unpin_memory_
from speedtorch.memory.host_memory import release

pytestmark = NEEDS_GPU

IDS = [999, 0, 500]


def capture_gather(table: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
    """A graph that gathers three rows, their ids and the result; nothing here holds the table."""
    index = torch.tensor(IDS, device="cuda")
    out = torch.zeros(len(IDS), WIDTH, device="cuda")

    def work() -> None:
        speedtorch.pinned_gather(table, index, out=out)

    return captured(work), index, out


@pytest.mark.parametrize("kind", [*OWN, "in_place", "torch_pinned"])
def test_a_graph_keeps_the_memory_of_its_table(kind: str) -> None:
    values = random_rows(ROWS, (WIDTH,))
    gc.collect()
    before = sum(memory_stats().values())
    graph, index, out = capture_gather(table_of(kind, values))
    gc.collect()
    assert sum(memory_stats().values()) == before + (NBYTES if kind != "torch_pinned" else 0)
    more_tables = [table_of(kind, random_rows(ROWS, (WIDTH,), seed=seed)) for seed in range(4)]
    out.zero_()
    graph.replay()
    speedtorch.synchronize()
    assert_same_bytes(out, values[IDS])
    assert (len(more_tables), index.tolist()) == (4, IDS)


@pytest.mark.parametrize("kind", [*OWN, "in_place"])
def test_released_memory_goes_with_its_tensor_whatever_was_captured(kind: str) -> None:
    gc.collect()
    before = memory_stats()
    table = table_of(kind, torch.zeros(ROWS, WIDTH))
    kept = capture_gather(table)
    release(table)
    del table
    assert memory_stats() == before
    assert len(kept) == 3


def test_unpinning_what_a_graph_reads_is_refused_until_it_is_released() -> None:
    table = table_of("in_place", torch.zeros(ROWS, WIDTH))
    kept = capture_gather(table)
    with pytest.raises(RuntimeError, match="unpin_memory_: .*graph.*release"):
        unpin_memory_(table)
    assert memory_kind(table) == "registered"
    release(table)
    unpin_memory_(table)
    assert memory_kind(table) == "plain"
    assert len(kept) == 3


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("kind", [*OWN, "in_place"])
def test_memory_is_neither_made_nor_pinned_during_capture(kind: str) -> None:
    zeros = torch.zeros(ROWS, WIDTH)
    message = "not supported while a CUDA graph is captured"
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        table_of(kind, zeros)
    torch.cuda.synchronize()
    assert_same_storage(table_of(kind, zeros), zeros)


@pytest.mark.parametrize("kind", OWN)
def test_closing_a_table_releases_what_was_captured(kind: str) -> None:
    gc.collect()
    before = memory_stats()
    table = HostTable(ROWS, WIDTH, memory=kind)  # type: ignore[arg-type]
    kept = capture_gather(table["weight"])
    assert memory_stats()[kind] == before[kind] + NBYTES
    table.close()
    del table
    assert memory_stats() == before
    assert len(kept) == 3


@pytest.mark.parametrize("kind", OWN)
def test_memory_of_dead_tables_is_captured_and_goes_when_no_graph_will_use_it(kind: str) -> None:
    gc.collect()
    release()  # what earlier tests left
    before = memory_stats()
    kept = capture_gather(table_of(kind, random_rows(ROWS, (WIDTH,))))
    gc.collect()
    after = memory_stats()
    assert after["captured"] == before["captured"] + NBYTES
    assert after[kind] == before[kind]
    assert len(kept) == 3
    del kept
    release()
    assert memory_stats() == before


@pytest.mark.parametrize("kind", OWN)
def test_a_table_may_go_while_a_graph_is_captured(kind: str) -> None:
    values, index = random_rows(ROWS, (WIDTH,)), torch.tensor([3, 4], device="cuda")
    table, more_tables = table_of(kind, values), [table_of(kind, values)]
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


@pytest.mark.parametrize("kind", [*OWN, "torch_pinned"])
def test_release_waits_for_replays(kind: str) -> None:
    table = table_of(kind, random_rows(ROWS, (WIDTH,)))
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
    speedtorch.pinned_gather(table_of("managed", values), index)
    speedtorch.synchronize()
    # Of another pool of streams than that of the capture, which torch hands out in turns.
    side = torch.cuda.Stream(priority=-1)
    inside, done = threading.Event(), threading.Event()
    results: list[object] = []

    def make_use_and_drop() -> None:
        inside.wait()
        try:
            with torch.cuda.stream(side):
                table = pinned if kind == "torch_pinned" else table_of(kind, values)
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
