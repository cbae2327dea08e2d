"""Tables that prefetch, announce or a collection knows together: one comparison, one exchange."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import paces
import pytest
import torch
import torch.distributed as dist
from rank_backends import on_ranks
from rank_processes import in_groups_at_once, own_device
from sharded_training import (
    CASES,
    FITS,
    ROWS,
    WIDTH,
    Case,
    assert_own_rows,
    batches_of,
    local_ids,
    loss_of,
    module_of,
    of_machines,
    raised_late,
    raises,
    soon,
    train_both,
)
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.parallel.counted_requests import CountedRound
from speedtorch.parallel.ranks import LOOKUPS
from speedtorch.parallel.shard import shard
from speedtorch.parallel.shared_memory_barrier import SharedMemoryBarrier

CAPACITY = pytest.mark.parametrize("capacity", [None, 41], ids=["counted", "capacity"])
MACHINES = pytest.mark.parametrize("on_machine", [True, False], ids=["machine", "machines"])
STEPS = 6
Batch = dict[str, list[Tensor]]


@contextmanager
def read_late() -> Iterator[None]:
    """Ranks of several machines read gathered counts only when they exchange ids, as on GPUs."""
    gather_counts = CountedRound._gather_counts

    def gather(*args: Any) -> Any:
        with patch.object(CountedRound, "_read_counts"):
            return gather_counts(*args)

    with patch.object(CountedRound, "_gather_counts", gather):
        yield


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often a rank waits in shared memory, and how many collectives it makes."""
    seen: Counter[str] = Counter()

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            return function(*args, **kwargs)

        return noted

    with ExitStack() as stack:
        for owner, function, name in (
            (SharedMemoryBarrier, "exchange", "waits"),
            (dist, "all_to_all_single", "collectives"),
            (dist, "all_reduce", "collectives"),
        ):
            noted = noting(name, getattr(owner, function))
            stack.enter_context(patch.object(owner, function, noted))
        yield seen


def collection_of(count: int, capacity: int | None = None) -> speedtorch.EmbeddingBagCollection:
    """Tables of which each is a group of its own."""
    torch.manual_seed(3)
    tables = [
        speedtorch.EmbeddingBagConfig(ROWS, WIDTH, f"t{k}", group=f"g{k}") for k in range(count)
    ]
    return speedtorch.EmbeddingBagCollection(tables, device=own_device(), capacity=capacity)


def features(count: int, seed: int) -> dict[str, Tensor]:
    """Ids of this rank."""
    random = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return {
        f"t{k}": torch.randint(ROWS, (5,), generator=random).to(own_device()) for k in range(count)
    }


def steps_of(way: str, count: int, capacity: int | None) -> Callable[[int], None]:
    """Makes so many steps, of so many tables."""
    model: Any = collection_of(count, capacity)
    if way == "prefetched tables":
        model = nn.ModuleDict({f"t{k}": module_of(CASES["SGD"], capacity) for k in range(count)})
    shard(model)
    optimizer = optim.SGD(model.parameters(), lr=0.25)
    speedtorch.attach(optimizer, model)

    def of_modules(batch: dict[str, Tensor]) -> Any:
        return {model[name]: ids for name, ids in batch.items()}

    def steps(number: int) -> None:
        batches: Iterable[Any] = [features(count, seed) for seed in range(number)]
        if way == "prefetched":
            batches = speedtorch.prefetch(batches, model, ids=lambda batch: batch)
        elif way == "prefetched tables":
            batches = speedtorch.prefetch(batches, model, ids=of_modules)
        for batch in batches:
            optimizer.zero_grad()
            if way == "announced":
                model.announce(batch)
            if way == "prefetched tables":
                found = torch.cat([model[name](ids) for name, ids in batch.items()])
            else:
                found = model(batch).values()
            found.sum().backward()
            optimizer.step()

    return steps


# Of each table: its rows, but for those of a collection, and their gradients, and with a capacity
# whether its rows fit; ranks compare lookups that were planned before, and backwards. Between
# machines that is a collective.
EXCHANGES = {
    "looked up": {"waits": 1, "collectives": 1},
    "announced": {"waits": 2, "collectives": 1},
    "prefetched": {"waits": 2, "collectives": 1},
    "prefetched tables": {"waits": 2, "collectives": 2},
}


@on_ranks
@CAPACITY
@MACHINES
@pytest.mark.parametrize("way", EXCHANGES)
def test_ranks_compare_and_request_once_for_all_tables(
    way: str, capacity: int | None, on_machine: bool
) -> None:
    """Of a further table ranks only exchange rows and gradients."""
    expected, made = dict(EXCHANGES[way]), []
    with of_machines(on_machine):
        for count in (2, 6):
            steps = steps_of(way, count, capacity)
            steps(2)
            with counted() as few:
                steps(4)
            with counted() as more:
                steps(7)
            made.append({name: (more[name] - few[name]) / 3 for name in expected})
    expected["collectives"] += 0 if capacity is None else 2 if way == "announced" else 1
    if not on_machine:
        expected = {"waits": 0, "collectives": sum(expected.values())}
    assert {name: (made[1][name] - made[0][name]) / 4 for name in expected} == expected


KINDS: dict[str, tuple[Case, int | None]] = {
    "rows": (replace(CASES["Adam"], uneven=True), None),
    "bags": (replace(CASES["Adam, bags, padding"], lookups=2), None),
    "padding": (CASES["Adam, padding"], None),
    "blocks": (replace(CASES["Adam"], **FITS, lookups=2, uneven=True), ROWS // 2 + 1),
    "more blocks": (replace(CASES["Adam"], capacity=ROWS, rows=2 * ROWS), ROWS),
    "many": (replace(CASES["Adam"], lookups=LOOKUPS + 4, pairs=2), None),
}


def trained(model: nn.ModuleDict, ranks: Sequence[int], way: str) -> None:
    """Trains tables of all kinds on the batches of some ranks."""
    optimizer = optim.Adam(model.parameters(), lr=0.25)
    speedtorch.attach(optimizer, model)
    of_tables = {name: batches_of(case, ranks) for name, (case, _) in KINDS.items()}
    batches: Iterable[Batch] = [
        {name: ids[step] for name, ids in of_tables.items()} for step in range(STEPS)
    ]
    if way != "at once":
        paces.choose({"ahead": paces.AHEAD, "in part": paces.Turning(), "as it is": None}[way])
        batches = speedtorch.prefetch(
            batches, model, ids=lambda batch: {model[name]: ids for name, ids in batch.items()}
        )
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        if way == "at once":
            for name, ids in batch.items():
                model[name].announce(*ids)
        losses = [
            loss_of(model[name], case, step, ranks, batch[name])
            for name, (case, _) in KINDS.items()
        ]
        torch.stack(losses).sum().backward()
        optimizer.step()


@on_ranks
@pytest.mark.parametrize(("ranks", "on_machine"), [(2, True), (3, True), (2, False)])
def test_tables_of_all_kinds_train_as_in_one_process(ranks: int, on_machine: bool) -> None:
    """Tables with and without a capacity and of many lookups."""

    def made(shared: bool) -> nn.ModuleDict:
        capacities = {name: most if shared else None for name, (_, most) in KINDS.items()}
        return nn.ModuleDict({n: module_of(KINDS[n][0], most) for n, most in capacities.items()})

    with of_machines(on_machine):
        whole = made(False)
        trained(whole, range(ranks), "at once")
        for way in ("ahead", "in part", "as it is"):
            model = made(True)
            shard(model, average=False)
            trained(model, [dist.get_rank()], way)
            assert_own_rows(model, whole, f"{way}: ")


class Tables:
    """Tables of a collection, each a group, which have made a step."""

    def __init__(self, capacity: int | None) -> None:
        self.model = collection_of(3, capacity)
        shard(self.model)
        self.optimizer = optim.Adam(self.model.parameters(), lr=0.25)
        speedtorch.attach(self.optimizer, self.model)
        self.step(features(3, 1))
        self.before = self.rows()

    def rows(self) -> list[Tensor]:
        self.model.flush()
        return [group.table["weight"].clone() for group in self.model._groups()]

    def step(self, batch: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad()
        self.model(batch).values().sum().backward()
        self.optimizer.step()

    def announced(self, batch: dict[str, Tensor]) -> None:
        self.model.announce(batch)
        self.step(batch)

    def prefetched(self, batch: dict[str, Tensor]) -> None:
        for given in speedtorch.prefetch([batch], self.model, ids=lambda batch: batch):
            self.step(given)

    def check_unchanged(self) -> None:
        """No row has changed, and the next steps change some."""
        assert all(map(torch.equal, self.rows(), self.before))
        self.step(features(3, 2))
        self.announced(features(3, 3))
        self.prefetched(features(3, 4))
        assert not any(map(torch.equal, self.rows(), self.before))


SORTS: dict[str, dict[str, Any]] = {
    "t0": {"embedding_dim": 3},
    "t1": {"embedding_dim": 5},
    "t2": {"embedding_dim": 2, "data_type": torch.float64},
    "frozen": {"embedding_dim": 4},
    "t3": {"embedding_dim": 4, "group": "other", "pooling": "mean"},
}


@on_ranks
@CAPACITY
@pytest.mark.parametrize(("ranks", "on_machine"), [(2, True), (3, False)])
def test_groups_that_exchange_rows_jointly_train_as_in_one_process(
    capacity: int | None, ranks: int, on_machine: bool
) -> None:
    """Also if only some groups are trained."""

    def made(capacity: int | None) -> speedtorch.EmbeddingBagCollection:
        torch.manual_seed(3)
        tables = [
            speedtorch.EmbeddingBagConfig(ROWS, name=name, init_fn=nn.init.normal_, **sort)
            for name, sort in SORTS.items()
        ]
        return speedtorch.EmbeddingBagCollection(tables, device=own_device(), capacity=capacity)

    def train(model: speedtorch.EmbeddingBagCollection, ranks: Sequence[int]) -> None:
        optimizer = optim.Adam(model.parameters(), lr=0.25)
        speedtorch.attach(optimizer, model)
        (frozen,) = (n for n in model._groups() if n.ranges.tables[0].name == "frozen")
        frozen.weight.requires_grad_(False)
        batches: list[Any] = []
        for step in range(2 * STEPS):
            drawn = [torch.Generator().manual_seed(10 * step + rank) for rank in ranks]
            ids = {n: [torch.randint(ROWS, (5, 2), generator=g) for g in drawn] for n in SORTS}
            batches.append({name: torch.cat(parts) for name, parts in ids.items()})
        ahead = speedtorch.prefetch(batches[STEPS:], model, ids=lambda batch: batch)
        for step, batch in enumerate(chain(batches[:STEPS], ahead)):
            optimizer.zero_grad()
            if step < STEPS // 2:
                model.announce(batch)
            found = model(batch)
            used = SORTS if step % 2 else ["t0", "t2"]
            sum(found[name].double().sum() * 2 for name in used).backward()
            optimizer.step()

    with of_machines(on_machine):
        both = {"make_whole": partial(made, None), "average": False}
        model, whole = train_both(partial(made, capacity), train, **both)
        assert_own_rows(model, whole)
        every = dict.fromkeys(SORTS, torch.arange(ROWS).view(-1, 1))
        with torch.no_grad():
            found, expected = model(every), whole(every)
        assert all(torch.equal(found[name], expected[name]) for name in SORTS)


@on_ranks
@MACHINES
def test_a_group_that_is_too_large_raises_on_all_ranks(on_machine: bool) -> None:
    """The rows of those before it have come."""
    is_odd = dist.get_rank() == 1
    with of_machines(on_machine):
        model = collection_of(3, capacity=4)
        shard(model)
        batch = {name: local_ids(1, 2) for name in ("t0", "t1", "t2")}
        full = batch | ({"t1": local_ids(*range(20))} if is_odd else {})
        message = "" if is_odd else "on some rank has more unique rows of one rank"
        raises(RuntimeError, f"'t1'.*{message}", partial(model, full))
        found = model(batch).values()
        with torch.no_grad():
            assert torch.equal(found, model(batch).values())


def check_an_error_of_one_rank(on_machine: bool) -> None:
    with of_machines(on_machine):
        tables, error = Tables(None), MemoryError("of one rank")
        broken = tables.model._groups()[1].trained_rows
        if dist.get_rank() == 1:
            with patch.object(broken, "summed", side_effect=error):
                raises(MemoryError, "of one rank", partial(tables.model, features(3, 5)))
            time.sleep(3)
        else:
            call = partial(tables.model, features(3, 5))
            raises(RuntimeError, "an exchange with other ranks failed", call)


def test_an_error_of_one_rank_loads_no_rows_of_other_tables() -> None:
    """On one machine, and between two. The error ends training clearly on the other ranks."""
    in_groups_at_once(2, check_an_error_of_one_rank, (True,), (False,), timeout=2.0)


@on_ranks
@pytest.mark.dealt("on_machine")
@CAPACITY
@MACHINES
def test_bad_ids_of_one_table_raise_on_all_ranks(capacity: int | None, on_machine: bool) -> None:
    """The errors name table and ranks."""
    is_odd = dist.get_rank() == 1
    with of_machines(on_machine):
        for way in (Tables.step, Tables.announced, Tables.prefetched):
            for bad in range(3):
                tables, batch = Tables(capacity), features(3, 5)
                if is_odd:
                    batch[f"t{bad}"][1] = ROWS
                message = rf"table 't{bad}'.* ranks \[1\] are out of range"
                if is_odd:
                    message = rf"feature 't{bad}': id {ROWS} at position 1 is out of range"
                raises(IndexError, message, partial(way, tables, batch))
                tables.check_unchanged()


@on_ranks
@MACHINES
def test_bad_ids_of_replicated_rows_raise_on_all_ranks(on_machine: bool) -> None:
    with of_machines(on_machine):
        model = collection_of(2)
        shard(model.group_of("t0"))
        batch, message = {"t0": local_ids(1), "t1": local_ids(2)}, r"ranks \[1\] are out of range"
        if dist.get_rank() == 1:
            batch["t1"] += ROWS
            message = f"feature 't1': id {ROWS + 2} at position 0 is out of range"
        with soon("a lookup with bad ids"):
            raises(IndexError, message, partial(model, batch))


@on_ranks
@pytest.mark.dealt("on_machine")
@CAPACITY
@MACHINES
def test_a_batch_that_cannot_be_read_raises_on_all_ranks(
    capacity: int | None, on_machine: bool
) -> None:
    is_odd = dist.get_rank() == 1
    with of_machines(on_machine):
        for way in (Tables.step, Tables.announced):
            for frozen in (False, True):
                tables, batch = Tables(capacity), features(3, 5)
                tables.model._groups()[0].weight.requires_grad_(not frozen)
                if is_odd:
                    batch["t1"] = torch.rand(5, device=own_device())
                kind = TypeError if is_odd else IndexError
                message = "t1" if is_odd else r"ranks \[1\] are out of range"
                raises(kind, message, partial(way, tables, batch))
                tables.model._groups()[0].weight.requires_grad_(True)
                tables.check_unchanged()


@on_ranks
@MACHINES
def test_bad_ids_raise_on_all_ranks_if_errors_are_raised_late(on_machine: bool) -> None:
    """At the next lookup of each table, each rank its own."""
    is_odd = dist.get_rank() == 1
    with of_machines(on_machine), raised_late():
        tables, batch = Tables(ROWS), features(3, 5)
        if is_odd:
            batch["t1"] = torch.rand(5, device=own_device())
            raises(TypeError, "t1", partial(tables.model, batch))
        else:
            assert not tables.model(batch).values().any()
        for _ in range(3):
            message = "t1" if is_odd else "an id on some rank is out of range"
            raises(Exception, message, partial(tables.model, features(3, 6)))
        with torch.no_grad():
            tables.model(features(3, 6))
        assert all(map(torch.equal, tables.rows(), tables.before))


def other_tables(tables: dict[str, Any], names: str, of_third: str) -> None:
    batches = [{name: local_ids(1, 2) for name in of_step} for of_step in (names, names, of_third)]
    model = nn.ModuleDict(tables)
    loop = speedtorch.prefetch(
        batches, model, ids=lambda batch: {model[name]: ids for name, ids in batch.items()}
    )
    for given in loop:
        for name, ids in given.items():
            model[name](ids)


@on_ranks
@pytest.mark.dealt("where")
@CAPACITY
@pytest.mark.parametrize("where", ["machine", "machines", "GPUs of machines"])
def test_other_tables_on_one_rank_raise_on_all_ranks(capacity: int | None, where: str) -> None:
    """The errors name the first that is not the same."""
    ahead, end = r"announce\(\) or prefetch\(\) of '{}'", "no further lookup, announce"
    with of_machines(where == "machine"), read_late() if "GPUs" in where else nullcontext():
        for names, of_odd, first, odd in (
            ("abc", "acb", ahead.format("b"), ahead.format("c")),
            ("abc", "ab", ahead.format("c"), end),
            ("ab", "abc", end, ahead.format("c")),
        ):
            for every in (True, False):
                model = nn.ModuleDict({name: module_of(CASES["Adam"], capacity) for name in "abc"})
                shard(model)
                before = [module.table["weight"].clone() for module in model.values()]
                third = of_odd if dist.get_rank() == 1 else names
                message = rf"ranks \[0.*\] are at {first}.*, ranks \[1\] are at {odd}"
                own = third if every else names
                call = partial(other_tables, dict(model.items()), own, third)
                raises(RuntimeError, message, call)
                other_tables(dict(model.items()), "abc", "abc")
                after = [module.table["weight"] for module in model.values()]
                assert all(map(torch.equal, after, before))
