"""prefetch gives the numbers that the loop without it gives, whatever the loop does."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from embedding_reference import random_ids
from reference import assert_same_bytes
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.step.exchange import Coming

ROWS, WIDTH = 30, 4
pytestmark = pytest.mark.usefixtures("deterministic")


class Training:
    """An embedding with Adam, and a loop over batches of ids with or without prefetch."""

    def __init__(self, device: str, *, ahead: bool, **settings: Any) -> None:
        torch.manual_seed(0)
        self.embedding = speedtorch.Embedding(ROWS, WIDTH, device=device, **settings)
        self.adam = optim.Adam(self.embedding.parameters(), lr=0.1)
        speedtorch.attach(self.adam, self.embedding)
        self.device = device
        self.ahead = ahead

    def loop(self, batches: Iterable[Any], ids: Callable[[Any], Any] = lambda b: b) -> Any:
        if not self.ahead:
            return iter(batches)
        return iter(speedtorch.prefetch(batches, self.embedding, ids=ids))

    def learn(self, *parts: Tensor, step: bool = True) -> None:
        loss = sum(
            ((number + 1) * self.embedding(part).square().sum())
            for number, part in enumerate(parts)
        )
        loss.backward()
        if step:
            self.adam.step()
            self.adam.zero_grad()

    def result(self) -> dict[str, Tensor]:
        self.embedding.flush()
        table = self.embedding.table
        return {name: table[name].clone() for name in table.fields}


def assert_same_with_and_without(
    device: str, train: Callable[[Training], None], **settings: Any
) -> None:
    results = []
    for ahead in (False, True):
        training = Training(device, ahead=ahead, **settings)
        train(training)
        results.append(training.result())
    for name, rows in results[0].items():
        assert_same_bytes(results[1][name], rows)
    torch.manual_seed(0)
    assert not torch.equal(results[0]["weight"], speedtorch.Embedding(ROWS, WIDTH).table["weight"])


def batches(device: str, count: int = 30, overlap: float = 0.5) -> list[Tensor]:
    return [ids.to(device) for ids in random_ids(ROWS, count, overlap, most=14)]


@pytest.mark.parametrize("overlap", [0, 0.5, 1])
@pytest.mark.parametrize("settings", [{}, {"padding_idx": 3}, {"max_norm": 1.0}], ids=str)
def test_a_plain_loop(device: str, settings: dict[str, Any], overlap: float) -> None:
    def train(training: Training) -> None:
        for ids in training.loop(batches(device, overlap=overlap)):
            training.learn(ids)

    assert_same_with_and_without(device, train, **settings)


def test_several_lookups_in_a_step(device: str) -> None:
    def train(training: Training) -> None:
        pairs = list(zip(batches(device), batches(device, overlap=0), strict=True))
        for u, v in training.loop(pairs, ids=lambda pair: pair):
            if not training.ahead:
                training.embedding.announce(u, v)
            training.learn(u, v, u)

    assert_same_with_and_without(device, train)


def test_tensors_that_are_other_objects(device: str) -> None:
    def train(training: Training) -> None:
        for number, ids in enumerate(training.loop(batches(device))):
            training.learn(ids.clone() if number % 3 else ids.cpu())

    assert_same_with_and_without(device, train)


def test_ids_that_were_not_told(device: str) -> None:
    def train(training: Training) -> None:
        for number, ids in enumerate(training.loop(batches(device))):
            more = torch.tensor([number % ROWS, 7], device=device)
            if not training.ahead:
                training.embedding.announce(ids)
            training.learn(ids, more) if number % 4 == 1 else training.learn(ids)

    assert_same_with_and_without(device, train)


def test_batches_that_are_left_out(device: str) -> None:
    def train(training: Training) -> None:
        for number, ids in enumerate(training.loop(batches(device))):
            if number % 3 != 1:
                training.learn(ids)

    assert_same_with_and_without(device, train)


def test_other_rows_trained_in_between(device: str) -> None:
    def train(training: Training) -> None:
        for number, ids in enumerate(training.loop(batches(device))):
            if number % 3 == 1:
                training.learn(torch.tensor([number % ROWS, 29], device=device))
            training.learn(ids)

    assert_same_with_and_without(device, train)


def test_gradients_that_accumulate_over_batches(device: str) -> None:
    def train(training: Training) -> None:
        for number, ids in enumerate(training.loop(batches(device))):
            training.learn(ids, step=number % 3 == 2)

    assert_same_with_and_without(device, train)


def test_evaluation_saving_and_loading_in_between(device: str) -> None:
    seen: list[Tensor] = []

    def train(training: Training) -> None:
        saved: dict[str, Any] = {}
        for number, ids in enumerate(training.loop(batches(device))):
            training.learn(ids)
            with torch.no_grad():
                seen.append(training.embedding(torch.arange(ROWS)))
            if number == 10:
                state = training.embedding.state_dict()
                saved = {name: value.clone() for name, value in state.items()}
                saved_adam = training.adam.state_dict()
                entries = saved_adam["state"][0]
                copied = {n: v.clone() for n, v in entries.items()}
                saved_adam = {**saved_adam, "state": {0: copied}}
            if number == 20:
                training.embedding.load_state_dict(saved)
                training.adam.load_state_dict(saved_adam)

    assert_same_with_and_without(device, train)
    half = len(seen) // 2
    for without, ahead in zip(seen[:half], seen[half:], strict=True):
        assert_same_bytes(ahead, without)


def test_a_loop_that_is_left_and_begun_again(device: str) -> None:
    def train(training: Training) -> None:
        for stop in (5, 9, 30):
            for number, ids in enumerate(training.loop(batches(device))):
                training.learn(ids)
                if number == stop:
                    break
            with torch.no_grad():
                training.embedding(torch.arange(ROWS, device=device))

    assert_same_with_and_without(device, train)


def test_a_loop_that_is_left_keeps_no_rows_that_arrived_ahead(device: str) -> None:
    def ahead() -> int:
        return sum(type(each) is Coming for each in gc.get_objects())

    before = ahead()
    embedding = speedtorch.Embedding(ROWS, WIDTH, device=device)
    for ids in speedtorch.prefetch(batches(device), embedding, ids=lambda ids: ids):
        embedding(ids).sum().backward()
        assert ahead() == before + 1
        break
    assert ahead() == before


def test_an_optimizer_without_state(device: str) -> None:
    results = []
    for ahead in (False, True):
        torch.manual_seed(0)
        embedding = speedtorch.Embedding(ROWS, WIDTH, device=device)
        sgd = optim.SGD(embedding.parameters(), lr=0.1)
        loader: Iterable[Tensor] = batches(device)
        if ahead:
            loader = speedtorch.prefetch(loader, embedding, ids=lambda ids: ids)
        for ids in loader:
            sgd.zero_grad()
            embedding(ids).square().sum().backward()
            sgd.step()
        results.append(embedding.state_dict()["weight"].clone())
    assert_same_bytes(results[1], results[0])


def test_several_tables(device: str) -> None:
    def train(*, ahead: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        user = speedtorch.Embedding(ROWS, WIDTH, device=device)
        item = speedtorch.EmbeddingBag(ROWS, WIDTH, device=device, mode="sum")
        model = nn.ModuleList([user, item])
        adam = optim.Adam(model.parameters(), lr=0.1)
        speedtorch.attach(adam, model)
        pairs = [(ids, ids.flip(0)[None]) for ids in batches(device)]
        loader: Iterable[Any] = pairs
        if ahead:
            loader = speedtorch.prefetch(pairs, model, ids=lambda b: {user: b[0], item: [b[1]]})
            assert len(loader) == len(pairs)
        for users, items in loader:
            adam.zero_grad()
            (user(users).sum(0) * item(items)).sum().backward()
            adam.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    expected = train(ahead=False)
    for name, value in train(ahead=True).items():
        assert_same_bytes(value, expected[name])


def test_it_reads_two_batches_ahead_and_plans_each_once() -> None:
    training = Training("cpu", ahead=True)
    taken: list[int] = []

    def loader() -> Iterator[Tensor]:
        for number in range(6):
            taken.append(number)
            yield torch.tensor([number, number + 1])

    for number, ids in enumerate(
        speedtorch.prefetch(loader(), training.embedding, ids=lambda b: b)
    ):
        assert len(taken) == min(6, number + 3)
        training.learn(ids)


def test_wrong_use_is_an_error() -> None:
    training = Training("cpu", ahead=True)
    embedding = training.embedding
    with pytest.raises(ValueError, match="Linear has no speedtorch.Embedding"):
        speedtorch.prefetch([], nn.Linear(1, 1), ids=lambda b: b)
    first = training.loop(batches("cpu"))
    next(first)
    with pytest.raises(RuntimeError, match="Embedding: its rows are prefetched by another loop"):
        next(training.loop(batches("cpu")))
    first.close()
    next(training.loop(batches("cpu")))
    other = speedtorch.Embedding(3, 2)
    both = nn.ModuleList([embedding, other])
    for ids, error, message in (
        (lambda b: b, ValueError, "the model has 2 Embeddings; return a dict"),
        (
            lambda b: {nn.Embedding(1, 1): b},
            ValueError,
            "ids: Embedding is no speedtorch.Embedding",
        ),
        (
            lambda b: {embedding: [[1, 2]]},
            TypeError,
            "ids: expected an int32 or int64 tensor, got list",
        ),
    ):
        with pytest.raises(error, match=message):
            next(iter(speedtorch.prefetch(batches("cpu"), both, ids=ids)))
    with pytest.raises(TypeError):
        len(speedtorch.prefetch(iter([]), embedding, ids=lambda b: b))


def test_bad_ids_are_an_error_and_training_goes_on(device: str) -> None:
    training = Training(device, ahead=True)
    bad = [torch.tensor([1, 2]), torch.tensor([3, ROWS]), torch.tensor([4])]
    with pytest.raises(IndexError, match="30.*30 rows"):
        for ids in training.loop([ids.to(device) for ids in bad]):
            training.learn(ids)
    before = training.result()
    for ids in training.loop(batches(device)):
        training.learn(ids)
    assert not torch.equal(training.result()["weight"], before["weight"])


@NEEDS_GPU
@pytest.mark.parametrize("ahead", [False, True], ids=["at-once", "prefetch"])
def test_the_host_waits_for_nothing_but_counts(ahead: bool) -> None:
    training = Training("cuda", ahead=ahead)
    given = batches("cuda")
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
