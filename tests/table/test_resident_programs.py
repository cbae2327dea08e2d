"""Random programs on a file table with few resident rows: bitwise as on a table in memory.

Disk errors are injected into random calls. A program is repeated by its seed.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from file_faults import opened_as
from ordinary_run import programs
from torch import Tensor, optim

import speedtorch
from speedtorch import HostTable

ROWS, WIDTH = 24, 2
CHUNK = 20
"""Programs of one test."""
OPTIMIZERS: dict[str, tuple[tuple[str, ...], Callable[[Any], optim.Optimizer]]] = {
    "SGD": ((), lambda parameters: optim.SGD(parameters, lr=0.1)),
    "momentum": (
        ("momentum_buffer",),
        lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9),
    ),
    "Adam": (("exp_avg", "exp_avg_sq"), lambda parameters: optim.Adam(parameters, lr=0.1)),
}


class _Interruption(Exception):
    """Raised by user code."""


class _Pair:
    """A table, a module that trains its rows, and the optimizer."""

    def __init__(self, table: HostTable, kind: str, settings: dict[str, Any]) -> None:
        self.table, self._kind, self._settings = table, kind, settings
        self.begin()

    def begin(self) -> None:
        """Makes another module and optimizer for the table."""
        make = speedtorch.EmbeddingBag if self._settings["bag"] else speedtorch.Embedding
        given = {name: self._settings[name] for name in ("padding_idx", "capacity")}
        self.module = make.from_pretrained(self.table, freeze=False, **given)
        self.optimizer = OPTIMIZERS[self._kind][1](self.module.parameters())
        if OPTIMIZERS[self._kind][0]:
            speedtorch.attach(self.optimizer, self.module)

    def shaped(self, ids: Tensor) -> Tensor:
        """The ids of one bag, or the ids."""
        return ids.view(1, -1) if self._settings["bag"] else ids

    def look_up(self, ids: Tensor) -> Tensor:
        found: Tensor = self.module(self.shaped(ids))
        return found

    def end_step(self, found: Tensor) -> list[Tensor]:
        found.square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [found.detach().clone()]


@contextmanager
def disk_error(path: Path, kind: str, draws: random.Random) -> Iterator[None]:
    """In the block, the table's reads fail, or all its writes, or writes behind a byte."""
    if kind == "full":
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (draws.randrange(os.path.getsize(path)), before[1])
        )
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return
    with opened_as(path, os.O_WRONLY if kind == "reads" else os.O_RDONLY):
        yield


class Program:
    """A random program that runs on both tables in turns."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.draws = draws = random.Random(seed)
        self.folder, self.path = folder, folder / "rows"
        kind = draws.choice([*OPTIMIZERS])
        state, _ = OPTIMIZERS[kind]
        if draws.random() < 0.2:
            state = state[:1]  # the rest is beside the file
        self.capacity = draws.choice([None, None, None, 16])
        self.most = draws.randint(2, 8)  # ids of a lookup
        settings = {
            "bag": draws.random() < 0.2,
            "padding_idx": draws.choice([None, None, 3]),
            "capacity": self.capacity,
        }
        record = 4 * WIDTH * (1 + len(state))
        self.slots = draws.choice([1, 2, 5, 9, 16, ROWS])
        made = HostTable(
            ROWS,
            WIDTH,
            state=state,
            memory="file",
            path=self.path,
            resident=self.slots * record,
        )
        plain = HostTable(ROWS, WIDTH, state=state, memory="plain")
        tables = [table.normal_(seed=seed) for table in (made, plain)]
        self.pairs = [_Pair(table, kind, settings) for table in tables]
        self.failures = 0

    def ids(self) -> Tensor:
        top = ROWS if self.draws.random() < 0.5 else 7
        count = self.draws.randint(1, self.most)
        return torch.tensor([self.draws.randrange(top) for _ in range(count)])

    def both(self, run: Callable[[_Pair], list[Tensor] | None]) -> None:
        """Runs a part of the program on both tables, on the file at first with a disk error."""
        file, plain = self.pairs
        expected = run(plain) or []
        for found, value in zip(run(file) or [], expected, strict=True):
            assert torch.equal(found, value)

    def fail(self, run: Callable[[_Pair], object]) -> None:
        """Sometimes runs a part with a disk error on the file's table; it can be repeated then."""
        if self.draws.random() < 0.3:
            kind = self.draws.choice(["reads", "writes", "full"])
            try:
                with disk_error(self.path, kind, self.draws):
                    run(self.pairs[0])
            except OSError:
                self.failures += 1

    # ---- parts

    def step(self) -> None:
        ids = self.ids()
        self.fail(lambda pair: pair.look_up(ids))
        self.both(lambda pair: pair.end_step(pair.look_up(ids)))

    def step_of_two_lookups(self) -> None:
        ids, others = self.ids(), self.ids()
        announces = self.draws.random() < 0.5

        def run(pair: _Pair) -> list[Tensor]:
            if announces or self.capacity is not None:
                pair.module.announce(pair.shaped(ids), pair.shaped(others))
            found = pair.look_up(ids)
            return pair.end_step(torch.cat([found.view(-1), pair.look_up(others).view(-1)]))

        self.both(run)

    def interrupted_step(self) -> None:
        ids, late = self.ids(), self.draws.random() < 0.5

        def run(pair: _Pair) -> None:
            with suppress(_Interruption):
                found = pair.look_up(ids)
                if late:
                    found.sum().backward()
                raise _Interruption
            pair.optimizer.zero_grad()

        self.both(run)

    def evaluation(self) -> None:
        ids = self.ids()

        def run(pair: _Pair) -> list[Tensor]:
            with torch.no_grad():
                return [pair.look_up(ids)]

        self.fail(run)
        self.both(run)

    def gather(self) -> None:
        ids = self.ids()
        self.fail(lambda pair: pair.table.gather(ids, "weight"))
        self.both(lambda pair: [pair.table.gather(ids, "weight"), pair.table.gather(ids)])

    def scatter(self) -> None:
        ids = self.ids()
        rows = torch.full((len(ids), WIDTH), self.draws.random())
        self.fail(lambda pair: pair.table.gather(ids, "weight"))
        self.both(lambda pair: pair.table.scatter(ids, rows, "weight"))

    def view(self) -> None:
        row, factor = self.draws.randrange(ROWS), self.draws.random()
        self.fail(lambda pair: pair.table["weight"])

        def run(pair: _Pair) -> list[Tensor]:
            view = pair.table["weight"]
            view[row] *= factor
            return [view.clone()]

        self.both(run)

    def flush(self) -> None:
        self.fail(lambda pair: pair.table.flush())
        self.both(lambda pair: pair.table.flush())
        stored = np.fromfile(self.path, np.float32).reshape(ROWS, -1)[:, :WIDTH]
        assert np.array_equal(stored, self.pairs[1].table.numpy())

    def change_weight(self) -> None:
        def run(pair: _Pair) -> None:
            with torch.no_grad():
                pair.module.weight.mul_(0.5)

        self.both(run)

    def another_module(self) -> None:
        def run(pair: _Pair) -> None:
            del pair.module, pair.optimizer
            gc.collect()
            pair.begin()

        self.both(run)

    def save_and_load(self) -> None:
        loads = self.draws.random() < 0.5
        ids = self.ids()

        def run(pair: _Pair) -> None:
            folder = self.folder / f"runs of {pair.table.memory}"
            parts = {"model": pair.module, "optimizer": pair.optimizer}
            speedtorch.save(folder, **parts)
            if loads:
                pair.end_step(pair.look_up(ids))
                speedtorch.load(folder, **parts)

        self.both(run)

    def prefetch(self) -> None:
        loader, end = [self.ids() for _ in range(5)], self.draws.choice([2, 9])

        def run(pair: _Pair) -> list[Tensor]:
            seen = []
            for number, ids in enumerate(
                speedtorch.prefetch(loader, pair.module, ids=lambda batch: batch)
            ):
                seen += pair.end_step(pair.look_up(ids))
                if number == end:
                    break
            return seen

        self.both(run)

    def run(self) -> None:
        parts: list[Callable[[], None]] = [
            *[self.step] * 10,
            *[self.step_of_two_lookups, self.prefetch, self.evaluation, self.gather] * 2,
            *[self.scatter, self.view, self.flush, self.interrupted_step] * 2,
            *(self.change_weight, self.another_module, self.save_and_load),
        ]
        for _ in range(self.draws.randint(5, 25)):
            self.draws.choice(parts)()
        file, plain = (pair.table for pair in self.pairs)
        for name in file.fields:
            assert torch.equal(file[name], plain[name])
        file.close()


@pytest.fixture(autouse=True)
def frozen_garbage() -> Iterator[None]:
    """Claims collect garbage: that of other tests is left out, which takes most of the time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("chunk", range(programs(160) // CHUNK))
def test_programs_are_bitwise_those_of_a_table_in_memory(chunk: int, tmp_path: Path) -> None:
    failures = 0
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        folder = tmp_path / str(seed)
        folder.mkdir()
        program = Program(seed, folder)
        try:
            program.run()
        except BaseException as error:
            error.add_note(f"program {seed}")
            raise
        failures += program.failures
        shutil.rmtree(folder)
    assert failures >= 3
