"""Random programs of ranks that train, save in every way, follow and load one folder."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from sharded_checkpoints import Run, assert_same
from torch import Tensor

import speedtorch

SETTINGS: list[dict[str, Any]] = [{}, {"cache": "2KiB"}, {"stored": torch.bfloat16}]


class Program:
    """A run whose generations are known, and what ranks do with it: the same, in the same order."""

    def __init__(self, folder: str, seed: int) -> None:
        self.folder, self.chance = folder, random.Random(seed)
        self.own = random.Random(100 * seed + dist.get_rank())
        self.settings = self.chance.choice(SETTINGS)
        self.run, self.step = Run(seed, **self.settings), 0
        if self.chance.random() < 0.7:
            for table in self.run.tables:
                table.track_changes()
        self.kept: dict[int, dict[str, Tensor]] = {}
        self.saving: Any = None

    def train(self) -> None:
        self.run.train(self.step, 2)
        self.step += 2

    def save(self) -> None:
        self.wait()
        base = self.chance.choice([None, *self.kept])
        most = self.chance.choice([None, 1, 8000])
        background = self.chance.random() < 0.5
        how: Any = {"keep": 99, "base": base, **self.run.parts()}
        if background:
            saving = speedtorch.async_save(self.folder, max_memory=most, **how)
            self.saving = saving, self.run.own()
        else:
            made = speedtorch.save(self.folder, **how)
            self.kept[made.generation] = self.run.own()

    def wait(self) -> None:
        if self.saving is not None:
            future, state = self.saving
            self.kept[future.result(60).generation] = state
            self.saving = None

    def load(self) -> None:
        self.wait()
        for number in self.chance.sample([*self.kept], min(1, len(self.kept))):
            speedtorch.load(self.folder, generation=number, **self.run.parts())
            assert_same(self.run.own(), self.kept[number])

    def follow(self) -> None:
        self.wait()
        if len(self.kept) > 1:
            first, then = sorted(self.chance.sample([*self.kept], 2))
            reader = Run(9, **self.settings)
            speedtorch.load(self.folder, generation=first, **reader.parts())
            speedtorch.load(self.folder, generation=then, since=first, **reader.parts())
            assert_same(reader.own(), self.kept[then])

    def write(self) -> None:
        """Each rank writes to what it has, or not."""
        table = self.own.choice(self.run.tables)
        row, weight = self.own.randrange(table.rows), table["weight"]
        if self.own.random() < 0.3:
            weight[row] = 1.0
        else:
            table.scatter(torch.tensor([row]), torch.full_like(weight[:1], 0.5), "weight")


def check_program(folder: str, seed: int) -> None:
    program = Program(folder, seed)
    for _ in range(25):
        name = program.chance.choice(
            ["train", "train", "save", "save", "save", "load", "follow", "write"]
        )
        getattr(program, name)()
    program.wait()
    for number, expected in program.kept.items():
        speedtorch.load(folder, generation=number, **program.run.parts())
        assert_same(program.run.own(), expected)
