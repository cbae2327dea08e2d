"""CUDA graphs: the ops are captured, replayed with new ids, and keep their table's memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import reference
import torch
from conftest import NEEDS_GPU, PLACES, Place
from graph_capture import captured
from reference import assert_same_bytes, assert_same_storage, layout_copy, random_rows
from torch import Tensor

import speedtorch
from speedtorch.memory.host_memory import release

pytestmark = NEEDS_GPU

ROWS, WIDTH = 37, 13
CAPTURABLE = pytest.mark.parametrize(
    "kind", [parameter for parameter in PLACES[1:] if parameter.id != "cuda-pageable"]
)


@CAPTURABLE
@pytest.mark.parametrize("planned", [False, True], ids=["unplanned", "planned"])
def test_a_captured_gather_reads_the_ids_of_the_replay(kind: Place, planned: bool) -> None:
    values = random_rows(ROWS, (WIDTH,))
    table, index = kind.table(values), kind.ids([0, 1, 2, 3])
    out = torch.zeros(4, WIDTH, device="cuda")

    def work() -> None:
        plan = speedtorch.plan_rows(index, ROWS) if planned else None
        speedtorch.pinned_gather(table, index, out=out, plan=plan)

    graph = captured(work)
    for ids in ([36, 0, 36, 5], [7, 8, 9, 10]):
        index.copy_(torch.tensor(ids))
        graph.replay()
        assert_same_bytes(out, values[ids])
    release(table)


@CAPTURABLE
def test_a_captured_gather_may_make_its_result(kind: Place) -> None:
    values = random_rows(ROWS, (WIDTH,))
    table, index = kind.table(values), kind.ids([0, 1, 2, 3])
    results: list[Tensor] = []
    graph = captured(lambda: results.append(speedtorch.pinned_gather(table, index)))
    index.copy_(torch.tensor([5, 5, 36, 0]))
    graph.replay()
    assert_same_bytes(results[-1], values[[5, 5, 36, 0]])
    release(table)


@CAPTURABLE
@pytest.mark.parametrize("accumulate", [False, True], ids=["write", "add"])
def test_a_captured_scatter_writes_the_table_itself(kind: Place, accumulate: bool) -> None:
    values = torch.zeros(ROWS, WIDTH)
    table, index = kind.table(values), kind.ids([0, 1, 2, 0])
    src = torch.zeros(4, WIDTH, device="cuda")
    graph = captured(lambda: speedtorch.pinned_scatter(table, index, src, accumulate=accumulate))
    for seed, ids in enumerate(([36, 0, 36, 5], [36, 5, 5, 5])):
        rows = reference.small_numbers(4, (WIDTH,), seed=seed)
        index.copy_(torch.tensor(ids))
        src.copy_(rows)
        graph.replay()
        speedtorch.synchronize()
        reference.pinned_scatter(values, torch.tensor(ids), rows, accumulate=accumulate)
        assert_same_storage(table, values)
    release(table)


@CAPTURABLE
def test_a_captured_swap_exchanges_the_rows_of_the_replay(kind: Place) -> None:
    values = random_rows(ROWS, (WIDTH,))
    table, evict, load = kind.table(values), kind.ids([0, 1]), kind.ids([2, 3])
    leaving, arriving = (torch.zeros(2, WIDTH, device="cuda") for _ in range(2))
    graph = captured(
        lambda: speedtorch.optimizer_state_swap([table], [leaving], evict, [arriving], load)
    )
    table.copy_(values)
    expected, expected_arriving = layout_copy(values), torch.zeros(2, WIDTH)
    for seed, lists in enumerate((([4, 9], [9, 30]), ([30, 9], [4, 36]))):
        rows = random_rows(2, (WIDTH,), seed=seed + 1)
        leaving.copy_(rows)
        evict.copy_(torch.tensor(lists[0]))
        load.copy_(torch.tensor(lists[1]))
        graph.replay()
        speedtorch.synchronize()
        ids = [torch.tensor(ids) for ids in lists]
        reference.optimizer_state_swap([expected], [rows], ids[0], [expected_arriving], ids[1])
        assert_same_storage(table, expected)
        assert_same_bytes(arriving, expected_arriving)
    release(table)


@CAPTURABLE
def test_a_bad_id_of_a_replay_is_reported_and_the_next_replay_works(kind: Place) -> None:
    values = random_rows(ROWS, (WIDTH,))
    table, index = kind.table(values), kind.ids([0, 1, 2])
    out = torch.zeros(3, WIDTH, device="cuda")

    def work() -> None:
        speedtorch.pinned_gather(table, index, out=out)

    graph = captured(work)
    index.copy_(torch.tensor([5, -8, 6]))
    graph.replay()
    with pytest.raises(IndexError, match="pinned_gather: id -8 at position 1 of index"):
        speedtorch.synchronize()
    assert not out.any()
    index.copy_(torch.tensor([5, 8, 6]))
    graph.replay()
    speedtorch.synchronize()
    assert_same_bytes(out, values[[5, 8, 6]])
    release(table)


def test_a_graph_of_several_ops(gpu_place: Place) -> None:
    if not gpu_place.mapped:
        pytest.skip("pageable tables cannot be captured")
    values = reference.small_numbers(ROWS, (WIDTH,))
    table, index = gpu_place.table(values), gpu_place.ids([0, 1, 2])

    def work() -> None:
        plan = speedtorch.plan_rows(index, ROWS)
        rows = speedtorch.pinned_gather(table, index, plan=plan)
        speedtorch.pinned_scatter(table, index, rows * 2, plan=plan)

    graph = captured(work)
    table.copy_(values)
    index.copy_(torch.tensor([4, 36, 0]))
    for _ in range(3):
        graph.replay()
    speedtorch.synchronize()
    values[[4, 36, 0]] *= 8
    assert_same_storage(table, values)
    release(table)


# What cannot be captured


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("fault", ["a pageable table", "ids on the CPU"])
@pytest.mark.parametrize("op", ["pinned_gather", "pinned_scatter", "optimizer_state_swap"])
def test_what_takes_the_host_is_refused_by_name_and_works_afterwards(op: str, fault: str) -> None:
    pageable = fault == "a pageable table"
    table = torch.zeros(ROWS, WIDTH) if pageable else speedtorch.empty((ROWS, WIDTH))
    index = torch.tensor([1, 2], device="cuda" if pageable else "cpu")
    rows, out = (torch.zeros(2, WIDTH, device="cuda") for _ in range(2))
    work: dict[str, Callable[[], object]] = {
        "pinned_gather": lambda: speedtorch.pinned_gather(table, index, out=out),
        "pinned_scatter": lambda: speedtorch.pinned_scatter(table, index, rows),
        "optimizer_state_swap": lambda: speedtorch.optimizer_state_swap(
            [table], [rows], index, [out], index
        ),
    }
    message = f"{op}: .*captur" + (".*pageable" if pageable else "")
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        work[op]()
    work[op]()
    speedtorch.synchronize()
