"""Trains rows that are sharded among ranks, and all of them in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import paces
import pytest
import torch
import torch.distributed as dist
from rank_processes import own_device
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.nn.row_module import RowModule
from speedtorch.parallel import fault_consensus, fixed_requests
from speedtorch.parallel.block_cyclic import BlockCyclic
from speedtorch.parallel.ranks import Ranks
from speedtorch.parallel.shard import shard
from speedtorch.plan import fixed_size_batch
from speedtorch.step import fixed_memory
from speedtorch.table.row_blocks import rows_of_a_block

ROWS, WIDTH, STEPS = 41, 3, 12
SOON = 5.0  # seconds


@dataclass(frozen=True)
class Case:
    """How rows are looked up and trained."""

    make: Callable[..., optim.Optimizer]
    settings: dict[str, Any] = field(default_factory=dict)  # of the module
    optimizer: dict[str, Any] = field(default_factory=dict)
    kind: str = "rows"  # or "bags"
    lookups: int = 1  # of each step
    uneven: bool = False  # ranks have batches of other sizes, some of none
    capacity: int | None = None  # of sharded rows; those of one process have none
    apart: bool = False  # each lookup has a backward of its own, before the next lookup
    read: bool = False  # the gradient is read between backward and step
    rows: int = ROWS
    pairs: int = 4  # of ids in a batch of one lookup


CASES = {
    "SGD": Case(optim.SGD, optimizer={"lr": 0.25, "momentum": 0.5}),
    "Adam": Case(optim.Adam),
    "AdamW, two lookups": Case(optim.AdamW, lookups=2),
    "Adagrad, uneven": Case(optim.Adagrad, uneven=True),
    "RMSprop, two lookups, uneven": Case(optim.RMSprop, lookups=2, uneven=True),
    "SparseAdam": Case(optim.SparseAdam, {"sparse": True}),
    "SparseAdam, padding": Case(optim.SparseAdam, {"sparse": True, "padding_idx": 5}),
    "SparseAdam, bags, padding": Case(
        optim.SparseAdam, {"mode": "sum", "sparse": True, "padding_idx": 3}, kind="bags"
    ),
    "Adam, padding": Case(optim.Adam, {"padding_idx": 5}, uneven=True),
    "Adam, padding at the end": Case(optim.Adam, {"padding_idx": -1}),
    "Adam, max_norm": Case(optim.Adam, {"max_norm": 1.5}),
    "Adam, bags": Case(optim.Adam, {"mode": "sum"}, kind="bags"),
    "Adam, bags, padding": Case(optim.Adam, {"mode": "sum", "padding_idx": 3}, kind="bags"),
}
FITS = {"capacity": ROWS // 2 + 1}  # all rows of a rank
FIXED = {
    "SGD": Case(optim.SGD, optimizer={"lr": 0.25, "momentum": 0.5}, **FITS),
    "Adam, two lookups, uneven": Case(optim.Adam, lookups=2, uneven=True, **FITS),
    "SparseAdam": Case(optim.SparseAdam, {"sparse": True}, uneven=True, **FITS),
    "Adam, padding": Case(optim.Adam, {"padding_idx": 5}, **FITS),
    "Adam, max_norm": Case(optim.Adam, {"max_norm": 1.5}, **FITS),
    # Ranks ask each other for a share of the capacity: 324 rows of two ranks, 237 of three.
    "AdamW, shares": Case(optim.AdamW, lookups=2, capacity=400, rows=2000, pairs=60),
}


def ids_of(case: Case, step: int, lookup: int, rank: int) -> Tensor:
    """Some are asked for by several ranks, and some several times."""
    random = torch.Generator().manual_seed(1000 * step + 10 * lookup + rank)
    count = (step + 2 * rank) % 4 * case.pairs // 4 if case.uneven else case.pairs
    ids = torch.randint(case.rows // 2 if step % 2 else case.rows, (count, 2), generator=random)
    return ids.where(torch.rand(count, 2, generator=random) < 0.8, 5).to(own_device())


def local_ids(*ids: int) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=own_device())


def factors(result: Tensor, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, result.shape, generator=random).to(result)


def rows_module(rows: int = ROWS, **settings: Any) -> speedtorch.Embedding:
    torch.manual_seed(3)
    return speedtorch.Embedding(rows, WIDTH, **settings).to(own_device())


def bags_module(rows: int = ROWS, **settings: Any) -> speedtorch.EmbeddingBag:
    torch.manual_seed(3)
    return speedtorch.EmbeddingBag(rows, WIDTH, **settings).to(own_device())


def module_of(case: Case, capacity: int | None = None) -> RowModule:
    kind = rows_module if case.kind == "rows" else bags_module
    return kind(case.rows, **case.settings, capacity=capacity)


def batches_of(case: Case, ranks: Sequence[int]) -> list[list[Tensor]]:
    """The ids of each lookup of each step, those of the ranks one after another."""
    return [
        [torch.cat([ids_of(case, step, k, rank) for rank in ranks]) for k in range(case.lookups)]
        for step in range(STEPS)
    ]


def loss_of(
    module: nn.Module,
    case: Case,
    step: int,
    ranks: Sequence[int],
    batch: Sequence[Tensor],
    first: int = 0,
) -> Tensor:
    """The sum of the losses of ranks, whose ids each lookup has, from the `first` of a step on."""
    total = torch.zeros((), device=own_device())
    for lookup, ids in enumerate(batch, first):
        sizes = [len(ids_of(case, step, lookup, rank)) for rank in ranks]
        for rank, found in zip(ranks, module(ids).split(sizes), strict=True):
            total = total + (found * factors(found, 100 * step + 7 * lookup + rank)).sum()
    return total


def train(
    module: RowModule, case: Case, ranks: Sequence[int], divisor: int, way: str
) -> tuple[list[Tensor], optim.Optimizer]:
    """Trains on the batches of some ranks; gives what it looked up outside of training, too."""
    optimizer = case.make(module.parameters(), **case.optimizer)
    speedtorch.attach(optimizer, module)
    batches: Iterable[list[Tensor]] = batches_of(case, ranks)
    if way.startswith("prefetched"):
        paces.choose(paces.Turning() if way == "prefetched in part" else paces.AHEAD)
        batches = speedtorch.prefetch(batches, module, ids=lambda batch: batch)
    seen = []
    for step, batch in enumerate(batches):
        if step % 5 == 2:
            with torch.no_grad():
                seen.append(module(local_ids(*range(case.rows)).view(-1, 1)).clone())
        optimizer.zero_grad()
        if way == "announced" or (way == "now and then" and step % 3 == 1):
            module.announce(*batch)
        parts = [[ids] for ids in batch] if case.apart else [batch]
        for number, part in enumerate(parts):
            loss_of(module, case, step, ranks, part, number).backward()
        if divisor != 1 and (gradient := module.weight.grad) is not None:
            is_sparse = case.settings.get("sparse")
            module.weight.grad = (gradient.coalesce() if is_sparse else gradient) / divisor
        elif case.read:
            assert isinstance(module.weight.grad, Tensor | None)
        optimizer.step()
    module.flush()
    return seen, optimizer


def own_gradient(module: RowModule) -> Tensor | None:
    """The gradient of the step's rows that this rank has, as its optimizer is given it."""
    rows = module.trained_rows
    with rows.lock:
        return rows.own_gradient()


def ids_of_rank(rank: int, rows: int = ROWS) -> list[int]:
    """The ids of the rows that a rank owns."""
    sharding = BlockCyclic.of(rows, dist.get_world_size(), rows_of_a_block((WIDTH,)))
    return [row for in_table, _ in sharding.blocks(rank) for row in in_table]


def share_of(values: Tensor, row: Sequence[int] = (WIDTH,)) -> Tensor:
    """This rank's rows of a table whose weight has rows of this shape."""
    sharding = BlockCyclic.of(len(values), dist.get_world_size(), rows_of_a_block(row))
    blocks = sharding.blocks(dist.get_rank())
    return torch.cat([values[rows.start : rows.stop] for rows, _ in blocks])


def row_modules(model: nn.Module) -> list[RowModule]:
    return [module for module in model.modules() if isinstance(module, RowModule)]


def assert_own_rows(model: nn.Module, whole: nn.Module, where: str = "") -> None:
    """Rows and state of this rank have the bits of those of one process."""
    for ours, theirs in zip(row_modules(model), row_modules(whole), strict=True):
        ours.flush()
        theirs.flush()
        assert ours.table.fields == theirs.table.fields
        for entry in theirs.table.fields:
            own = share_of(theirs.table[entry], theirs.table["weight"].shape[1:])
            assert torch.equal(ours.table[entry], own), f"{where}{entry}"


def own_rows(model: nn.Module) -> list[Tensor]:
    """Rows and state of every table here."""
    tables = [module.table for module in row_modules(model)]
    return [table[name].clone() for table in tables for name in table.fields]


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def train_both(
    make: Callable[[], Any],
    train: Callable[[Any, Sequence[int]], object],
    *,
    wrap: Callable[[Any], Any] = lambda model: model,
    make_whole: Callable[[], Any] | None = None,
    average: bool = True,
) -> tuple[Any, Any]:
    """A sharded model on this rank's batches, and one of one process on those of all ranks.

    `train` is called with each model, the sharded one as `wrap` gives it, and with the ranks whose
    batches the model is trained on; with `average` it divides the sum of their losses by their
    number, which must be a power of two where all bits are compared.
    """
    model, whole = make(), (make_whole or make)()
    shard(model, average=average)
    train(wrap(model), [dist.get_rank()])
    train(whole, range(dist.get_world_size()))
    return model, whole


WAYS = ["at once", "announced", "now and then", "prefetched", "prefetched in part"]
# What the ordinary run tests of two and of three ranks; all of it if every way is asked for.
WAYS_OF = {2: ["at once", "prefetched"], 3: ["announced", "now and then", "prefetched in part"]}


def check_training(
    average: bool, cases: dict[str, Case], ways: Sequence[str] | None = WAYS
) -> None:
    """Every case gives the numbers of one process that has all rows and all batches.

    With `ways` None each has one of those that are dealt to this number of ranks.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for number, (name, case) in enumerate(cases.items()):
        whole = module_of(case)
        expected, plain = train(whole, case, range(ranks), ranks if average else 1, "announced")
        for way in ways or [WAYS_OF[ranks][number % 2]]:
            if case.capacity and (way == "now and then" or (case.lookups > 1 and way == "at once")):
                continue  # lookups of a step are announced together
            module = module_of(case, case.capacity)
            torch.manual_seed(rank)
            shard(nn.Sequential(module), average=average)
            found, optimizer = train(module, case, [rank], 1, way)
            assert_own_rows(module, whole, f"{name}, {way}: ")
            assert len(plain.state_dict()["state"]) == len(optimizer.state_dict()["state"])
            assert same(found, expected), f"{name}, {way}: outside of training"


def made_collection(capacity: int | None = None) -> speedtorch.EmbeddingBagCollection:
    torch.manual_seed(5)
    config = speedtorch.EmbeddingBagConfig
    sizes = [(37, 4, "a"), (5, 4, "b"), (29, 2, "c")]
    return speedtorch.EmbeddingBagCollection(
        tables=[config(rows, width, name) for rows, width, name in sizes],
        device=own_device(),
        capacity=capacity,
    )


def check_collections(capacity: int | None = None) -> None:
    """Several tables in one exchange, some of them of another width."""

    def batch(step: int, rank: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(100 * step + rank)
        sizes = {"a": 37, "b": 5, "c": 29}
        found = {n: torch.randint(r, (3, 2), generator=random) for n, r in sizes.items()}
        return {name: ids.to(own_device()) for name, ids in found.items()}

    def train(model: nn.Module, ranks: Sequence[int]) -> None:
        optimizer = optim.Adam(model.parameters(), lr=0.25)
        speedtorch.attach(optimizer, model)
        for step in range(STEPS):
            optimizer.zero_grad()
            found = [model(batch(step, rank)).values() for rank in ranks]
            losses = [(f * factors(f, step + k)).sum() for f, k in zip(found, ranks, strict=True)]
            (torch.stack(losses).sum() / len(ranks)).backward()
            optimizer.step()

    make = partial(made_collection, capacity)
    model, whole = train_both(make, train, make_whole=made_collection)
    assert_own_rows(model, whole)
    with torch.no_grad():
        for rank in range(dist.get_world_size()):
            ids = batch(99, rank)
            assert torch.equal(model(ids).values(), whole(ids).values())


class Biased(nn.Module):
    """Rows that are multiplied by a factor, and a parameter with a gradient of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = module_of(CASES["Adam"])
        self.bias = nn.Parameter(torch.zeros(WIDTH, device=own_device()))

    def forward(self, ids: Tensor, factor: float = 1.0) -> Tensor:
        found: Tensor = self.rows(ids) * factor + self.bias
        return found


@contextmanager
def soon(what: str) -> Iterator[None]:
    """On every rank what is within ends soon after the last rank has begun it.

    Ranks of one machine have the same clock.
    """
    begin = time.monotonic()
    yield
    every: list[tuple[float, float]] = [(begin, time.monotonic())] * dist.get_world_size()
    dist.all_gather_object(every, every[dist.get_rank()])
    last = max(begun for begun, _ in every)
    late = [rank for rank, (_, ended) in enumerate(every) if ended - last > SOON]
    assert not late, f"{what}: ranks {late}"


@contextmanager
def raised_late() -> Iterator[None]:
    """The CPU raises what is wrong with a batch as late as a GPU does."""
    with ExitStack() as stack:
        for module in (fixed_size_batch, fixed_memory, fault_consensus, fixed_requests):
            stack.enter_context(patch.object(module, "raises_at_once", lambda device: False))
        yield


def of_machines(on_machine: bool) -> Any:
    """Ranks of one machine, or of several, which share no memory."""
    return nullcontext() if on_machine else patch.object(Ranks.of(), "_barrier", None)


def raises(kind: type[Exception], message: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=message):
        call()
