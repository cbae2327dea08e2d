"""Steps of many lookups, whose rows are appended and sorted once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from reference import assert_same_bytes
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.step import counted_memory
from speedtorch.step.row_store import RowStore

ROWS, WIDTH, LOOKUPS = 400, 4, 24
SETTINGS: list[dict[str, Any]] = [
    {},
    {"padding_idx": 3},
    {"padding_idx": 3, "stored": torch.bfloat16},
    {"cache": 4096},
]
OPTIMIZERS: list[Callable[[Any], optim.Optimizer]] = [
    lambda parameters: optim.SGD(parameters, lr=0.1),
    lambda parameters: optim.Adam(parameters, lr=0.1, weight_decay=0.1),
]


def lookups(step: int, shape: tuple[int, ...] = (6,)) -> list[Tensor]:
    """Ids of the lookups of a step: some rows come again, and some lookups do."""
    random = torch.Generator().manual_seed(step)
    made = [torch.randint(ROWS, shape, generator=random) for _ in range(LOOKUPS)]
    made[9], made[15] = made[2].clone(), torch.cat([made[0], made[14]])[: shape[0]]
    made[17] = made[17][:0]
    return made


def module_of(**settings: Any) -> speedtorch.Embedding:
    torch.manual_seed(1)
    return speedtorch.Embedding(ROWS, WIDTH, **settings)


def with_optimizer(module: nn.Module, number: int) -> optim.Optimizer:
    made = OPTIMIZERS[number](module.parameters())
    if number:
        speedtorch.attach(made, module)
    return made


def numbers_of(module: speedtorch.Embedding) -> list[Tensor]:
    module.flush()
    return [module.table[field].clone() for field in module.table.fields]


def trained(
    module: Any,
    optimizer: optim.Optimizer,
    change: Callable[[Any, Any], object] = lambda *_: None,
) -> list[Tensor]:
    """Trains three steps, with changes between lookups; returns what the lookups gave."""
    given = []
    for step in range(3):
        optimizer.zero_grad()
        losses = []
        for lookup, ids in enumerate(lookups(step)):
            given.append(module(ids))
            losses.append((given[-1] * (lookup + 1)).square().sum())
            if lookup in (7, 8, 19):
                change(module, optimizer)
        torch.stack(losses).sum().backward()
        optimizer.step()
    return [each.detach() for each in given]


@pytest.mark.parametrize("optimizer", range(len(OPTIMIZERS)))
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_rows_are_those_of_one_announcement(
    settings: dict[str, Any], optimizer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for many in (1, 6, 10**6):
        monkeypatch.setattr(counted_memory, "_MANY", many)
        module = module_of(**settings)
        given = trained(module, with_optimizer(module, optimizer))
        runs.append([*given, *numbers_of(module)])
    at_once = module_of(**settings)
    sgd = with_optimizer(at_once, optimizer)
    given = []
    for step in range(3):
        sgd.zero_grad()
        parts = lookups(step)
        at_once.announce(*parts)
        given += [at_once(ids) for ids in parts]
        losses = [(each * (k + 1)).square().sum() for k, each in enumerate(given[-LOOKUPS:])]
        torch.stack(losses).sum().backward()
        sgd.step()
    expected = [*(each.detach() for each in given), *numbers_of(at_once)]
    for run in runs:
        for mine, theirs in zip(run, expected, strict=True):
            assert_same_bytes(mine, theirs)


def announced(module: speedtorch.Embedding, *parts: Tensor) -> None:
    module.announce(*parts)
    for ids in parts:
        module(ids)


def changes() -> Iterator[tuple[str, Callable[[speedtorch.Embedding, Any], object]]]:
    """What a loop may do between two lookups of a step."""
    ids = torch.tensor([1, 7])
    yield "flush", lambda module, _: module.flush()
    yield "read", lambda module, _: module.table["weight"].sum()
    yield "weight", lambda module, _: module.weight[5:9].sum()
    yield "state dict", lambda module, _: module.state_dict()
    yield "backward", lambda module, _: module(ids).sum().backward()
    yield "gradient", lambda module, _: module.weight.grad
    yield "announce", lambda module, _: announced(module, ids, ids + 300)
    yield "evaluation", lambda module, _: torch.no_grad()(module)(ids)
    yield "inference", lambda module, _: torch.inference_mode()(module.flush)()
    yield "zero_grad", lambda _, optimizer: optimizer.zero_grad()
    yield "write", lambda module, _: module.weight.data[7:9].mul_(2)


@pytest.mark.parametrize("change", [pytest.param(each, id=name) for name, each in changes()])
def test_what_a_loop_does_between_lookups_changes_no_result(
    change: Callable[[Any, Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for many in (1, 10**6):
        monkeypatch.setattr(counted_memory, "_MANY", many)
        module = module_of(padding_idx=3)
        adam = with_optimizer(module, 1)
        given = trained(module, adam, change)
        runs.append([*given, *numbers_of(module)])
    for mine, theirs in zip(*runs, strict=True):
        assert_same_bytes(mine, theirs)


@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_appended_rows_have_the_zeros_of_zero_grad(
    settings: dict[str, Any], to_none: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with a gradient of zeros changes rows by momentum."""
    runs = []
    for many in (2, 10**6):
        monkeypatch.setattr(counted_memory, "_MANY", many)
        module = module_of(**settings)
        sgd = optim.SGD(module.parameters(), lr=0.5, momentum=0.5)
        speedtorch.attach(sgd, module)
        module(torch.arange(9)).sum().backward()
        sgd.step()
        sgd.zero_grad()
        before = numbers_of(module)[0]
        for ids in ([1], [1, 2]):
            module(torch.tensor(ids)).sum().backward()
        kept = module(torch.tensor([6, 4, 8]))
        sgd.zero_grad(set_to_none=to_none)
        sgd.step()
        runs.append([*numbers_of(module), kept.detach()])
        changed = (runs[-1][0] != before).any(1).nonzero().flatten().tolist()
        assert changed == ([] if to_none else [1, 2, 4, 6, 8])
    for mine, theirs in zip(*runs, strict=True):
        assert_same_bytes(mine, theirs)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_many_lookups(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for many in (1, 10**6):
        monkeypatch.setattr(counted_memory, "_MANY", many)
        torch.manual_seed(1)
        bag = speedtorch.EmbeddingBag(ROWS, WIDTH, mode=mode, padding_idx=3)
        sgd = optim.SGD(bag.parameters(), lr=0.1)
        for step in range(2):
            sgd.zero_grad()
            parts = [ids for ids in lookups(step, (6, 3)) if len(ids) == 6]
            given = [bag(ids) for ids in parts]
            torch.stack(given).square().sum().backward()
            sgd.step()
        bag.flush()
        runs.append([*(each.detach() for each in given), bag.table["weight"].clone()])
    for mine, theirs in zip(*runs, strict=True):
        assert_same_bytes(mine, theirs)


@pytest.mark.parametrize("settings", [{}, {"padding_idx": 3}], ids=str)
def test_a_lookup_whose_load_fails_can_be_repeated(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, module = module_of(**settings), module_of(**settings)
    trained(expected, with_optimizer(expected, 1))
    fails = [False]

    def failing(load: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        def call(*arguments: Any) -> list[Tensor]:
            made = load(*arguments)  # also writes to the hash table
            if fails[0]:
                raise MemoryError("once")
            return made

        return call

    for load in (RowStore.join_batch, RowStore.append_batch):
        monkeypatch.setattr(RowStore, load.__name__, failing(load))
    other = torch.arange(80, 120)

    class Repeating(nn.Module):
        """Fails at other ids, and at the first try of each lookup whose ids join the step."""

        def forward(self, ids: Tensor) -> Tensor:
            given = None
            for tried in (other, ids):
                fails[0] = True
                try:
                    given = module(tried)
                except MemoryError:
                    pass
                finally:
                    fails[0] = False
            return module(ids) if given is None or len(ids) else given

    adam = with_optimizer(module, 1)
    step = iter(range(10**6))
    model = Repeating()
    trained(lambda ids: model(ids) if next(step) % LOOKUPS > 1 else module(ids), adam)
    for mine, theirs in zip(numbers_of(module), numbers_of(expected), strict=True):
        assert_same_bytes(mine, theirs)


def test_a_step_of_many_lookups_merges_rows_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    merge, join = counted_memory.merge_rows, RowStore.join_batch

    def merged(rows: list[Tensor], *ids: Tensor) -> list[Tensor]:
        calls.append(len(rows[0]))
        return merge(rows, *ids)

    def joined(*arguments: Any) -> list[Tensor]:
        calls.append(1)
        return join(*arguments)

    monkeypatch.setattr(counted_memory, "merge_rows", merged)
    monkeypatch.setattr(RowStore, "join_batch", joined)
    module = module_of()
    trained(module, with_optimizer(module, 0))
    assert len(calls) <= 3 * (counted_memory._MANY + 1)


def test_step_ids_contain_appended_rows() -> None:
    module, ids = module_of(), lookups(0)
    results = [module(part) for part in ids]
    assert module.step_ids.tolist() == torch.cat(ids).unique().tolist()
    torch.stack([result.sum() for result in results]).sum().backward()
    assert module.weight.grad[module.step_ids].any(1).all()


def test_positions_of_a_lookup_that_an_exception_ended_are_forgotten() -> None:
    module = module_of()
    module(torch.tensor([3, 7, 9]))
    exchange = module.trained_rows.exchange
    step = exchange.held.now
    step.places[1] = torch.tensor([0, 1])  # of a second lookup that did not join
    batch = exchange.memory.planned([torch.tensor([9, 7])], step.ids)
    batch.count()
    joined = step.with_batch(batch, is_planned=False)
    assert joined.part(1, 0).positions.tolist() == [2, 1]


def test_a_late_lookup_may_name_ids_of_the_step() -> None:
    module, ids = module_of(), torch.arange(20)
    kept = [module(part) for part in (ids, *ids.view(10, 2) + 10)]
    named = module.step_ids[3:7]
    assert len(kept) == 11 and len(named) == 4
    assert_same_bytes(module(named).detach(), module.weight.detach()[3:7].clone())
