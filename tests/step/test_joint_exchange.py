"""Tables that are prefetched together have one exchange, and the numbers that each has alone."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from embedding_reference import random_ids
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.plan.joint_batch import JointBatch
from speedtorch.plan.planned_batch import PlannedBatch
from speedtorch.step import joint_exchange, row_store

ROWS, WIDTH, TABLES = (30, 7, 50), 4, 3
pytestmark = pytest.mark.usefixtures("deterministic")


class Training:
    """Three Embeddings and their optimizer, with or without prefetch."""

    def __init__(self, device: str, *, ahead: bool, optimizer: str = "Adam") -> None:
        torch.manual_seed(0)
        self.device, self.ahead = device, ahead
        self.model = nn.ModuleList(
            speedtorch.Embedding(rows, WIDTH, device=device) for rows in ROWS
        )
        kind: Any = getattr(optim, optimizer)
        self.optimizer = kind(self.model.parameters(), lr=0.1)
        if optimizer != "SGD":
            speedtorch.attach(self.optimizer, self.model)

    def batches(self, count: int = 12) -> list[list[Tensor]]:
        lists = []
        for k, rows in enumerate(ROWS):
            if rows > 9:
                lists.append(random_ids(rows, count, 0.5, most=9, seed=k))
                continue
            random = [torch.Generator().manual_seed(n) for n in range(count)]
            lists.append([torch.randint(rows, (5,), generator=each) for each in random])
        return [[ids.to(self.device) for ids in of_batch] for of_batch in zip(*lists, strict=True)]

    def loop(
        self, batches: Iterable[list[Tensor]], named: Iterable[int] = range(TABLES)
    ) -> Iterator[list[Tensor]]:
        if not self.ahead:
            return iter(batches)

        def ids(batch: list[Tensor]) -> dict[nn.Module, Tensor]:
            return {self.model[k]: batch[k] for k in named}

        return iter(speedtorch.prefetch(batches, self.model, ids=ids))

    def loss(self, batch: list[Tensor], tables: Iterable[int] = range(TABLES)) -> Tensor:
        looked_up = ((k + 1) * self.model[k](batch[k]).square().sum() for k in tables)
        return sum(looked_up)  # type: ignore[return-value]

    def learn(self, batch: list[Tensor], tables: Iterable[int] = range(TABLES)) -> None:
        self.finish(self.loss(batch, tables))

    def finish(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def result(self) -> list[Tensor]:
        found = []
        for module in self.model:
            module.flush()
            found += [module.table[name].clone() for name in module.table.fields]
        return found


Train = Callable[[Training], object]


def plain_loop(training: Training) -> None:
    for batch in training.loop(training.batches()):
        training.learn(batch)


def gradients_zeroed_before(training: Training) -> None:
    for batch in training.loop(training.batches()):
        training.optimizer.zero_grad()
        training.loss(batch).backward()
        training.optimizer.step()


def gradients_zeroed_after_the_lookups(training: Training) -> None:
    for number, batch in enumerate(training.loop(training.batches())):
        loss = training.loss(batch)
        training.optimizer.zero_grad(set_to_none=number % 2 == 0)
        loss.backward()
        training.optimizer.step()


def some_tables_in_some_batches(training: Training) -> None:
    for number, batch in enumerate(training.loop(training.batches())):
        training.learn(batch, [k for k in range(TABLES) if (number + k) % 3])


def one_table_never(training: Training) -> None:
    for batch in training.loop(training.batches()):
        training.learn(batch, [2, 0])


def gradients_accumulate_over_batches(training: Training) -> None:
    for number, batch in enumerate(training.loop(training.batches())):
        training.loss(batch).backward()
        if number % 3 == 2:
            training.optimizer.step()
            training.optimizer.zero_grad()


def gradients_of_one_accumulate(training: Training) -> None:
    own = optim.SGD([training.model[1].weight], lr=0.5)
    for number, batch in enumerate(training.loop(training.batches())):
        training.loss(batch).backward()
        if number % 2:
            own.step()
            own.zero_grad()
        for k in (0, 2):
            weight = training.model[k].weight
            optim.SGD([weight], lr=0.1).step()
            weight.grad = None


def evaluated_in_between(training: Training) -> None:
    for number, batch in enumerate(training.loop(training.batches())):
        training.learn(batch)
        if number % 3 != 2:
            with torch.no_grad() if number % 3 else torch.inference_mode():
                training.model[number % TABLES](batch[number % TABLES])
        if number % 4 == 2:
            training.model.state_dict()


def evaluated_between_the_lookups(training: Training) -> None:
    for number, batch in enumerate(training.loop(training.batches())):
        first = training.loss(batch, [0])
        with torch.no_grad():
            training.model[2](batch[2])
            if number % 2:
                training.model[1].weight.mul_(0.5)
        training.finish(first + training.loss(batch, [1, 2]))


def other_ids_than_named(training: Training) -> None:
    for number, batch in enumerate(training.loop(training.batches())):
        if number % 2:
            batch = [batch[0], (batch[1] + 1) % ROWS[1], batch[2][:-2]]
        training.learn(batch)


def equal_ids_of_other_tensors(training: Training) -> None:
    for batch in training.loop(training.batches()):
        training.learn([ids.clone() for ids in batch])


def several_steps_of_a_batch(training: Training) -> None:
    for batch in training.loop(training.batches()):
        training.learn(batch)
        training.learn(batch, [1])
        training.learn(batch, [2, 1])


def lookups_of_more_rows(training: Training) -> None:
    for batch in training.loop(training.batches()):
        loss = training.loss(batch)
        more = training.model[2](torch.tensor([1, 2, 3])).sum()
        training.finish(loss + more)


def announced_within_the_loop(training: Training) -> None:
    for batch in training.loop(training.batches()):
        again = batch[0][:1]
        for module, ids in zip(training.model, batch, strict=True):
            module.announce(ids, *([again] if module is training.model[0] else []))
        training.finish(training.loss(batch) + training.model[0](again).sum())


def steps_before_the_loop(training: Training) -> None:
    first, *others = training.batches()
    training.learn(first)
    for batch in training.loop(others):
        training.learn(batch)


def left_and_begun_again(training: Training) -> None:
    for number, batch in enumerate(loop := training.loop(training.batches())):
        training.learn(batch)
        if number == 4:
            break
    getattr(loop, "close", gc.collect)()
    training.learn(training.batches()[7])
    plain_loop(training)


def batches_that_leave_out_a_table(training: Training) -> None:
    def ids(batch: tuple[int, list[Tensor]]) -> dict[nn.Module, Tensor]:
        number, of_tables = batch
        return {
            module: each
            for k, (module, each) in enumerate(zip(training.model, of_tables, strict=True))
            if k != 1 or number % 4 != 2
        }

    numbered: Any = list(enumerate(training.batches()))
    loop = speedtorch.prefetch(numbered, training.model, ids=ids) if training.ahead else numbered
    for number, batch in loop:
        training.learn(batch, [0, 2] if number % 4 == 2 else range(TABLES))


def trained_no_more(training: Training) -> None:
    for number, batch in enumerate(training.loop(training.batches())):
        training.model[1].weight.requires_grad_(number % 5 < 2)
        training.learn(batch)


def drawn_anew_within(training: Training) -> None:
    for number, batch in enumerate(training.loop(training.batches())):
        training.learn(batch)
        if number == 3:
            training.model[1].init_(nn.init.constant_, 0.25)
        if number == 6:
            training.model[0].load_state_dict({"weight": torch.ones(ROWS[0], WIDTH)})


def gradients_left_are_stepped_again(training: Training) -> None:
    for number, batch in enumerate(training.loop(training.batches())):
        loss = training.loss(batch, [0])
        if number % 3:
            training.optimizer.step()
        loss = loss + training.loss(batch, [1, 2] if number % 2 else [2])
        if number % 4 == 1:
            training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
    training.optimizer.step()


def gradients_are_read_and_set(training: Training) -> None:
    for number, batch in enumerate(training.loop(training.batches())):
        loss = training.loss(batch, [0])
        weights = [module.weight for module in training.model]
        if number % 3 == 1:
            nn.utils.clip_grad_norm_(weights, 0.5)
        if number % 3 == 2:
            for weight in weights:
                weight.grad = None
        (loss + training.loss(batch, [1] if number % 2 else [1, 2])).backward()
        assert all(weight.grad is not None for weight in weights[:2])
        training.optimizer.step()


def another_module_takes_a_table_over(training: Training) -> None:
    other: Any = None
    for number, batch in enumerate(training.loop(training.batches())):
        if number < 4:
            training.learn(batch)
            continue
        if other is None:
            table = training.model[1].table
            other = speedtorch.Embedding.from_pretrained(
                table, freeze=False, device=training.device
            )
            sgd = optim.SGD(other.parameters(), lr=0.3)
        (training.loss(batch, [0, 2]) + other(batch[1]).square().sum()).backward()
        two = [training.model[k].weight for k in (0, 2)]
        optim.SGD([*two], lr=0.2).step()
        sgd.step()
        other.zero_grad()
        training.model.zero_grad()
    training.model[1] = other


def rows_of_an_idle_table_are_written_to(training: Training) -> None:
    training.model[1].flush()
    rows = training.model[1].table["weight"]
    for number, batch in enumerate(training.loop(training.batches())):
        training.learn(batch, [0, 2])
        rows.mul_(2 + number)


BY_SEVERAL_OPTIMIZERS = [gradients_of_one_accumulate, another_module_takes_a_table_over]
WAYS: list[Train] = [
    plain_loop,
    gradients_zeroed_before,
    gradients_zeroed_after_the_lookups,
    some_tables_in_some_batches,
    one_table_never,
    gradients_accumulate_over_batches,
    evaluated_in_between,
    evaluated_between_the_lookups,
    other_ids_than_named,
    equal_ids_of_other_tensors,
    several_steps_of_a_batch,
    lookups_of_more_rows,
    announced_within_the_loop,
    steps_before_the_loop,
    left_and_begun_again,
    batches_that_leave_out_a_table,
    trained_no_more,
    drawn_anew_within,
    gradients_left_are_stepped_again,
    gradients_are_read_and_set,
    rows_of_an_idle_table_are_written_to,
]


def results(train: Train, device: str, optimizer: str = "Adam") -> list[list[Tensor]]:
    """The tables after a loop without prefetch and with it."""
    both = [Training(device, ahead=ahead, optimizer=optimizer) for ahead in (False, True)]
    for training in both:
        train(training)
    return [training.result() for training in both]


@pytest.mark.dealt("optimizer")
@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
@pytest.mark.parametrize("train", [*WAYS, *BY_SEVERAL_OPTIMIZERS], ids=lambda way: way.__name__)
def test_the_numbers_are_those_of_a_loop_without(device: str, train: Train, optimizer: str) -> None:
    if train in BY_SEVERAL_OPTIMIZERS:
        optimizer = "SGD"
    plain, ahead = results(train, device, optimizer)
    assert all(map(torch.equal, plain, ahead))
    assert not torch.equal(Training(device, ahead=False, optimizer=optimizer).result()[0], plain[0])


@pytest.fixture
def swaps(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts exchanges, of several tables and of one."""
    counts, exchange_rows = Counter[str](), row_store.exchange_rows

    def counted(name: str) -> Callable[..., None]:
        def exchange(*arguments: Any) -> None:
            counts[name] += 1
            exchange_rows(*arguments)

        return exchange

    monkeypatch.setattr(joint_exchange, "exchange_rows", counted("joint"))
    monkeypatch.setattr(row_store, "exchange_rows", counted("alone"))
    return counts


@pytest.mark.parametrize("train", [plain_loop, gradients_zeroed_after_the_lookups])
def test_a_step_has_one_exchange_for_all_tables(
    device: str, train: Train, swaps: Counter[str]
) -> None:
    training = Training(device, ahead=True)
    train(training)
    assert swaps == {"joint": len(training.batches()) + 1}  # one to begin with


def test_after_a_table_went_on_by_itself_they_are_joined_again(
    device: str, swaps: Counter[str]
) -> None:
    training = Training(device, ahead=True)
    loop = training.loop(training.batches())
    training.learn(next(loop))
    training.model[1].flush()
    alone = swaps["alone"]
    for batch in loop:
        before = swaps["joint"]
        training.learn(batch)
        assert swaps["joint"] > before
    assert alone > 0 and swaps["alone"] - alone <= TABLES


def test_tables_of_other_layouts_padding_or_capacity_are_not_joined(device: str) -> None:
    made = [
        speedtorch.Embedding(9, 4, device=device),
        speedtorch.Embedding(9, 3, device=device),
        speedtorch.Embedding(9, 4, device=device, dtype=torch.float64),
        speedtorch.Embedding(9, 4, device=device, padding_idx=0),
        speedtorch.Embedding(9, 4, device=device, capacity=5),
        speedtorch.Embedding.from_pretrained(torch.ones(9, 4), device=device),
    ]
    model = nn.ModuleList(made)
    exchanges = {module: module.trained_rows.exchange for module in made}
    assert joint_exchange.join_exchanges(exchanges) == []
    twin = speedtorch.Embedding(5, 4, device=device)
    ((modules, _),) = joint_exchange.join_exchanges({**exchanges, twin: twin.trained_rows.exchange})
    assert modules == [made[0], twin] and model is not None


def test_a_table_may_be_read_where_its_default_device_is_another(device: str) -> None:
    training = Training(device, ahead=True)
    batches = training.batches(3)
    with torch.device("meta"):
        for batch in training.loop(batches):
            training.learn([ids[:2] for ids in batch])
    plain_loop(Training(device, ahead=True))


def test_changes_of_one_tables_rows_are_none_of_anothers(device: str) -> None:
    """A step or a renorm of one leaves what autograd has saved of the other."""
    for ahead in (False, True):
        torch.manual_seed(0)
        bags = speedtorch.EmbeddingBag(20, 4, mode="sum", device=device)
        users = speedtorch.Embedding(20, 4, max_norm=0.5, device=device)
        model, factors = nn.ModuleList([bags, users]), torch.ones(2, 3, device=device)
        optimizers = [optim.SGD(module.parameters(), lr=0.1) for module in model]
        loader: Any = [torch.tensor([[1, 2, 3], [n, 5, 6]], device=device) for n in range(5)]
        if ahead:
            loader = speedtorch.prefetch(loader, model, ids=partial(dict.fromkeys, model))
        for batch in loader:
            pooled = bags(batch, per_sample_weights=factors.requires_grad_())
            users(batch).sum().backward()
            optimizers[1].step()
            pooled.square().sum().backward()
            optimizers[0].step()
            model.zero_grad()


def test_bad_ids_are_an_error_of_their_own_table(device: str) -> None:
    training = Training(device, ahead=True)
    batches = training.batches(5)
    batches[3][1][2] = ROWS[1]
    seen = 0
    with pytest.raises(IndexError, match="Embedding: id 7 at position 2 .* 7 rows"):
        for batch in training.loop(batches):
            training.learn(batch)
            seen += 1
    assert seen == 3
    plain_loop(training)


def test_a_closed_table_is_an_error_of_its_own_lookups(device: str) -> None:
    results = []
    for ahead in (False, True):
        training = Training(device, ahead=ahead, optimizer="SGD")
        others = optim.SGD([module.weight for module in training.model[:2]], lr=0.1)
        for number, batch in enumerate(training.loop(training.batches())):
            if number < 3:
                training.learn(batch)
                continue
            if number == 3:
                training.model[2].table.close()
            with pytest.raises(ValueError, match="closed"):
                training.loss(batch, [2])
            training.loss(batch, [0, 1]).backward()
            others.step()
            others.zero_grad()
        results.append([module.table["weight"].clone() for module in training.model[:2]])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_nothing_is_kept_of_batches_that_are_through(device: str) -> None:
    training = Training(device, ahead=True)

    def all_planned() -> set[int]:
        return {id(each) for each in gc.get_objects() if type(each) is JointBatch}

    gc.collect()
    before = all_planned()
    gc.disable()  # which does not see the memory of a GPU
    try:
        for looked_up in (range(TABLES), [1], []):
            for batch in training.loop(training.batches()):
                if looked_up:
                    training.learn(batch, looked_up)
                assert len(all_planned() - before) <= 5
    finally:
        gc.enable()


@pytest.mark.parametrize("named", [range(TABLES), [0]], ids=["joint", "alone"])
def test_a_loss_that_is_kept_keeps_no_later_batch(device: str, named: Iterable[int]) -> None:
    training = Training(device, ahead=True)

    def planned() -> int:
        gc.collect()
        return sum(type(each) in (JointBatch, PlannedBatch) for each in gc.get_objects())

    before, kept = planned(), []
    for number, batch in enumerate(training.loop(training.batches(30), named)):
        kept = kept or [training.loss(batch, named)]
        training.learn(batch, named)
        assert number < 4 or planned() <= before + 20
    assert len(kept) == 1
