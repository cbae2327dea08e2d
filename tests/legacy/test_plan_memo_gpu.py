"""One plan per batch in ModelFactory and OptimizerFactory where plans pay: on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from model_families import ROWS, WIDTH, filled, layer, table_rows
from plan_memos import Made, exchange, made, plans, shared
from reference import assert_same_bytes
from torch import Tensor

import speedtorch
from speedtorch import HostTable, ModelFactory
from speedtorch.legacy.plan_memo import plans_of

__all__ = ["made", "plans"]

pytestmark = NEEDS_GPU

MAPPED = pytest.mark.parametrize("memory", ["managed", "registered"])


IDS = [4, 2, 4, 11]
GPU_FORMS = pytest.mark.parametrize("where", ["list", "cpu", "cuda"])


def ids_of(where: str) -> Any:
    return IDS if where == "list" else torch.tensor(IDS, device=where)


@MAPPED
@GPU_FORMS
def test_on_a_gpu_all_ops_of_a_batch_get_one_plan(
    memory: str, where: str, made: Made, plans: list[Any]
) -> None:
    table, embedding, weights, states = shared(memory, "cuda")
    before = table.record.clone()
    ids = ids_of(where)
    exchange(weights, states, ids)
    assert made == [IDS]
    assert len(plans) == 6
    assert all(plan is plans[0] for plan in plans)
    assert plans[0][0].is_cuda
    assert_same_bytes(embedding.weight, before[IDS, :WIDTH])
    table.settle()
    assert_same_bytes(table.record, before)


@pytest.mark.parametrize("memory", ["plain", "cuda"])
@GPU_FORMS
def test_on_a_gpu_other_kinds_of_memory_get_no_plan(memory: str, where: str, made: Made) -> None:
    table, embedding, weights, states = shared(memory, "cuda")
    exchange(weights, states, ids_of(where))
    assert not made
    assert_same_bytes(embedding.weight, table["weight"][IDS])


@MAPPED
def test_on_a_gpu_ids_that_were_written_to_get_a_new_plan(memory: str, made: Made) -> None:
    embedding = layer("cuda")
    weights = ModelFactory(embedding, ROWS, WIDTH, table=HostTable(ROWS, WIDTH, memory=memory))
    expected = filled(weights)
    ids = torch.tensor(IDS, device="cuda")
    weights.beforeForwardPass(ids)
    ids.copy_(torch.tensor([0, 1, 0, 3]))
    weights.afterOptimizerStep(ids)
    for row, source in ((0, IDS[2]), (1, IDS[1]), (3, IDS[3])):
        expected[row] = expected[source].clone()
    assert_same_bytes(table_rows(weights), expected)
    for value in (5, 6):
        ids.data.fill_(value)  # no new version; the next batch
        weights.beforeForwardPass(ids)
        assert_same_bytes(embedding.weight, expected[[value] * 4])
    assert len(made) == 4


@MAPPED
def test_on_a_gpu_ids_of_both_devices_may_be_mixed(memory: str, made: Made) -> None:
    table, embedding, weights, states = shared(memory, "cuda")
    before = table.record.clone()
    for _ in range(2):
        parts = torch.tensor(IDS[:2], device="cuda"), IDS[2:]
        for switcher in (weights, states):
            switcher.beforeForwardPass(*parts)
            switcher.afterOptimizerStep(*parts)
    assert_same_bytes(embedding.weight, before[IDS, :WIDTH])
    assert made == [IDS] * 8
    assert len(plans_of(table)) == 0


@MAPPED
@GPU_FORMS
def test_on_a_gpu_another_stream_makes_its_own_plan(memory: str, where: str, made: Made) -> None:
    table, _, weights, _ = shared(memory, "cuda")
    before = table.record.clone()
    ids = ids_of(where)
    weights.beforeForwardPass(ids)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        weights.afterOptimizerStep(ids)
    assert made == [IDS] * 2
    table.settle()
    assert_same_bytes(table.record, before)


@MAPPED
def test_a_captured_graph_neither_uses_nor_fills_the_memo(memory: str, made: Made) -> None:
    table = HostTable(ROWS, WIDTH, memory=memory)
    ids = torch.tensor(IDS, device="cuda")
    device = ids.device
    plans_of(table).find(ids, None, device, "a", 0)
    found: list[tuple[Tensor, Any]] = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.append(plans_of(table).find(ids, None, device, "a", 1))
        found.append(plans_of(table).find(ids, ids, device, "a", 1))
    assert [plan for _, plan in found] == [None, None]
    assert len(made) == 1
    assert len(plans_of(table)) == 1


@MAPPED
@GPU_FORMS
def test_on_a_gpu_nothing_waits(memory: str, where: str) -> None:
    table, _, weights, states = shared(memory, "cuda")
    before = table.record.clone()
    exchange(weights, states, ids_of(where))
    ids = IDS[::-1] if where == "list" else torch.tensor(IDS[::-1], device=where)
    torch.cuda.set_sync_debug_mode("error")
    try:
        exchange(weights, states, ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    table.settle()
    assert_same_bytes(table.record, before)


@MAPPED
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_on_a_gpu_bad_ids_are_refused_in_the_same_words(memory: str, where: str) -> None:
    table, _, weights, states = shared(memory, "cuda")
    exchange(weights, states, IDS)
    table.settle()
    before = table.record.clone()
    bad = torch.tensor([3, -5, 0, 1], device=where)
    for switcher in (weights, states):
        for method, op in (
            ("beforeForwardPass", "pinned_gather"),
            ("afterOptimizerStep", "pinned_scatter"),
        ):
            with pytest.raises(IndexError, match=f"{op}: id -5 at position 1 of index"):
                getattr(switcher, method)(bad)
                speedtorch.synchronize()
    table.settle()
    assert_same_bytes(table.record, before)
