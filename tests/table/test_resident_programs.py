"""Random programs on a table in a file of which few rows are resident, against a mirror of it.

Disk errors are injected into random calls. A program is repeated by its seed.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paces
import pytest
import torch
from file_faults import opened_as
from ordinary_run import programs
from stress.mirror import Rule
from stress.tables import OneBag, OneEmbedding, OneTable, Owner
from stress.training import Program
from torch import Tensor

from speedtorch import HostTable

CHUNK, ORDINARY = 10, 80
"""Programs of one test, and of the ordinary run."""


class OfFile(OneTable):
    """A module of a table in a file; a lookup can be repeated after an error."""

    path: Path

    def drawn_counts(self) -> tuple[int, ...]:
        return (self.draw.choice([5, 24, 24, 60]),)

    def drawn_settings(self, rule: Rule) -> dict[str, Any]:
        settings = super().drawn_settings(rule)
        return {name: settings[name] for name in settings if name not in ("cache", "max_norm")}

    def drawn_memory(self) -> str:
        self.slots = self.draw.choice([1, 2, 5, 16, 60])
        return "file"

    def table(self, rows: Tensor) -> HostTable:
        table = super().table(rows)
        self.path = Path(str(table._open_placement().path))
        return table


class EmbeddingOfFile(OfFile, OneEmbedding):
    """Rows of ids."""


class BagOfFile(OfFile, OneBag):
    """Sums or means of rows."""


@contextmanager
def disk_error(path: Path, kind: str, draws: random.Random) -> Iterator[None]:
    """In the block, the table's reads fail, or all its writes, or writes behind a byte."""
    if kind == "full":
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        limit = draws.randrange(os.path.getsize(path) + 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return
    with opened_as(path, os.O_WRONLY if kind == "reads" else os.O_RDONLY):
        yield


class ResidentProgram(Program):
    """A program whose lookups and reads are repeated after disk errors."""

    most_actions, failures = 24, 0

    def drawn_owners(self, *given: Any, **more: Any) -> list[Owner]:
        return [self.draw.choice([EmbeddingOfFile, BagOfFile])(*given, **more)]

    @property
    def owner(self) -> OfFile:
        (owner,) = self.owners.values()
        assert isinstance(owner, OfFile)
        return owner

    def actions(self) -> list[Callable[[], object]]:
        actions: list[Callable[[], object]] = [self.train_one] * 9
        actions += [self.loop, self.evaluate, self.read_rows, self.write, self.flush] * 2
        return [*actions, self.halve, self.save, self.load, self.start_again, self.fail]

    def fails(self, call: Callable[[], object]) -> bool:
        """Makes a call with a disk error now and then; whether it must be made again."""
        if self.draw.random() < 0.6:
            return True
        kind = self.draw.choice(["reads", "writes", "full"])
        self.wait()  # for a save in the background, whose files the limit would stop, too
        try:
            with disk_error(self.owner.path, kind, self.draw):
                call()
        except OSError:
            self.failures += 1
            return True
        return False

    def done(self, name: str, call: Callable[[], object], *, is_step: bool = False) -> bool:
        if name in ("lookup", "evaluate") and self.armed is None and not self.fails(call):
            return True
        return super().done(name, call, is_step=is_step)

    def read_rows(self) -> None:
        table = self.owner.row_module.table
        ids = torch.arange(table.rows)
        self.fails(lambda: (table.gather(ids, "weight"), table["weight"]))
        super().read_rows()

    def flush(self) -> None:
        """Compares the weights that are stored in the file."""
        self.say("flush")
        self.drop()
        table = self.owner.row_module.table
        self.fails(table.flush)
        table.flush()
        records = np.fromfile(self.owner.path, np.uint8).reshape(table.rows, -1)
        rows = table["weight"]
        first, size = rows.storage_offset() * rows.itemsize, self.owner.width * rows.itemsize
        stored = torch.from_numpy(records[:, first : first + size].copy()).view(rows.dtype)
        self.compare("the file", stored.float().numpy(), self.owner.mirror.fields["weight"])

    def halve(self) -> None:
        """Halves all rows by the parameter."""
        self.say("halve")
        self.drop()
        with torch.no_grad():
            self.owner.row_module.weight.mul_(0.5)
        rows = self.owner.mirror.fields["weight"]
        self.owner.mirror.write(np.arange(len(rows)), rows / 2)


@pytest.fixture(autouse=True)
def frozen_garbage() -> Iterator[None]:
    """Claims collect garbage: that of other tests is left out, which takes most of the time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunk", range(programs(ORDINARY) // CHUNK))
def test_programs_have_the_rows_of_their_mirror(chunk: int, tmp_path: Path) -> None:
    failures = 0
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        folder = tmp_path / str(seed)
        folder.mkdir()
        program = ResidentProgram(seed, folder, "cpu")
        paces.choose(random.Random(f"paces {seed}").choice([paces.AHEAD, paces.Turning(), None]))
        try:
            program.run()
        except BaseException as error:
            error.add_note(f"program {seed}: " + "\n".join(program.log))
            raise
        finally:
            program.end()
        failures += program.failures
        shutil.rmtree(folder)
    # Of the ordinary run; some of many chunks draw fewer.
    assert failures >= 3 or chunk >= ORDINARY // CHUNK
