"""Random programs of ranks that train, save in every way, damage, follow and load one folder."""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import in_processes
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
            self.run.tracked()
        self.kept: dict[int, dict[str, Tensor]] = {}
        self.bases: dict[int, int | None] = {}
        self.damaged: set[int] = set()
        self.saving: Any = None

    def train(self) -> None:
        self.run.train(self.step, 2)
        self.step += 2

    @property
    def whole(self) -> list[int]:
        """The generations of which nothing is damaged."""
        return [number for number in self.kept if not self.damaged & {*self.chain(number)}]

    def chain(self, number: int) -> list[int]:
        base = self.bases[number]
        return [number, *([] if base is None else self.chain(base))]

    def save(self) -> None:
        self.wait()
        base = self.chance.choice([None, *self.whole])
        most = self.chance.choice([None, 1, 8000])
        background = self.chance.random() < 0.5
        how: Any = {"keep": 99, "base": base, **self.run.parts()}
        if background:
            saving = speedtorch.async_save(self.folder, max_memory=most, **how)
            self.saving = saving, self.run.own()
        else:
            made = speedtorch.save(self.folder, **how)
            self.kept[made.generation], self.bases[made.generation] = self.run.own(), made.base

    def wait(self) -> None:
        if self.saving is not None:
            future, state = self.saving
            made = future.result(60)
            self.kept[made.generation], self.bases[made.generation] = state, made.base
            self.saving = None

    def load(self) -> None:
        self.wait()
        for number in self.chance.sample(self.whole, min(1, len(self.whole))):
            speedtorch.load(self.folder, generation=number, **self.run.parts())
            assert_same(self.run.own(), self.kept[number])

    def follow(self) -> None:
        self.wait()
        if len(self.whole) > 1:
            first, then = sorted(self.chance.sample(self.whole, 2))
            reader = Run(9, **self.settings)
            speedtorch.load(self.folder, generation=first, **reader.parts())
            speedtorch.load(self.folder, generation=then, since=first, **reader.parts())
            assert_same(reader.own(), self.kept[then])

    def damage(self) -> None:
        """One rank removes, cuts or changes a file of a generation, as a rule of the last one."""
        self.wait()
        if len(self.whole) > 1:
            number = self.chance.choice([max(self.whole), self.chance.choice(self.whole)])
            name = self.chance.choice(["manifest.json", "rows-00001.safetensors"])
            path, how = f"{self.folder}/generation-{number:08d}/{name}", self.chance.randrange(3)
            if dist.get_rank() == 0:
                if how == 0:
                    os.unlink(path)
                elif how == 1:
                    os.truncate(path, os.path.getsize(path) - 1)
                else:
                    with open(path, "r+b") as file:
                        file.seek(-1, os.SEEK_END)
                        last = file.read(1)[0]
                        file.seek(-1, os.SEEK_END)
                        file.write(bytes([last ^ 4]))
            dist.barrier()
            self.damaged.add(number)

    def last(self) -> None:
        """Loads the last whole generation."""
        self.wait()
        if self.whole:
            reader = Run(8, **self.settings)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                speedtorch.load(self.folder, **reader.parts())
            assert any("loads generation" in str(each.message) for each in told) == (
                max(self.whole) < max(self.kept)
            )
            assert_same(reader.own(), self.kept[max(self.whole)])

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
            ["train", "train", "save", "save", "save", "load", "follow", "write", "damage", "last"]
        )
        getattr(program, name)()
    program.wait()
    for number, expected in program.kept.items():
        if number in program.whole:
            speedtorch.load(folder, generation=number, **program.run.parts())
            assert_same(program.run.own(), expected)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_random_programs_of_ranks(seed: int, tmp_path: Path) -> None:
    in_processes(2 + seed % 2, check_program, str(tmp_path), seed)
