"""Ranks that share rows save one run together, and load it on any number of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rank_processes import own_device
from sharded_training import row_modules
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

import speedtorch
from speedtorch.table.row_shard import RowShard

ROWS, STEPS = 301, 5


def batch(step: int) -> Tensor:
    return torch.randint(ROWS, (12,), generator=torch.Generator().manual_seed(step))


def local(values: Tensor) -> Tensor:
    """This rank's part of a DTensor or of rows."""
    values = values.to_local() if isinstance(values, DTensor) else values
    return values.field if isinstance(values, RowShard) else values


class Run:
    """Three tables and a layer with Adam; gradients of rows are whole numbers of few ids."""

    def __init__(
        self, seed: int = 0, *, shard: bool = True, stored: Any = None, cache: Any = None
    ) -> None:
        torch.manual_seed(seed)
        device = own_device()
        config = speedtorch.EmbeddingBagConfig
        bags = [config(ROWS, 4, "user"), config(2, 4, "few")]  # fewer rows than ranks
        self.model = nn.ModuleDict(
            {
                "emb": speedtorch.Embedding(ROWS, 6, device=device, stored=stored, cache=cache),
                "bags": speedtorch.EmbeddingBagCollection(bags, device=device),
                "out": nn.Linear(3, 3, device=device),
            }
        )
        if shard:
            speedtorch.shard(self.model)
        self.optimizer = optim.Adam(self.model.parameters(), lr=0.1)
        speedtorch.attach(self.optimizer, self.model)

    def train(self, first: int, steps: int) -> Any:
        for step in range(first, first + steps):
            self.step(batch(step))
        return self

    def step(self, ids: Tensor) -> None:
        model: Any = self.model
        self.optimizer.zero_grad()
        loss = model["emb"](ids).sum() + model["bags"]({"user": ids, "few": ids % 2}).values().sum()
        (loss + model["out"](torch.ones(3, device=own_device())).sum()).backward()
        self.optimizer.step()

    @property
    def tables(self) -> list[speedtorch.HostTable]:
        return [module.table for module in row_modules(self.model)]

    def tracked(self) -> Run:
        """Notes changed rows from now on."""
        for table in self.tables:
            table.track_changes()
        return self

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def own(self) -> dict[str, Tensor]:
        """What this rank has, by name."""
        found = dict(self.model.state_dict())
        for number, kept in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}.{key}": each for key, each in kept.items()}
        return {name: local(each).detach().cpu().clone() for name, each in found.items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, each in one.items():
        assert torch.equal(each, other[name]), name


def check_loaded(folder: str, stored: Any) -> None:
    """Another number of ranks has the rows of one process that loads the same."""
    run, whole = Run(seed=5, stored=stored), Run(seed=6, shard=False, stored=stored)
    for each in (run, whole):
        assert speedtorch.load(folder, **each.parts())["step"] == STEPS
    assert_rows_of(run, whole)


def assert_rows_of(run: Run, whole: Run) -> None:
    expected = whole.model.state_dict()
    for name, rows in run.model.state_dict().items():
        if isinstance(rows, RowShard):
            for there, here in rows.blocks:
                mine = rows.field[here.start : here.stop]
                assert torch.equal(mine, expected[name][there.start : there.stop])
        else:
            assert torch.equal(rows, expected[name])


def saved(folder: str, run: Run, *, background: bool = False, **how: Any) -> speedtorch.types.Saved:
    if background:
        return speedtorch.async_save(folder, keep=9, **run.parts(), **how).result(60)
    return speedtorch.save(folder, keep=9, **run.parts(), **how)


def size(made: speedtorch.types.Saved) -> int:
    return sum(each.stat().st_size for each in Path(made.path).glob("rows*"))
