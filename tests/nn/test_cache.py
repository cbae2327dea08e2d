"""A cache of hot rows: its bytes, its report, and where rows are; test_loops.py trains with it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optimizer_cases import CASES
from reference import assert_same_content
from small_training import SmallTraining
from torch import nn, optim

import speedtorch
from speedtorch.step import hot_rows
from speedtorch.step.cache_budget import even_shares
from speedtorch.step.hot_rows import Refresh, planned_refresh, surely_above


def trained(cache: str | None, *given: Any, **settings: Any) -> SmallTraining:
    return SmallTraining(*given, cache=cache, **settings)


def step(training: SmallTraining) -> None:
    """Steps that change rows; the second one's lookup brings rows of slots back."""
    for row in (1, 2):
        training.step(torch.tensor([row]))


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_optimizer_trains_as_without(case: Any) -> None:
    plain, cached = (trained(cache, case.make) for cache in (None, "600B"))
    assert_same_content(cached.fields(), plain.fields())


@pytest.mark.usefixtures("restless")
def test_rows_take_slots_and_the_report_says_so(device: str) -> None:
    training = trained("600B", device=device)
    training.module.flush()
    report = training.module.report()
    assert report.slots == 600 // (3 * 4 * 4 + 8)
    assert report.rows == 0, "flush() has written them home"
    assert report.rows_moved > report.slots
    assert report.refreshes >= 11
    assert report.nbytes == report.slots * 56
    assert report.map_nbytes == 50 * 8
    assert report.hit_rate is not None
    assert 0 < report.hit_rate <= 1
    assert report.hit_rate_of_half is not None
    assert report.hit_rate_of_double is not None
    assert report.hit_rate_of_half < report.hit_rate_of_double
    for word in ("slots", "half as many", "refreshes moved"):
        assert word in str(report)
    step(training)
    assert training.module.report().rows == report.slots, "they have taken the slots again"


def test_the_rows_of_slots_are_those_that_were_given(device: str) -> None:
    members = torch.tensor([7, 3, 7, 11])
    training = trained("600B", device=device, cache_rows=members)
    assert_same_content(training.fields(), trained(None, device=device).fields())
    step(training)
    report = training.module.report()
    assert (report.rows, report.refreshes) == (3, 0)


@pytest.mark.usefixtures("restless")
def test_a_cache_can_be_given_changed_and_taken_away_between_steps(device: str) -> None:
    training, plain = (SmallTraining(device=device, steps=0) for _ in range(2))
    for number, cache in enumerate(["600B", None, "1KiB", "1MiB"]):
        speedtorch.cache(training.module, cache)
        for each in (training, plain):
            each.train(4, 4 * number)
    assert_same_content(training.fields(), plain.fields())


@pytest.mark.usefixtures("restless", "deterministic")
def test_rows_change_places_between_replays_of_a_graph(device: str) -> None:
    def adam(parameters: Any, lr: float) -> optim.Optimizer:
        return optim.Adam(parameters, lr=lr, capturable=device == "cuda")

    losses, fields = [], []
    for cache in (None, "600B"):
        training = trained(cache, adam, device, steps=0, capacity=20)
        run = training.graphed()
        for number in range(30):
            losses.append(run(training.batch(number)).clone())
            if number == 15:
                training.module.table["weight"][7] = 3
        moved = 0 if cache is None else training.module.report().rows_moved
        del run
        fields.append(training.fields())
    assert moved > 20
    assert_same_content(losses[30:], losses[:30])
    assert_same_content(*fields)


def test_a_table_of_no_rows_needs_no_cache(device: str) -> None:
    empty = speedtorch.Embedding(0, 4, cache="1MiB", device=device)
    model = nn.ModuleList([empty, speedtorch.Embedding(9, 4, device=device)])
    speedtorch.cache(model, "1MiB")
    for module, ids in zip(model, ([], [1, 2]), strict=True):
        module(torch.tensor(ids, dtype=torch.int64)).sum().backward()
    optim.SGD(model.parameters(), lr=0.1).step()
    assert model[1].report().slots == 9
    with pytest.raises(ValueError, match="no rows on this rank, and so no cache"):
        empty.report()


@pytest.mark.usefixtures("restless")
def test_bytes_that_a_collection_is_built_with_hold_state_that_is_attached_later() -> None:
    configs = [speedtorch.EmbeddingBagConfig(count, 4, f"t{count}") for count in (1, 9)]
    tables = speedtorch.EmbeddingBagCollection(tables=configs, cache="1MiB")
    optimizer = optim.Adam(tables.parameters())
    speedtorch.attach(optimizer, tables)
    tables({"t1": torch.tensor([0]), "t9": torch.tensor([8])})
    assert [value.slots for value in tables.report().values()] == [10]


def test_a_collection_and_a_model_share_a_budget_out() -> None:
    configs = [speedtorch.EmbeddingConfig(rows, 4, name) for rows, name in ((3, "a"), (100, "b"))]
    collection = speedtorch.EmbeddingCollection(configs, cache="1KiB")
    model = nn.Sequential(collection, speedtorch.Embedding(2, 4))
    speedtorch.cache(model, "1KiB")
    few, many = model[1].trained_rows, collection.group_of("a").trained_rows
    assert few.exchange.held.store.nbytes == 2 * (16 + 8)
    assert many.exchange.held.store.nbytes == 1024 - 48
    collection({"a": torch.tensor([[1, 2]]), "b": torch.tensor([[5, 99]])})
    assert collection.report()["a"].slots == (1024 - 48) // 24
    speedtorch.cache(model, None)
    with pytest.raises(ValueError, match=r"there is no cache to report. Create one with cache="):
        collection.report()


def slots_of(modules: dict[str, Any]) -> dict[str, int]:
    """The slots of caches after a step of each module."""
    for module in modules.values():
        module(torch.tensor([0])).sum().backward()
    return {name: module.report().slots for name, module in modules.items()}


LARGE, SMALL = 1000, 1
ROW, STATE_ROW = 4 * 4 + 8, 3 * 4 * 4 + 8
"""Bytes of a slot, without state and with that of Adam."""


def large_and_small(nbytes: int) -> tuple[speedtorch.EmbeddingBagCollection, optim.Optimizer]:
    """Two groups: a table of many rows, and one of a single row of another width."""
    configs = [
        speedtorch.EmbeddingBagConfig(LARGE, 4, "large"),
        speedtorch.EmbeddingBagConfig(SMALL, 8, "small"),
    ]
    tables = speedtorch.EmbeddingBagCollection(tables=configs, cache=nbytes)
    return tables, optim.Adam(tables.parameters())


def train_both(
    tables: speedtorch.EmbeddingBagCollection, optimizer: optim.Optimizer
) -> dict[str, int]:
    for _ in range(2):
        tables({"large": torch.tensor([3]), "small": torch.tensor([0])}).values().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: report.slots for name, report in tables.report().items()}


@pytest.mark.parametrize("nbytes", [160, 161, 1000, 10_000])
@pytest.mark.parametrize("attaches_later", [False, True])
def test_a_small_group_beside_a_large_one_holds_its_state(
    nbytes: int, attaches_later: bool
) -> None:
    tables, optimizer = large_and_small(nbytes)
    if attaches_later:
        sgd = optim.SGD(tables.parameters(), lr=1)
        assert train_both(tables, sgd)["small"] == SMALL
    speedtorch.attach(optimizer, tables)
    small = 3 * 8 * 4 + 8
    assert train_both(tables, optimizer) == {"large": (nbytes - small) // STATE_ROW, "small": SMALL}


def test_state_that_does_not_fit_is_refused_when_it_is_attached() -> None:
    tables, optimizer = large_and_small(159)
    says = (
        "159 bytes are too few. One row of each of 2 tables takes 160 bytes .* at least 160 bytes"
    )
    with pytest.raises(ValueError, match=says):
        speedtorch.attach(optimizer, tables)
    assert tables.group_of("large").table.fields.keys() == {"weight"}
    assert train_both(tables, optim.SGD(tables.parameters(), lr=1)) == {"large": 4, "small": 1}
    with pytest.raises(ValueError, match="at least 64 bytes"):
        large_and_small(63)


def test_caches_of_one_budget_follow_attach_and_resize() -> None:
    modules = {name: speedtorch.Embedding(2, 4) for name in "abc"}
    optimizers = {name: optim.Adam(module.parameters()) for name, module in modules.items()}
    speedtorch.cache(nn.ModuleDict(modules), 5 * ROW)
    assert slots_of(modules) == {"a": 1, "b": 1, "c": 1}
    speedtorch.attach(optimizers["a"], modules["a"])
    with pytest.raises(ValueError, match=f"too few. .* takes {ROW + 2 * STATE_ROW} bytes"):
        speedtorch.attach(optimizers["b"], modules["b"])
    speedtorch.detach(optimizers["a"])
    speedtorch.cache(nn.ModuleDict(modules), 2 * ROW + 5 * STATE_ROW)
    speedtorch.attach(optimizers["a"], modules["a"])
    speedtorch.attach(optimizers["b"], modules["b"])
    assert slots_of(modules) == {"a": 2, "b": 2, "c": 2}
    for module in modules.values():
        module.zero_grad()
    speedtorch.detach(optimizers["b"])
    modules["c"].resize(90)
    left = 2 * ROW + 5 * STATE_ROW - 2 * STATE_ROW - 2 * ROW
    assert slots_of(modules) == {"a": 2, "b": 2, "c": left // ROW}


def test_a_cache_of_a_table_without_rows_is_built_with_its_first_rows() -> None:
    embedding = speedtorch.Embedding(0, 4, cache=2 * ROW)
    assert slots_of({"a": embedding.resize(9)}) == {"a": 2}


def test_a_resize_that_no_cache_holds_changes_nothing() -> None:
    modules = nn.ModuleList([speedtorch.Embedding(0, 4), speedtorch.Embedding(5, 4)])
    speedtorch.cache(modules, ROW)
    with pytest.raises(ValueError, match=f"at least {2 * ROW} bytes"):
        modules[0].resize(3)
    assert modules[0].num_embeddings == 0
    assert slots_of({"b": modules[1]}) == {"b": 1}


def test_a_cache_that_a_cuda_graph_uses_keeps_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {name: speedtorch.Embedding(50, 4) for name in "ab"}
    speedtorch.cache(nn.ModuleDict(modules), 142)
    slots_of(modules)
    captured = modules["a"].trained_rows.exchange.memory
    monkeypatch.setattr(type(captured), "is_captured", property(lambda self: self is captured))
    copied = copy.deepcopy(nn.ModuleDict(modules))
    assert slots_of(dict(copied.items())) == {"a": 71 // ROW, "b": 71 // ROW}
    modules["b"].zero_grad()
    modules["b"].resize(60)
    store = captured.held.store
    optimizer = optim.Adam(modules["b"].parameters())
    speedtorch.attach(optimizer, modules["b"])
    assert captured.held.store is store
    assert slots_of({"b": modules["b"]}) == {"b": 71 // STATE_ROW}
    modules["b"].zero_grad()
    speedtorch.detach(optimizer)
    with pytest.raises(ValueError, match="CUDA graphs use 71 bytes. Pass at least 143"):
        speedtorch.attach(optim.Adam(modules["b"].parameters(), amsgrad=True), modules["b"])


def test_a_copy_has_the_bytes_of_the_modules_that_are_copied() -> None:
    model = nn.ModuleDict({name: speedtorch.Embedding(50, 4) for name in "ab"})
    speedtorch.cache(model, 10 * STATE_ROW)
    one, both = copy.deepcopy(model["a"]), copy.deepcopy(model)
    for each in (one, both):
        speedtorch.attach(optim.Adam(each.parameters()), each)
    assert slots_of({"one": one, **both, "of the model": model["a"]}) == {
        "one": 5,
        "a": 5,
        "b": 5,
        "of the model": 5 * STATE_ROW // ROW,
    }


@pytest.mark.parametrize(
    ("bounds", "total", "shares"),
    [
        ([(1, 9)], 5, [5]),
        ([(1, 9)], 20, [20]),
        ([(1, 2), (1, 90)], 50, [2, 48]),
        ([(30, 90), (1, 90), (1, 90)], 50, [30, 10, 10]),
        ([(7, 7), (1, 3), (2, 2)], 30, [13, 9, 8]),
        ([(5, 50), (5, 50)], 10, [5, 5]),
        ([], 10, []),
    ],
)
def test_shares_are_as_even_as_their_bounds_allow(
    bounds: list[tuple[int, int]], total: int, shares: list[int]
) -> None:
    assert even_shares(bounds, total) == shares


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"cache": "2 lots"}, ValueError, "cache: expected a text such as '12GiB'"),
        ({"cache": 0}, ValueError, "cache: expected more than 0 bytes, got 0"),
        ({"cache": 1.5}, TypeError, "cache: expected bytes or a text such as '12GiB', got float"),
        ({"cache_rows": torch.tensor([1])}, ValueError, "only together with cache="),
        ({"cache": 99, "cache_rows": [1]}, TypeError, "cache_rows"),
        ({"cache": 99, "cache_rows": torch.tensor([9])}, IndexError, "ids from 0 to 4, got 9"),
    ],
)
def test_wrong_arguments_raise(
    arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        speedtorch.Embedding(5, 4, **arguments)


def test_a_cache_that_holds_no_row_is_reported_at_once() -> None:
    embedding = speedtorch.Embedding(5, 4)
    says = "cache: 23 bytes are too few. One row takes 24 bytes .* Pass at least 24 bytes"
    with pytest.raises(ValueError, match=says):
        speedtorch.cache(embedding, 23)
    with pytest.raises(ValueError, match=says):
        speedtorch.Embedding(5, 4, cache=23)
    speedtorch.cache(embedding, 24)
    with pytest.raises(ValueError, match="Linear has no speedtorch.Embedding"):
        speedtorch.cache(nn.Linear(2, 2), "1KiB")


def test_a_cache_has_no_report_before_the_first_step() -> None:
    embedding = speedtorch.Embedding(5, 4, cache="1KiB")
    with pytest.raises(ValueError, match="no step has loaded rows yet. Train a step first"):
        embedding.report()


def refuse(*_: object) -> None:
    raise torch.OutOfMemoryError("none left")


@pytest.mark.usefixtures("restless")
def test_too_little_memory_for_a_refresh_changes_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_rows.HotRows, "_move", refuse)
    training = trained("600B")
    fields, report = training.fields(), training.module.report()
    assert report.failed > 0
    assert report.rows == 0
    assert_same_content(fields, trained(None).fields())


def test_too_little_memory_to_refill_a_cache_keeps_the_rows_in_the_table(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    members = torch.tensor([1, 2, 7])
    cached, plain = (trained(cache, device=device) for cache in ("600B", None))
    given = trained("600B", device=device, cache_rows=members)
    everyone = (cached, plain, given)
    for each in everyone:
        each.module.flush()
    reports = cached.module.report(), given.module.report()
    assert (reports[0].failed, reports[1].rows) == (0, 0), "flush() has written them home"
    with monkeypatch.context() as patch:
        patch.setattr(hot_rows.HotRows, "_reload", refuse)
        for each in everyone:
            step(each)
    assert given.module.report().failed > 0
    assert given.module.report().rows == 0
    for each in everyone:
        step(each)
        each.module.flush()
    step(given)
    assert given.module.report().rows == 3, "they have taken them later"
    assert_same_content(cached.fields(), plain.fields())
    step(plain)
    assert_same_content(given.fields(), plain.fields())


def test_free_slots_are_for_the_most_used_rows() -> None:
    assert planned_refresh([90, 3, 1, 1], [0, 0, 0, 0], 9) == Refresh(5, 0, 0, 0)
    assert planned_refresh([90, 8, 1, 1], [0, 0, 0, 0], 3) == Refresh(3, 1, 0, 0)
    assert planned_refresh([90, 8, 1, 1], [0, 0, 0, 0], 1) == Refresh(1, 2, 0, 0)


def test_a_row_replaces_another_in_the_cache_only_if_the_gain_is_certain() -> None:
    needed = surely_above(0)
    for uses in range(needed + 2):
        outside = [0] * uses + [1] + [0] * 20
        moved = planned_refresh(outside, [1] + [0] * 20, 0)
        assert moved.admitted == moved.evicted == (uses >= needed)


@pytest.mark.parametrize("uses", range(100))
def test_sure_is_two_standard_deviations_of_the_difference(uses: int) -> None:
    more = surely_above(uses)
    assert more - uses > 2 * (more + uses) ** 0.5
    assert more - 1 - uses <= 2 * (more - 1 + uses) ** 0.5


def test_the_most_used_rows_replace_the_least_used() -> None:
    outside = [0, 0, 0, 0, 0, 0, 3, 2, 0, 1]  # six rows, used 6 to 9 times
    inside = [4, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    assert planned_refresh(outside, inside, 1) == Refresh(5, 6, 4, 9)
