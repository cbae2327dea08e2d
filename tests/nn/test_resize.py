"""resize: a table gets more rows, with their optimizer state, between two steps."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupts import EVERY, every_interrupt, source_files
from reference import assert_same_content
from small_training import COLLECTIONS, KINDS
from torch import Tensor, nn

import speedtorch
from speedtorch.optim import RowWiseAdagrad
from speedtorch.step.capturing_graphs import CapturingGraphs

OLD, NEW, DIM = 6, 11, 4
BEFORE, AFTER = [[1, 2, 2], [5, 2]], [[2, 9], [10, 0, 6, 9], [5, 10]]
NEW_ROWS = torch.arange((NEW - OLD) * DIM).reshape(-1, DIM) / 7

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "RowWiseAdagrad": lambda p: RowWiseAdagrad(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cache": {"cache": "1KiB"},
    "capacity": {"capacity": 5},
    "16 bits": {"stored": torch.bfloat16},
    "padding": {"padding_idx": -4},
    "sparse": {"sparse": True},
    "max_norm": {"max_norm": 1.5},
}


def train(
    module: nn.Module, optimizer: torch.optim.Optimizer, batches: list[list[int]]
) -> list[Tensor]:
    """The results of steps."""
    found = []
    for ids in batches:
        optimizer.zero_grad()
        out = module(torch.tensor(ids))
        out.square().sum().backward()
        optimizer.step()
        found.append(out.detach())
    return found


def rows_at_first() -> Tensor:
    return torch.randn(OLD, DIM, generator=torch.Generator().manual_seed(3))


def attached(
    rows: Tensor, name: str, settings: dict[str, Any]
) -> tuple[speedtorch.Embedding, torch.optim.Optimizer]:
    torch.manual_seed(5)  # of the rounding
    settings = dict(settings)
    if "padding_idx" in settings:
        settings["padding_idx"] %= OLD
    embedding = speedtorch.Embedding(*rows.shape, _weight=rows, **settings)
    optimizer = OPTIMIZERS[name](embedding.parameters())
    speedtorch.attach(optimizer, embedding)
    return embedding, optimizer


def everything(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"].get(0, {})
    found = {f"state {k}": torch.as_tensor(v).clone() for k, v in state.items()}
    return found | {k: v.clone() for k, v in module.state_dict().items()}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_on_as_a_table_that_had_the_new_rows_from_the_start(
    name: str, settings: dict[str, Any]
) -> None:
    if settings.get("sparse") and name not in ("Adagrad", "RowWiseAdagrad"):
        pytest.skip("takes no sparse gradients")
    if "stored" in settings and name == "RowWiseAdagrad":
        settings = {"stored": {"weight": torch.bfloat16}}
    embedding, optimizer = attached(rows_at_first(), name, settings)
    larger, reference = attached(torch.cat([rows_at_first(), NEW_ROWS]), name, settings)
    weight, groups = embedding.weight, optimizer.param_groups
    train(embedding, optimizer, BEFORE)
    assert embedding.resize(NEW, rows=NEW_ROWS) is embedding
    train(larger, reference, BEFORE)
    assert_same_content(everything(embedding, optimizer), everything(larger, reference))
    assert_same_content(train(embedding, optimizer, AFTER), train(larger, reference, AFTER))
    assert_same_content(everything(embedding, optimizer), everything(larger, reference))
    assert embedding.weight is weight is groups[0]["params"][0]
    assert (embedding.num_embeddings, weight.shape) == (NEW, (NEW, DIM))
    assert embedding.table.rows == NEW
    assert repr(embedding) == repr(larger)


def test_it_trains_on_as_torch_does_with_rows_and_state_that_are_copied() -> None:
    embedding = speedtorch.Embedding(OLD, DIM, _weight=rows_at_first())
    optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
    speedtorch.attach(optimizer, embedding)
    plain = nn.Embedding(NEW, DIM, sparse=True, _weight=torch.cat([rows_at_first(), NEW_ROWS]))
    reference = torch.optim.SparseAdam(plain.parameters(), lr=0.1)
    train(embedding, optimizer, BEFORE)
    train(plain, reference, BEFORE)
    embedding.resize(NEW, rows=NEW_ROWS)
    train(embedding, optimizer, AFTER)
    train(plain, reference, AFTER)
    assert_same_content(everything(embedding, optimizer), everything(plain, reference))


def test_new_rows_are_drawn_where_none_are_given() -> None:
    embedding = speedtorch.Embedding(OLD, 200, padding_idx=2)
    before = embedding.state_dict()["weight"].clone()
    embedding.resize(60)
    after = embedding.state_dict()["weight"]
    assert torch.equal(after[:OLD], before)
    assert abs(float(after[OLD:].std()) - 1) < 0.05
    assert embedding.padding_idx == 2


class Resized:
    """A module of some kind with one table, and a capacity of 8."""

    def __init__(self, name: str, rows: int) -> None:
        kind, self.is_plain = getattr(speedtorch, name), "Collection" not in name
        self.is_pooled = "Bag" in name
        if self.is_plain:
            self.module = kind(rows, DIM, capacity=8)
        else:
            config = getattr(speedtorch, name.replace("Collection", "Config"))
            self.module = kind([config(rows, DIM, "t", feature_names=["f"])], capacity=8)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1)

    @property
    def rows(self) -> Any:
        return self.module if self.is_plain else self.module.group_of("t")

    def resize(self, rows: int) -> None:
        self.module.resize(*(() if self.is_plain else ("t",)), rows)

    def step(self, ids: list[int]) -> None:
        features = torch.tensor(ids)[:, None]
        if self.is_plain:
            found = self.module(features)
        else:
            found = self.module({"f": features})["f"]
            found = found if self.is_pooled else found.values()
        found.sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("name", KINDS)
def test_the_capacity_grows_to_what_was_requested(name: str) -> None:
    made = Resized(name, 1)
    made.step([0])
    assert made.rows.capacity == 1
    for rows, capacity in ((5, 5), (100, 8)):
        made.resize(rows)
        assert made.rows.capacity == capacity
        before, ids = made.rows.table["weight"].clone(), [*range(rows - capacity, rows)]
        made.step(ids)
        after = made.rows.table["weight"]
        assert torch.equal(after[ids], before[ids] - 1)
        assert torch.equal(after[: rows - capacity], before[: rows - capacity])
    with pytest.raises(RuntimeError, match="has 9 unique rows, but capacity=8"):
        made.step([*range(9)])


def test_a_table_without_rows_gets_its_capacity_with_its_first_ones() -> None:
    embedding, optimizer = attached(torch.zeros(0, DIM), "Adam", {"capacity": 4})
    assert embedding.capacity == 1  # positions of invalid ids need a row
    assert embedding.resize(3, rows=NEW_ROWS[:3]).capacity == 3
    assert torch.equal(embedding(torch.arange(3)), NEW_ROWS[:3])
    assert embedding.resize(9).capacity == 4
    train(embedding, optimizer, [[8, 1, 5, 3]])
    assert embedding.step_ids.tolist() == [1, 3, 5, 8]


def test_a_resize_that_fails_keeps_the_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding, optimizer = attached(rows_at_first(), "Adam", {"capacity": 8})
    follow, failing = speedtorch.nn.row_module.TrainedRows.insert, []

    def insert(self: Any, first: int, count: int, fill: Any, followed: Any) -> None:
        def late() -> None:
            followed()
            failing.append(embedding.capacity)
            if len(failing) == 1:
                raise KeyError("late")

        follow(self, first, count, fill, late)

    monkeypatch.setattr(speedtorch.nn.row_module.TrainedRows, "insert", insert)
    with pytest.raises(KeyError, match="late"):
        embedding.resize(NEW)
    assert failing == [8, OLD]
    train(embedding, optimizer, [[*range(OLD)]])


def test_a_cuda_graph_that_is_left_refuses_a_larger_capacity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    embedding, optimizer = attached(rows_at_first(), "Adam", {"capacity": 8})
    train(embedding, optimizer, BEFORE)
    before = everything(embedding, optimizer)
    monkeypatch.setattr(CapturingGraphs, "remain", lambda self, device: True)
    with pytest.raises(RuntimeError, match="resizing its table is not possible while a captured"):
        embedding.resize(NEW)
    assert (embedding.capacity, embedding.num_embeddings) == (OLD, OLD)
    assert_same_content(everything(embedding, optimizer), before)


def test_a_copy_and_a_moved_module_know_the_capacity_that_was_requested() -> None:
    embedding = speedtorch.Embedding(2, DIM, capacity=8)
    assert copy.deepcopy(embedding).resize(20).capacity == 8
    assert embedding.to("cpu").resize(5).capacity == 5
    assert copy.deepcopy(embedding).resize(6).capacity == 6


def test_rows_are_added_again_and_again_before_and_after_attach() -> None:
    embedding = speedtorch.Embedding(OLD, DIM, _weight=rows_at_first())
    embedding.resize(8, rows=NEW_ROWS[:2])
    optimizer = OPTIMIZERS["Adagrad"](embedding.parameters())
    speedtorch.attach(optimizer, embedding)
    embedding.resize(8).resize(9, rows=NEW_ROWS[2:3])
    train(embedding, optimizer, BEFORE)
    embedding.resize(NEW, rows=NEW_ROWS[3:])
    larger, reference = attached(torch.cat([rows_at_first(), NEW_ROWS]), "Adagrad", {})
    train(larger, reference, BEFORE)
    assert_same_content(everything(embedding, optimizer), everything(larger, reference))


@pytest.mark.parametrize("sparse", [False, True])
def test_a_gradient_of_zeros_is_dropped(sparse: bool) -> None:
    embedding = speedtorch.Embedding(OLD, DIM, sparse=sparse)
    sgd = torch.optim.SGD(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([1])).sum().backward()
    sgd.step()
    sgd.zero_grad(set_to_none=False)
    kept = embedding.weight.grad
    embedding.resize(NEW)
    assert embedding.weight.grad is None and kept is not None and len(kept) == OLD
    embedding(torch.tensor([NEW - 1])).sum().backward()
    assert embedding.weight.grad.to_dense().sum(1).tolist() == [0.0] * (NEW - 1) + [DIM]


def test_a_bag_and_a_frozen_table_get_more_rows() -> None:
    bag = speedtorch.EmbeddingBag(OLD, DIM, _weight=rows_at_first(), mode="sum")
    bag.resize(NEW, rows=NEW_ROWS)
    assert torch.equal(bag(torch.tensor([[10, 6]]))[0], NEW_ROWS[4] + NEW_ROWS[0])
    frozen = speedtorch.Embedding.from_pretrained(rows_at_first())
    assert torch.equal(frozen.resize(NEW, rows=NEW_ROWS)(torch.tensor([6]))[0], NEW_ROWS[0])


def test_state_that_was_assigned_is_kept() -> None:
    embedding, optimizer = attached(rows_at_first(), "Adagrad", {})
    optimizer.state[embedding.weight]["sum"] = torch.full((OLD, DIM), 3.0)
    embedding.resize(NEW, rows=NEW_ROWS)
    found = optimizer.state[embedding.weight]["sum"]
    assert found.shape == (NEW, DIM)
    assert found[:OLD].eq(3).all()
    assert found[OLD:].eq(0.5).all()


@pytest.mark.parametrize("name", COLLECTIONS)
def test_a_table_of_a_collection_gets_more_rows(name: str) -> None:
    kind, config = (getattr(speedtorch, f"{name[:-10]}{part}") for part in ("Collection", "Config"))

    def made(users: Tensor) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(1)
        rows = {"user": users, "item": torch.randn(5, DIM), "place": torch.randn(3, 2)}
        tables = [config(*given.shape, table) for table, given in rows.items()]
        collection = kind.from_pretrained(tables, rows, freeze=False)
        optimizer = OPTIMIZERS["Adam"](collection.parameters())
        speedtorch.attach(optimizer, collection)
        return collection, optimizer

    def step(collection: Any, optimizer: torch.optim.Optimizer, users: list[int]) -> None:
        ids = {"user": users, "item": [4, 0], "place": [1, 2]}
        found = collection({key: torch.tensor(value)[:, None] for key, value in ids.items()})
        values = [found[key] if "Bag" in name else found[key].values() for key in ids]
        sum(value.square().sum() for value in values).backward()
        optimizer.step()
        optimizer.zero_grad()

    small, large = made(rows_at_first()), made(torch.cat([rows_at_first(), NEW_ROWS]))
    for training in (small, large):
        step(*training, [5, 2])
    collection, items = small[0], large[0].table_weight("item")
    collection.resize("user", NEW, rows=NEW_ROWS)
    for training in (small, large):
        step(*training, [10, 2])
    for one, other in zip(small, large, strict=True):
        assert_same_content(one.state_dict(), other.state_dict())
    configs = getattr(collection, f"embedding_{'bag_' * ('Bag' in name)}configs")
    assert [config.num_embeddings for config in configs()] == [NEW, 5, 3]
    collection.resize("item", 9)
    bound = (1 / 9) ** 0.5
    assert 0 < float(collection.table_weight("item")[5:].abs().max()) <= bound
    assert torch.equal(collection.table_weight("item")[:5], items)


def in_a_step(embedding: Any) -> None:
    embedding(torch.tensor([1])).sum().backward()
    embedding.resize(NEW)


def before_a_backward(embedding: Any) -> None:
    loss = embedding(torch.tensor([1])).sum()
    embedding.resize(NEW)
    del loss


def in_a_loop(embedding: Any) -> None:
    for _ in speedtorch.prefetch([torch.tensor([1])] * 3, embedding, ids=lambda ids: ids):
        embedding.resize(NEW)


def a_view_from_before(embedding: Any) -> None:
    view = embedding.weight.data
    embedding.resize(NEW)
    view.sum()


def a_table_from_before(embedding: Any) -> None:
    table = embedding.table
    embedding.resize(NEW)
    table.gather(torch.tensor([1]), "weight")


def a_late_backward(embedding: Any) -> None:
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1)
    loss = embedding(torch.tensor([1])).sum()
    embedding(torch.tensor([2])).sum().backward()
    optimizer.step()
    embedding.resize(NEW)
    loss.backward()


class Drawn(speedtorch.Embedding):
    def reset_parameters(self) -> None:
        self.init_(nn.init.ones_)


RAISES: list[tuple[Callable[[Any], object], type[Exception], str]] = [
    (lambda e: e.resize(OLD - 1), ValueError, "6 rows, and resize(5) would drop 1 of them"),
    (lambda e: e.resize(0), ValueError, "num_embeddings: expected 1 or more"),
    (lambda e: e.resize(7.0), TypeError, "num_embeddings: expected an int"),
    (lambda e: e.resize(NEW, rows=NEW_ROWS[1:]), ValueError, "rows: expected the shape (5, 4)"),
    (lambda e: e.resize(NEW, rows=[1.0]), TypeError, "rows: expected a tensor"),
    (in_a_step, RuntimeError, "Call optimizer.step() first, or call zero_grad()"),
    (before_a_backward, RuntimeError, "Call optimizer.step() first, or call zero_grad()"),
    (in_a_loop, RuntimeError, "resize() was called within a prefetch() loop over this table"),
    (a_view_from_before, RuntimeError, "is older than resize(). Read it"),
    (a_table_from_before, ValueError, "this table is closed"),
    (a_late_backward, RuntimeError, "backward through a lookup of an earlier step"),
]


@pytest.mark.parametrize(("call", "error", "message"), RAISES)
def test_what_cannot_be_exact_raises(
    call: Callable[[Any], object], error: type[Exception], message: str
) -> None:
    embedding = speedtorch.Embedding(OLD, DIM, _weight=rows_at_first())
    with pytest.raises(error, match=re.escape(message)):
        call(embedding)


@pytest.mark.parametrize("memory", ["plain", "shared"])
def test_a_table_that_was_given_is_not_resized(memory: Any) -> None:
    table = speedtorch.HostTable(OLD, DIM, memory=memory)
    embedding = speedtorch.Embedding.from_pretrained(table)
    with pytest.raises(NotImplementedError, match="make a larger table"):
        embedding.resize(NEW)
    assert embedding.num_embeddings == OLD


def test_own_first_values_and_state_of_a_file_raise(tmp_path: Any) -> None:
    with pytest.raises(NotImplementedError, match="Pass the new rows as rows="):
        Drawn(OLD, DIM).resize(NEW)
    assert Drawn(OLD, DIM).resize(NEW, rows=NEW_ROWS).num_embeddings == NEW
    speedtorch.HostTable(OLD, DIM, state=["sum"]).save(path := tmp_path / "t.safetensors")
    opened = speedtorch.Embedding.from_pretrained(path, freeze=False)
    with pytest.raises(RuntimeError, match=r"attach\(\) with an optimizer that has"):
        opened.resize(NEW)
    optimizer = OPTIMIZERS["Adagrad"](opened.parameters())
    speedtorch.attach(optimizer, opened)
    opened.resize(NEW)
    assert opened.table["sum"].eq(torch.tensor([0.0] * OLD + [0.5] * 5)[:, None]).all()


def test_a_group_names_the_method_of_its_collection() -> None:
    collection = speedtorch.EmbeddingCollection([speedtorch.EmbeddingConfig(3, 2, "user")])
    with pytest.raises(NotImplementedError, match=r"collection\.resize\('user', n\)"):
        collection.embeddings["user"].resize(5)
    with pytest.raises(KeyError, match="not one of the tables"):
        collection.resize("item", 5)


@EVERY
@pytest.mark.parametrize("settings", ["plain", "cache", "capacity", "16 bits"])
def test_an_exception_does_not_change_the_table(every: int, settings: str) -> None:
    def prepare() -> tuple[speedtorch.Embedding, torch.optim.Optimizer]:
        made = attached(rows_at_first(), "Adam", SETTINGS[settings])
        train(*made, BEFORE)
        return made

    def grow(made: tuple[speedtorch.Embedding, torch.optim.Optimizer]) -> None:
        made[0].resize(NEW, rows=NEW_ROWS)

    whole = prepare()
    before = everything(*whole)
    grow(whole)
    train(*whole, [[1, 5]])
    files = source_files("nn/*.py", "step/*.py", "table/*.py", "optim/*.py")
    for (embedding, optimizer), _ in every_interrupt(prepare, grow, files=files, every=every):
        if embedding.num_embeddings == OLD:
            assert_same_content(everything(embedding, optimizer), before)
            grow((embedding, optimizer))
        train(embedding, optimizer, [[1, 5]])
        assert_same_content(everything(embedding, optimizer), everything(*whole))


def test_the_next_incremental_checkpoint_has_all_rows(tmp_path: Any) -> None:
    embedding, optimizer = attached(rows_at_first(), "Adam", {})

    def save(base: int | None = None) -> None:
        speedtorch.save(tmp_path, model=embedding, optimizer=optimizer, base=base)

    save()
    train(embedding, optimizer, BEFORE)
    save(1)
    embedding.resize(NEW, rows=NEW_ROWS)
    save(2)
    train(embedding, optimizer, AFTER)
    save(3)
    loaded, resumed = attached(torch.zeros(NEW, DIM), "Adam", {})
    speedtorch.load(tmp_path, model=loaded, optimizer=resumed)
    assert_same_content(everything(loaded, resumed), everything(embedding, optimizer))
