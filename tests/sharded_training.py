"""Trains rows that are shared out among ranks, and all of them in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.nn.row_module import RowModule
from speedtorch.parallel.dealt_rows import DealtRows
from speedtorch.parallel.ranks import Ranks
from speedtorch.parallel.sharded_rows import ShardedRows

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
    """

    make: Callable[..., optim.Optimizer]
    settings: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    kind: str = "rows"
    lookups: int = 1
    uneven: bool = False


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


def first_rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))


def ids_of(case: Case, step: int, lookup: int, rank: int) -> Tensor:
    """Some are asked for by several ranks, and some several times."""
    random = torch.Generator().manual_seed(1000 * step + 10 * lookup + rank)
    count = (step + 2 * rank) % 4 if case.uneven else 4
    ids = torch.randint(ROWS // 2 if step % 2 else ROWS, (count, 2), generator=random)
    return ids.where(torch.rand(count, 2, generator=random) < 0.8, 5)


def factors(result: Tensor, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, result.shape, generator=random).to(result)


def module_of(case: Case, rows: Tensor, **settings: Any) -> RowModule:
    kind = speedtorch.Embedding if case.kind == "rows" else speedtorch.EmbeddingBag
    return kind.from_pretrained(rows, freeze=False, **(case.settings | settings))


def loss_of(module: nn.Module, case: Case, step: int, rank: int) -> Tensor:
    total = torch.zeros(())
    for lookup in range(case.lookups):
        found = module(ids_of(case, step, lookup, rank))
        total = total + (found * factors(found, 100 * step + 7 * lookup + rank)).sum()
    return total


def train(
    module: RowModule, case: Case, loss: Callable[[int], Tensor]
) -> tuple[list[Tensor], optim.Optimizer]:
    optimizer = case.make(module.parameters(), **case.optimizer)
    speedtorch.attach(optimizer, module)
    seen = []
    for step in range(STEPS):
        if step % 5 == 2:
            with torch.no_grad():
                seen.append(module(torch.arange(ROWS).view(-1, 1)).clone())
        optimizer.zero_grad()
        loss(step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    module.flush()
    return seen, optimizer


def shares(values: Tensor, dealt: DealtRows, rank: int) -> Tensor:
    return torch.cat([values[each.rows.start : each.rows.stop] for each in dealt.blocks(rank)])


def sharded(case: Case, ranks: Ranks, dealt: DealtRows, *, average: bool) -> RowModule:
    """This rank's share of the rows, and lookups of all."""
    padding = case.settings.get("padding_idx")
    own = None
    if padding is not None:
        padding %= ROWS
        rank, place = divmod(int(dealt.numbers(torch.tensor(padding))), dealt.room)
        own = place if rank == ranks.rank else None
    module = module_of(case, shares(first_rows(), dealt, ranks.rank), padding_idx=own)
    module.padding_idx = padding
    module.lookups = ShardedRows(
        module.trained_rows,
        dealt,
        ranks,
        0,
        padding,
        average=average,
        sparse=lambda: bool(case.settings.get("sparse")),
    )
    return module


def check_training(average: bool) -> None:
    """Every case gives the numbers of one process that has all rows and all batches."""
    ranks = Ranks()
    dealt = DealtRows(ROWS, ranks.size, 4)
    for name, case in CASES.items():
        module = sharded(case, ranks, dealt, average=average)
        seen, optimizer = train(
            module, case, lambda step, m=module, c=case: loss_of(m, c, step, ranks.rank)
        )
        whole = module_of(case, first_rows())
        divisor = ranks.size if average else 1

        def of_all(step: int, whole: RowModule = whole, case: Case = case) -> Tensor:
            each = [loss_of(whole, case, step, rank) for rank in range(dist.get_world_size())]
            return torch.stack(each).sum() / divisor  # noqa: B023

        expected, plain = train(whole, case, of_all)
        table, found = whole.table, module.table
        for entry in table.fields:
            assert torch.equal(found[entry], shares(table[entry], dealt, ranks.rank)), (
                f"{name}: {entry}"
            )
        assert len(plain.state_dict()["state"]) == len(optimizer.state_dict()["state"])
        assert all(map(torch.equal, seen, expected)), f"{name}: lookups outside of training"


def check_errors() -> None:
    """What one rank does wrong raises on all of them, and nothing has changed."""
    ranks = Ranks()
    dealt, case = DealtRows(ROWS, ranks.size, 4), CASES["Adam"]
    module = sharded(case, ranks, dealt, average=True)
    optimizer = optim.Adam(module.parameters())
    speedtorch.attach(optimizer, module)
    before = module.table["weight"].clone()
    ids = torch.tensor([1, ROWS, -2]) if ranks.rank == 1 else torch.tensor([1, 2])
    message = (
        "id 41 at position 1 is out of range for a table of 41 rows .2 of 3"
        if ranks.rank == 1
        else r"an id on ranks \[1\] is out of range; no row was moved"
    )
    raises(IndexError, message, lambda: module(ids))
    assert torch.equal(module.table["weight"], before)
    module(torch.tensor([3, 4])).sum().backward()
    optimizer.step()
    module.flush()
    changed = (module.table["weight"] != before).any(1)
    numbers = dealt.numbers(torch.tensor([3, 4])) - ranks.rank * dealt.room
    expected = torch.zeros(dealt.share(ranks.rank), dtype=torch.bool)
    expected[numbers[(numbers >= 0) & (numbers < dealt.room)]] = True
    assert torch.equal(changed, expected)

    other = sharded(case, ranks, dealt, average=True)
    other.lookups._number = 1  # type: ignore[attr-defined]
    asked = other if ranks.rank == 1 else module
    raises(RuntimeError, r"ranks \[\d.*\] look up rows of another module", lambda: asked(ids[:1]))


def raises(kind: type[Exception], message: str, call: Callable[[], object]) -> None:
    import pytest

    with pytest.raises(kind, match=message):
        call()
