"""Ranks that share rows out save one run together, and load it on any number of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import own_device
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.files import system_calls
from speedtorch.table.shared_rows import SharedRows

ROWS, STEPS = 301, 5


class Run:
    """Two tables and a layer with Adam; gradients of rows are whole numbers of few ids."""

    def __init__(self, seed: int = 0, *, shard: bool = True, stored: Any = None) -> None:
        torch.manual_seed(seed)
        device = own_device()
        config = speedtorch.EmbeddingBagConfig(ROWS, 4, "user")
        self.model = nn.ModuleDict(
            {
                "emb": speedtorch.Embedding(ROWS, 6, device=device, stored=stored),
                "bags": speedtorch.EmbeddingBagCollection([config], device=device),
                "out": nn.Linear(3, 3, device=device),
            }
        )
        if shard:
            speedtorch.shard(self.model)
        self.optimizer = optim.Adam(self.model.parameters(), lr=0.1)
        speedtorch.attach(self.optimizer, self.model)

    def train(self, first: int, steps: int) -> Run:
        model: Any = self.model
        for step in range(first, first + steps):
            ids = torch.randint(ROWS, (12,), generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            loss = model["emb"](ids).sum() + model["bags"]({"user": ids}).values().sum()
            (loss + model["out"](torch.ones(3, device=own_device())).sum()).backward()
            self.optimizer.step()
        return self

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def own(self) -> dict[str, Tensor]:
        """What this rank has, by name."""
        found = dict(self.model.state_dict())
        for number, kept in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}.{key}": each for key, each in kept.items()}
        return {
            name: (each.field if isinstance(each, SharedRows) else each).detach().cpu().clone()
            for name, each in found.items()
        }


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, each in one.items():
        assert torch.equal(each, other[name]), name


def check_saved(folder: str, stored: Any) -> None:
    """Ranks save and go on; what they load goes on as well, bit for bit."""
    run = Run(stored=stored).train(0, STEPS)
    saved = speedtorch.save(folder, **run.parts(), step=STEPS, rank=dist.get_rank())
    assert saved.generation == 1 and saved.nbytes > 0
    names = sorted(each for each in os.listdir(saved.path) if each.startswith("rows"))
    assert len(names) == 6  # weights and two moments of two tables
    other = Run(seed=3, stored=stored)
    found = speedtorch.load(folder, **other.parts())
    assert found == {"step": STEPS, "rank": 0}
    assert_same(other.own(), run.own())
    assert_same(other.train(STEPS, 3).own(), run.train(STEPS, 3).own())


def check_loaded(folder: str, stored: Any) -> None:
    """Another number of ranks has the rows of one process that loads the same."""
    run, whole = Run(seed=5, stored=stored), Run(seed=6, shard=False, stored=stored)
    for each in (run, whole):
        assert speedtorch.load(folder, **each.parts())["step"] == STEPS
    expected = whole.model.state_dict()
    for name, rows in run.model.state_dict().items():
        if isinstance(rows, SharedRows):
            for there, here in rows.blocks:
                mine = rows.field[here.start : here.stop]
                assert torch.equal(mine, expected[name][there.start : there.stop])
        else:
            assert torch.equal(rows, expected[name])


def check_failing(folder: str) -> None:
    """A rank that fails at one of its calls leaves all with an error, and the old generation."""
    run = Run().train(0, 2)
    speedtorch.save(folder, **run.parts(), step=1)
    before = run.own()
    for name in ("open", "write", "fsync"):
        real: Callable[..., Any] = getattr(system_calls.calls, name)

        def call(*args: Any) -> Any:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        failing = dist.get_rank() == dist.get_world_size() - 1
        if failing:
            setattr(system_calls.calls, name, call)
        try:
            speedtorch.save(folder, **run.parts(), step=2)
        except (OSError, RuntimeError) as error:
            assert "Input/output error" in str(error), error
            assert failing or f"rank {dist.get_world_size() - 1} raises" in str(error)
        else:
            raise AssertionError(f"{name} did not fail")
        finally:
            setattr(system_calls.calls, name, real)
        dist.barrier()
        assert os.listdir(folder) == ["generation-00000001"]
        dist.barrier()
    assert_same(run.own(), before)
    assert speedtorch.save(folder, **run.parts(), step=3).generation == 2
    assert speedtorch.load(folder)["step"] == 3


def check_differing(folder: str) -> None:
    """Ranks that save different tables are told on all."""
    run = Run()
    parts = run.parts() if dist.get_rank() else {"model": run.model}
    run.train(0, 1)
    try:
        speedtorch.save(folder, **parts)
    except ValueError as error:
        assert "saves the rows of" in str(error)
    else:
        raise AssertionError("it was saved")
    assert not Path(folder).exists()
