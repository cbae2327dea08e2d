"""Trains rows that are shared out among ranks, and all of them in one process."""

from __future__ import annotations

import copy
import io
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import optimizer_cases
import paces
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from rank_processes import own_device
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.nn.row_module import RowModule
from speedtorch.parallel.block_cyclic import BlockCyclic
from speedtorch.parallel.clip import clip_grad_norm_
from speedtorch.parallel.shard import shard
from speedtorch.table.row_blocks import rows_of_a_block

ROWS, WIDTH, STEPS = 41, 3, 12


@dataclass(frozen=True)
class Case:
    """How rows are looked up and trained.

    Attributes:
        kind: "rows" or "bags".
        make: the optimizer.
        settings: of the module.
        lookups: of each step.
        uneven: ranks have batches of other sizes, some of none.
        capacity: of the rows that are shared out; those of one process have none.
        apart: each lookup has a backward of its own, before the next lookup.
        read: the gradient is read between backward and step.
        rows: of the table.
        pairs: of ids in a batch of one lookup.
    """

    make: Callable[..., optim.Optimizer]
    settings: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    kind: str = "rows"
    lookups: int = 1
    uneven: bool = False
    capacity: int | None = None
    apart: bool = False
    read: bool = False
    rows: int = ROWS
    pairs: int = 4

    @property
    def is_sparse(self) -> bool:
        """Whether gradients are."""
        return bool(self.settings.get("sparse"))


CASES = {
    "SGD": Case(optim.SGD, optimizer={"lr": 0.25, "momentum": 0.5}),
    "Adam": Case(optim.Adam),
    "AdamW, two lookups": Case(optim.AdamW, lookups=2),
    "Adagrad, uneven": Case(optim.Adagrad, uneven=True),
    "RMSprop, two lookups, uneven": Case(optim.RMSprop, lookups=2, uneven=True),
    "SparseAdam": Case(optim.SparseAdam, {"sparse": True}),
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


def first_rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))


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


def module_of(case: Case, capacity: int | None = None) -> RowModule:
    kind = speedtorch.Embedding if case.kind == "rows" else speedtorch.EmbeddingBag
    torch.manual_seed(3)
    return kind(case.rows, WIDTH, **case.settings, capacity=capacity).to(own_device())


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
            loss_of(module, case, step, ranks, part, number).backward()  # type: ignore[no-untyped-call]
        if divisor != 1 and (gradient := module.weight.grad) is not None:
            module.weight.grad = (
                gradient.coalesce() / divisor if case.is_sparse else gradient / divisor
            )
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


def share_of(values: Tensor, rank: int, ranks: int) -> Tensor:
    """The rows of a rank."""
    sharding = BlockCyclic.of(len(values), ranks, rows_of_a_block((WIDTH,)))
    return torch.cat([values[rows.start : rows.stop] for rows, _ in sharding.blocks(rank)])


def assert_own_rows(module: RowModule, whole: RowModule, where: str = "") -> None:
    """Rows and state of this rank have the bits of those of one process."""
    module.flush()
    whole.flush()
    for entry in whole.table.fields:
        own = share_of(whole.table[entry], dist.get_rank(), dist.get_world_size())
        assert torch.equal(module.table[entry], own), f"{where}{entry}"


WAYS = ["at once", "announced", "now and then", "prefetched", "prefetched in part"]
# What the ordinary run tests of two and of three ranks; all of it if every way is asked for.
WAYS_OF = {2: ["at once", "prefetched"], 3: ["announced", "now and then", "prefetched in part"]}
# Every optimizer of torch that treats rows separately, once.
OPTIMIZERS = {
    name: Case(case.make, optimizer=dict(case.settings), uneven=True)
    for name, case in optimizer_cases.CASES.items()
    if case.make is not optim.SparseAdam  # which wants sparse gradients
}


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
            assert all(map(torch.equal, found, expected)), f"{name}, {way}: outside of training"


def check_programs(first: int, count: int) -> None:
    """Random programs, with and without averages, give the bits of one process."""
    kinds = [items for cases in (CASES, FIXED, OPTIMIZERS) for items in cases.items()]
    for seed in range(first, first + count):
        choose = random.Random(seed)
        name, case = choose.choice(kinds)
        lookups = choose.randint(1, 3)
        apart = choose.random() < 0.5 and case.capacity is None
        case = replace(
            case,
            lookups=lookups,
            uneven=choose.random() < 0.5,
            apart=apart,
            read=choose.random() < 0.3,
        )
        average, way = choose.random() < 0.7, choose.choice(WAYS)
        name = f"program {seed}: {name}, {lookups} lookups, apart={apart}, average={average}"
        check_training(average, {name: case}, [way])


def check_repeated() -> None:
    """Whatever the gradients, a second run has the bits of the first, and so has one that waits."""
    rank, found = dist.get_rank(), []
    case = CASES["RMSprop, two lookups, uneven"]
    for way in ("at once", "announced", "prefetched"):
        for _ in range(2):
            module = module_of(case)
            shard(module)
            optimizer = optim.Adam(module.parameters(), lr=0.1)
            speedtorch.attach(optimizer, module)
            batches: Iterable[list[Tensor]] = batches_of(case, [rank])
            if way == "prefetched":
                batches = speedtorch.prefetch(batches, module, ids=lambda batch: batch)
            for step, batch in enumerate(batches):
                optimizer.zero_grad()
                if way == "announced":
                    module.announce(*batch)
                looked_up = torch.cat([module(ids) for ids in batch])
                random = torch.Generator().manual_seed(10 * step + rank)
                looked_up.backward(torch.randn(looked_up.shape, generator=random).to(looked_up))
                optimizer.step()
            found.append(own_rows(module))
    for run in found[1:]:
        assert all(map(torch.equal, run, found[0]))


def check_errors() -> None:
    """What one rank does wrong raises on all of them, and nothing has changed."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = nn.ModuleDict({name: module_of(CASES["Adam"]) for name in ("one", "other")})
    shard(model)
    module = model["one"]
    optimizer = optim.Adam(model.parameters())
    speedtorch.attach(optimizer, model)
    before = module.table["weight"].clone()
    ids, message = local_ids(1, 2), r"ids of ranks \[1\] are out of range or not integers. No row"
    if rank == 1:
        ids = local_ids(1, ROWS, -2)
        message = "id 41 at position 1 is out of range for a table of 41 rows .2 of 3"
    raises(IndexError, message, lambda: module(ids))
    assert torch.equal(module.table["weight"], before)
    module(local_ids(3, 4)).sum().backward()
    optimizer.step()
    module.flush()
    every = torch.zeros(ROWS, dtype=torch.bool)
    every[[3, 4]] = True
    assert torch.equal((module.table["weight"] != before).any(1), share_of(every, rank, ranks))
    looked_up = model["other"] if rank == 1 else module
    message = r"ranks \[0.*\] are at a new lookup of 'one' .*, ranks \[1\] are at .* of 'other'"
    raises(RuntimeError, message, lambda: looked_up(ids[:1]))


def check_refusals() -> None:
    """What cannot be sharded is refused, and the modules beside it stay as they are."""
    used, once = module_of(CASES["Adam"]), module_of(CASES["Adam"])
    used(local_ids(1))
    shard(once)
    refused: list[tuple[nn.Module, type[Exception], str]] = [
        (used, RuntimeError, "its rows have been used, were passed"),
        (once, RuntimeError, "its rows have been used, were passed"),
        (
            speedtorch.Embedding(ROWS, WIDTH, scale_grad_by_freq=True),
            NotImplementedError,
            "do not support scale_grad_by_freq, which needs the counts of all ranks",
        ),
        (
            speedtorch.Embedding(ROWS, WIDTH, 3, max_norm=1.0, capacity=4),
            NotImplementedError,
            "padding_idx, max_norm and capacity together cannot be sharded",
        ),
    ]
    for module, kind, message in refused:
        fresh = module_of(CASES["Adam"])
        model = nn.Sequential(fresh, module)
        raises(kind, message, lambda model=model: shard(model))  # type: ignore[misc]
        assert fresh.table.rows == ROWS
    fixed = module_of(CASES["Adam"], 4)
    shard(fixed)
    step, given = (lambda: None), {"modules": fixed, "optimizers": optim.Adam(fixed.parameters())}
    message = "rows of Embedding are sharded among ranks, and a CUDA graph cannot"
    raises(NotImplementedError, message, lambda: speedtorch.graphed(step, **given))
    raises(ValueError, "Linear has no speedtorch.Embedding", lambda: shard(nn.Linear(2, 2)))
    raises(NotImplementedError, "sharded rows cannot be copied", lambda: copy.deepcopy(once))
    saved = once.state_dict()["weight"]
    raises(TypeError, "torch.distributed.checkpoint.save", lambda: torch.save(saved, io.BytesIO()))
    kept = copy.deepcopy(once.state_dict())
    before = once.table["weight"].clone()
    once.table["weight"].add_(1)
    once.load_state_dict(kept)
    assert torch.equal(once.table["weight"], before)
    other = module_of(CASES["Adam"])
    whole = torch.randn(ROWS, WIDTH).requires_grad_()
    shard(other)
    other.load_state_dict({"weight": whole})
    assert not other.table["weight"].requires_grad
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert torch.equal(other.table["weight"], share_of(whole.detach(), rank, ranks))
    raises(NotImplementedError, "this tensor has no rows of other ranks", lambda: saved + 1)
    assert f"[{ROWS}, {WIDTH}]" in repr(saved)


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
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def batch(step: int, rank: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(100 * step + rank)
        sizes = {"a": 37, "b": 5, "c": 29}
        found = {n: torch.randint(r, (3, 2), generator=random) for n, r in sizes.items()}
        return {name: ids.to(own_device()) for name, ids in found.items()}

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        found = model(batch(step, rank)).values()
        return (found * factors(found, step + rank)).sum()

    model, whole = made_collection(capacity), made_collection()
    shard(model)
    results = []
    for training, of_ranks in ((model, [rank]), (whole, list(range(ranks)))):
        optimizer = optim.Adam(training.parameters(), lr=0.25)
        speedtorch.attach(optimizer, training)
        for step in range(STEPS):
            optimizer.zero_grad()
            losses = torch.stack([loss(training, step, k) for k in of_ranks])
            (losses.sum() / (ranks if training is whole else 1)).backward()
            optimizer.step()
        with torch.no_grad():
            results.append([training(batch(99, k)).values() for k in range(ranks)])
    assert all(map(torch.equal, *results))


def states_of(module: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    return {"model": module.state_dict(), "optimizer": optimizer.state_dict()}


def trained(seed: int, *, alone: bool = False) -> tuple[nn.Module, optim.Optimizer]:
    """Two modules, and what some steps have made of them."""
    torch.manual_seed(seed)
    rows = speedtorch.Embedding(ROWS, WIDTH, device=own_device())
    model = nn.ModuleDict({"rows": rows, "tables": made_collection()})
    if not alone:
        shard(model)
    optimizer = optim.Adam(model.parameters(), lr=0.25)
    speedtorch.attach(optimizer, model)
    random = torch.Generator().manual_seed(seed + dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        ids = torch.randint(5, (4, 2), generator=random).to(own_device())
        found = model["tables"](dict.fromkeys("abc", ids)).values()
        (model["rows"](ids).sum() + (found * 2).sum()).backward()
        optimizer.step()
    return model, optimizer


def own_rows(model: nn.Module) -> list[Tensor]:
    """Rows and state of every table here."""
    tables = [module.table for module in model.modules() if isinstance(module, RowModule)]
    return [table[name].clone() for table in tables for name in table.fields]


def save_checkpoint(folder: str, wholes: str, in_background: bool) -> None:
    """Saves what this many ranks have trained, and all rows of it for check_checkpoint()."""
    model, optimizer = trained(1)
    if in_background:
        saving = checkpoint.async_save(states_of(model, optimizer), checkpoint_id=folder)
        saved = own_rows(model)
        model["rows"](local_ids(*range(5))).sum().backward()
        optimizer.step()
        model["rows"].flush()
        assert not all(map(torch.equal, own_rows(model), saved))
        saving.result()
    else:
        checkpoint.save(states_of(model, optimizer), checkpoint_id=folder)
        saved = own_rows(model)
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, saved)
    if dist.get_rank() == 0:
        torch.save(shares, wholes)


def rows_saved(shares: list[Any], number: int, ranks: int, rows: int, width: int) -> Tensor:
    """All rows of a field, of the shares of ranks."""
    whole = torch.empty(rows, width)
    sharding = BlockCyclic.of(rows, ranks, rows_of_a_block((width,)))
    for rank in range(ranks):
        for table, own in sharding.blocks(rank):
            whole[table.start : table.stop] = shares[rank][number][own.start : own.stop]
    return whole


def check_checkpoint(folder: str, wholes: str, saved_by: int, alone: bool) -> None:
    """Loads what other ranks have saved, and has the same bits."""
    model, optimizer = trained(2, alone=alone)
    state = states_of(model, optimizer)
    checkpoint.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    shares = torch.load(wholes)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, RowModule)]
    widths = [module.embedding_dim for module in model.modules() if isinstance(module, RowModule)]
    for number, found in enumerate(own_rows(model)):
        rows, width = sizes[number // 3], widths[number // 3]
        expected = whole = rows_saved(shares, number, saved_by, rows, width)
        if not alone:
            sharding = BlockCyclic.of(rows, ranks, rows_of_a_block((width,)))
            expected = torch.cat([whole[t.start : t.stop] for t, _ in sharding.blocks(rank)])
        assert torch.equal(found, expected), number
    assert int(optimizer.state_dict()["state"][0]["step"]) == 3
    # What was held before is what was loaded, too.
    expected = rows_saved(shares, 0, saved_by, ROWS, WIDTH)[:5]
    found = model["rows"](local_ids(*range(5)))
    assert torch.equal(found.cpu(), expected)


class Biased(nn.Module):
    """Rows that are multiplied by a factor, and a parameter with a gradient of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = module_of(CASES["Adam"])
        self.bias = nn.Parameter(torch.zeros(WIDTH, device=own_device()))

    def forward(self, ids: Tensor, factor: float = 1.0) -> Tensor:
        found: Tensor = self.rows(ids) * factor + self.bias
        return found


def check_data_parallel() -> None:
    """DistributedDataParallel trains the dense part of a sharded model, and that alone."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    case = CASES["Adam"]
    model, whole = Biased(), Biased()
    model._ddp_params_and_buffers_to_ignore = ["a.name"]
    shard(model)
    assert model._ddp_params_and_buffers_to_ignore == ["a.name", "rows.weight"]
    wrapped = nn.parallel.DistributedDataParallel(model)
    for given, of_ranks, divisor in ((wrapped, [rank], 1), (whole, range(ranks), ranks)):
        optimizer = optim.Adam(given.parameters(), lr=0.25)
        speedtorch.attach(optimizer, given)
        for step, batch in enumerate(batches_of(case, of_ranks)):
            optimizer.zero_grad()
            (loss_of(given, case, step, of_ranks, batch) / divisor).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert torch.equal(model.bias, whole.bias) and bool((model.bias != 0).all())
    assert_own_rows(model.rows, whole.rows)

    outer = nn.Sequential(Biased())
    shard(outer[0])

    def in_outer_wrapper() -> object:
        return nn.parallel.DistributedDataParallel(outer)(local_ids(1))

    raises(NotImplementedError, "DistributedDataParallel", in_outer_wrapper)


def check_clipping(sparse: bool) -> None:
    """All gradients are clipped by the norm of the whole model, on every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ids = [local_ids(k, k + 7, 2, 30 + k).view(2, 2) for k in range(ranks)]

    def made() -> Biased:
        model = Biased()
        model.rows = speedtorch.Embedding(ROWS, WIDTH, sparse=sparse, device=own_device())
        return model

    cases = ((2.0, 1.0, None), (float("inf"), 0.5, False), (1.0, 1e6, True))
    for norm_type, most, foreach in cases:
        model, whole = made(), made()
        shard(model)
        wrapped = nn.parallel.DistributedDataParallel(model)
        (wrapped(ids[rank]) * (rank + 1)).sum().backward()
        sums = [(whole(batch) * (k + 1)).sum() for k, batch in enumerate(ids)]
        torch.stack(sums).mean().backward()
        if sparse:
            weight = whole.rows.weight
            weight.grad = weight.grad.coalesce()
            expected = torch.linalg.vector_norm(
                torch.cat([weight.grad.values().flatten(), whole.bias.grad.flatten()]), norm_type
            )
        else:
            expected = nn.utils.clip_grad_norm_(whole.parameters(), most, norm_type)
        found = clip_grad_norm_(wrapped.parameters(), most, norm_type, foreach=foreach)
        torch.testing.assert_close(found, expected)
        clipped = torch.linalg.vector_norm(model.bias.grad, norm_type)
        factor = min(1.0, float(most / expected))
        before = torch.full((WIDTH,), 4.0) * torch.arange(1, ranks + 1).double().mean().float()
        torch.testing.assert_close(model.bias.grad.cpu(), before * factor)
        assert clipped <= most + 1e-6
        raises(
            NotImplementedError,
            "Use speedtorch.clip_grad_norm_",
            lambda model=model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),  # type: ignore[misc]
        )
        if not sparse:  # torch clips no values of sparse ones; a value is one of its own rank
            nn.utils.clip_grad_value_(model.parameters(), 0.25)
            held = own_gradient(model.rows)
            assert held is None or float(held.abs().max()) <= 0.25
    model.bias.grad.fill_(float("nan"))
    raises(
        RuntimeError,
        "norm of order 1.0 .* got nan",
        lambda: clip_grad_norm_(wrapped.parameters(), 0.5, 1.0, error_if_nonfinite=True),
    )
    alone = Biased()
    alone(ids[0]).sum().backward()
    other = Biased()
    other(ids[0]).sum().backward()
    found, expected = (
        clip_grad_norm_(alone.parameters(), 0.5),
        nn.utils.clip_grad_norm_(other.parameters(), 0.5),
    )
    assert torch.equal(found, expected)
    assert torch.equal(alone.bias.grad, other.bias.grad)
    alone.bias.grad.fill_(float("nan"))
    raises(
        RuntimeError,
        "non-finite",
        lambda: clip_grad_norm_(alone.parameters(), 0.5, error_if_nonfinite=True),
    )


def check_clipping_of_dtypes() -> None:
    """Rows of several dtypes, of some of which one rank alone has gradients, or none has."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dtypes = (torch.float64, torch.bfloat16, torch.float32)
    every = [(first,) for first in dtypes] + [dtypes]
    for of_modules in every:
        for norm_type in (2.0, float("inf"), 1.0):
            made = [
                nn.ModuleList(speedtorch.Embedding(ROWS, WIDTH, dtype=kind) for kind in of_modules)
                for _ in range(2)
            ]
            shard(made[0])
            for model, of_ranks in zip(made, ([rank], range(ranks)), strict=True):
                for module in model:  # row 0 is of the first rank
                    ids = torch.zeros(len(of_ranks), dtype=torch.int64)
                    (module(ids) * 2).mean().backward()
            found = clip_grad_norm_(made[0].parameters(), 0.25, norm_type)
            expected = nn.utils.clip_grad_norm_(made[1].parameters(), 0.25, norm_type)
            close = {"rtol": 1e-2, "atol": 1e-2} if torch.bfloat16 in of_modules else {}
            torch.testing.assert_close(found, expected, check_dtype=False, **close)
            assert found.dtype == max(of_modules, key=lambda dtype: torch.finfo(dtype).bits) or (
                of_modules == (torch.bfloat16,)
            )
            for module, whole in zip(*made, strict=True):
                theirs, ours = own_gradient(whole), own_gradient(module)
                assert (ours is None or ours.numel() == 0) == (rank > 0)
                if rank == 0:
                    torch.testing.assert_close(ours, theirs, **close)


class Accelerator:
    """Clips as accelerate's does, whose norm transformers' Trainer logs without clipping."""

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: int = 2
    ) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)


def check_accelerated_clipping() -> None:
    """Torch's norm is refused with the remedy, which gives the norm and leaves the gradients."""
    accelerator, model = Accelerator(), Biased()
    shard(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped(local_ids(1, 2)).sum().backward()

    def gradients() -> list[Tensor | None]:
        return [own_gradient(model.rows), model.bias.grad]

    before = [None if gradient is None else gradient.clone() for gradient in gradients()]
    message = "accelerate: accelerator.clip_grad_norm_ = speedtorch.clip_grad_norm_"

    def clip() -> Tensor:
        return accelerator.clip_grad_norm_(wrapped.parameters(), float("inf"))

    raises(NotImplementedError, message, clip)
    vars(accelerator)["clip_grad_norm_"] = speedtorch.clip_grad_norm_
    torch.testing.assert_close(clip(), torch.tensor(3 * (1.0 + 1.0 + 4.0)).sqrt())
    for gradient, own in zip(gradients(), before, strict=True):
        assert gradient is own or torch.equal(gradient, own)


def check_a_missing_lookup(sleeps: float) -> None:
    """A lookup that not all ranks make raises with the module's name, when the time is over."""
    module = module_of(CASES["Adam"])
    shard(module)
    module(local_ids(1)).sum().backward()
    if dist.get_rank() == 0:
        message = "Embedding: an exchange with other ranks failed .* make the same lookups"
        raises(RuntimeError, message, lambda: module(local_ids(2)))
    else:
        time.sleep(sleeps)


def check_a_killed_rank(folder: str) -> None:
    """The other ranks end with an error; what was saved before is whole."""
    model, optimizer = trained(1)
    checkpoint.save(states_of(model, optimizer), checkpoint_id=folder)
    torch.save(own_rows(model), f"{folder}/{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 1:
        model["rows"](local_ids(1))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(3):
            model["rows"](local_ids(1)).sum().backward()
    except RuntimeError as error:
        Path(folder, "said").write_text(str(error))
        os._exit(3)


def check_saved_before(folder: str) -> None:
    """As check_checkpoint, on as many ranks as saved it."""
    model, optimizer = trained(2)
    state = states_of(model, optimizer)
    checkpoint.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    expected = torch.load(f"{folder}/{dist.get_rank()}.pt")
    assert all(map(torch.equal, own_rows(model), expected))


def raises(kind: type[Exception], message: str, call: Callable[[], object]) -> None:
    import pytest

    with pytest.raises(kind, match=message):
        call()
