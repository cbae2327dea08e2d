"""prefetch: how far it reads ahead, and what it keeps; tests/loops.py has loops."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import pytest
import torch
from conftest import NEEDS_GPU
from loops import ROWS, WAYS, WIDTH, Training
from reference import assert_same_bytes
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.step.step import Prefetched

pytestmark = pytest.mark.usefixtures("deterministic")


def test_a_loop_that_is_left_keeps_no_rows_that_arrived_ahead(device: str) -> None:
    def ahead() -> int:
        return sum(type(each) is Prefetched for each in gc.get_objects())

    training, before = Training(WAYS["prefetch"], device=device), ahead()
    for ids in training.loop(training.batches()):
        training.loss(ids).backward()
        assert ahead() == before + 1
        break
    assert ahead() == before


@pytest.mark.parametrize("capacity", [None, 2])
def test_rows_that_went_from_one_step_to_a_batch_ahead_are_not_lost(
    capacity: int | None, device: str
) -> None:
    embedding = speedtorch.Embedding(10, 2, device=device, capacity=capacity)
    embedding.init_(torch.nn.init.zeros_)
    sgd = torch.optim.SGD(embedding.parameters(), lr=1.0)
    batches = [torch.tensor([row], device=device) for row in (1, 2, 1, 3)]
    loop = iter(speedtorch.prefetch(batches, embedding, ids=lambda ids: ids))
    for _ in range(2):  # with the second, row 1 leaves the first step and arrives for the third
        embedding(next(loop)).sum().backward()
        sgd.step()
        sgd.zero_grad()
    del loop
    assert embedding.state_dict()["weight"][:4, 0].tolist() == [0, -1, -1, 0]


def test_it_reads_two_batches_ahead_and_plans_every_batch_once() -> None:
    training = Training(WAYS["prefetch"])
    taken: list[int] = []

    def loader() -> Iterator[Tensor]:
        for number in range(6):
            taken.append(number)
            yield torch.tensor([number, number + 1])

    for number, ids in enumerate(speedtorch.prefetch(loader(), training.emb, ids=lambda b: b)):
        assert len(taken) == min(6, number + 3)
        training.learn(ids)


@NEEDS_GPU
@pytest.mark.parametrize("way", ["plain", "prefetch", "capacity", "capacity-prefetch"])
def test_the_host_waits_for_nothing_but_counts(way: str) -> None:
    training = Training(WAYS[way], device="cuda")
    given = training.batches()
    for ids in training.loop(given[:4]):
        training.learn(ids)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ids in training.loop(given):
            training.learn(ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sums_in_our_own_order_are_close_to_those_of_torch_and_always_alike(
    dtype: torch.dtype,
) -> None:
    torch.use_deterministic_algorithms(False)
    results = []
    for ahead in (False, True, True):
        torch.manual_seed(0)
        theirs = nn.Embedding(ROWS, WIDTH, device="cuda", dtype=dtype)
        ours = speedtorch.Embedding.from_module(theirs)
        many = [torch.randint(ROWS, (700,), device="cuda") for _ in range(6)]
        for module in (theirs, ours):
            sgd = optim.SGD(module.parameters(), lr=1e-3)
            loader: Iterable[Tensor] = many
            if ahead and module is ours:
                loader = speedtorch.prefetch(many, ours, ids=lambda ids: ids)
            for ids in loader:
                sgd.zero_grad()
                module(ids).square().sum().backward()
                sgd.step()
        results.append(ours.state_dict()["weight"].clone())
        torch.testing.assert_close(results[-1], theirs.weight.detach().cpu(), rtol=3e-2, atol=1e-2)
    assert_same_bytes(results[1], results[0])
    assert_same_bytes(results[2], results[0])


@pytest.mark.parametrize("capacity", [None, 8])
@pytest.mark.parametrize("tables", [1, 2])
def test_batches_that_are_taken_in_inference_mode_are_trained(
    device: str, tables: int, capacity: int | None
) -> None:
    results = []
    for mode in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleList(
            speedtorch.Embedding(50, 3, capacity=capacity, device=device) for _ in range(tables)
        )
        optimizer = optim.Adam(model.parameters())
        speedtorch.attach(optimizer, model)
        batches = [[torch.randint(50, (4,)) for _ in model] for _ in range(6)]
        loop = iter(
            speedtorch.prefetch(
                batches, model, ids=lambda batch, model=model: dict(zip(model, batch, strict=True))
            )
        )
        for _ in batches:
            with torch.inference_mode(mode):
                batch = next(loop)
            optimizer.zero_grad()
            sum(each(ids).sum() for each, ids in zip(model, batch, strict=True)).backward()
            optimizer.step()
        assert next(loop, None) is None
        results.append([each.table["weight"].clone() for each in model])
    assert all(map(torch.equal, *results))


def test_its_repr_names_the_loader_and_three_modules() -> None:
    model = nn.ModuleList(speedtorch.Embedding(rows, 2) for rows in (5, 6))
    text = repr(speedtorch.prefetch([], model, ids=lambda batch: batch))
    places = ", device=cpu, memory=auto)"
    assert text == f"Prefetch(list; Embedding(5, 2{places}, Embedding(6, 2{places})"
    five = nn.ModuleList(speedtorch.Embedding(5, 2) for _ in range(5))
    text = repr(speedtorch.prefetch([], five, ids=lambda batch: batch))
    assert text.count("Embedding(") == 3 and text.endswith(", 2 more)")
