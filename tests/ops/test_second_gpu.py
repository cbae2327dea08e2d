"""Rows are worked on where their tensors are, whichever GPU is the current one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from reference import assert_same_bytes
from torch import Tensor, optim

import speedtorch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

ROWS, WIDTH = 3000, 24
SECOND = torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def the_first_gpu_remains_current() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("memory", ["managed", "registered"])
@pytest.mark.parametrize("count", [10, 700, 50_000])
def test_ops_work_on_the_gpu_of_their_tensors(memory: str, count: int) -> None:
    torch.manual_seed(0)
    table = speedtorch.empty((ROWS, WIDTH), memory=memory)
    table.copy_(torch.randn(ROWS, WIDTH))
    ids = torch.randint(ROWS, (count,))
    there = ids.to(SECOND)
    assert_same_bytes(speedtorch.pinned_gather(table, there), table[ids])
    plan = speedtorch.plan_rows(there, ROWS)
    for mine, theirs in zip(plan, speedtorch.plan_rows(ids, ROWS), strict=True):
        assert mine.device == SECOND
        assert_same_bytes(mine, theirs)
    rows = torch.randn(count, WIDTH)
    summed = speedtorch.sum_rows(rows.to(SECOND), plan, ROWS)
    torch.testing.assert_close(
        summed.cpu(), speedtorch.sum_rows(rows, speedtorch.plan_rows(ids, ROWS), ROWS)
    )
    expected = table.clone()
    speedtorch.pinned_scatter(expected, ids, rows)
    speedtorch.pinned_scatter(table, there, rows.to(SECOND))
    speedtorch.synchronize(SECOND)
    assert_same_bytes(table, expected)
    half = torch.randperm(ROWS)[: ROWS // 2].to(SECOND)
    evicted, loaded = (
        torch.randn(len(half), WIDTH, device=SECOND),
        torch.empty(9, WIDTH, device=SECOND),
    )
    speedtorch.optimizer_state_swap([table], [evicted], half, [loaded], half[:9])
    speedtorch.synchronize(SECOND)
    assert_same_bytes(loaded, evicted[:9])
    assert_same_bytes(table[half[9:].cpu()], evicted[9:])


def test_a_bad_id_there_is_reported() -> None:
    table = speedtorch.empty((ROWS, WIDTH))
    speedtorch.pinned_gather(table, torch.tensor([ROWS], device=SECOND))
    with pytest.raises(IndexError, match=f"{ROWS} rows"):
        speedtorch.synchronize(SECOND)


@pytest.mark.parametrize("ahead", [False, True], ids=["at-once", "prefetch"])
def test_an_embedding_trains_there(ahead: bool) -> None:
    results: list[dict[str, Tensor]] = []
    for device in ("cuda:0", "cuda:1"):
        torch.manual_seed(0)
        embedding = speedtorch.Embedding(ROWS, WIDTH, device=device)
        adam = optim.Adam(embedding.parameters(), lr=0.1)
        speedtorch.attach(adam, embedding)
        given = [torch.randint(ROWS, (20_000 if i % 2 else 100,)).to(device) for i in range(20)]
        loader = speedtorch.prefetch(given, embedding, ids=lambda b: b) if ahead else given
        for ids in loader:
            adam.zero_grad()
            embedding(ids).square().sum().backward()
            adam.step()
            assert torch.cuda.current_device() == 0
        saved = {"weight": embedding.state_dict()["weight"], **adam.state_dict()["state"][0]}
        results.append({name: value.clone() for name, value in saved.items()})
    for name, value in results[0].items():
        assert_same_bytes(results[1][name], value)
