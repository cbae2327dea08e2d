"""Saves that are killed at each of their calls on files, one after another, in forks."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ordinary_run import soaked

import speedtorch
from speedtorch.checkpoints.generations import generations_of
from speedtorch.files import system_calls
from speedtorch.files.table_files import open_fields, save_fields


def values(step: int) -> dict[str, Any]:
    return {"step": step, "a": torch.full((70_000,), step), "b": {"c": torch.full((5, 3), step)}}


def check(folder: Path, steps: tuple[int, ...]) -> int:
    """Gives the step that is there, of these; all values are of that."""
    found = speedtorch.load(folder)
    step: int = found["step"]
    assert step in steps, (step, steps)
    assert found["a"].eq(step).all() and found["b"]["c"].eq(step).all()
    return step


def killed_at(number: int) -> None:
    """Kills this process at its n-th call on a file from here."""
    left = [number]

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        return call

    for name, real in vars(system_calls.calls).items():
        setattr(system_calls.calls, name, wrapped(real))


class Run:
    """A whole run in generations of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int) -> None:
        speedtorch.save(self.folder, **values(step))

    def step(self) -> int:
        return check(self.folder, tuple(range(1000)))

    def check_files(self, step: int) -> None:
        left = [each for each in os.listdir(self.folder) if each.startswith(".")]
        assert left == [], left
        assert len(os.listdir(self.folder)) == 2


class Background(Run):
    """A whole run, by a thread that saves copies."""

    def save(self, step: int) -> None:
        speedtorch.async_save(self.folder, **values(step)).result()


class Deltas(Run):
    """Rows that have changed since a save before, as a rule."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.table = speedtorch.HostTable(50, 2, torch.int64, memory="plain")
        self.table.track_changes()
        self.base: int | None = None

    def save(self, step: int) -> None:
        ids = torch.arange(step % 7, 50, 7)
        self.table.scatter(ids, torch.full((len(ids), 2), step), "weight")
        rows = self.table["weight"]
        base = self.base if step % 5 else None
        # More than those that a killed save may have made since.
        saved = speedtorch.save(
            self.folder, keep=4, base=base, rows=rows, step=step, expected=rows.tolist()
        )
        self.base = saved.generation

    def step(self) -> int:
        for number in generations_of(str(self.folder)):
            found = speedtorch.load(self.folder, generation=number)
            assert found["rows"].tolist() == found["expected"]
        step: int = found["step"]
        return step

    def check_files(self, step: int) -> None:
        assert not [each for each in os.listdir(self.folder) if each.startswith(".")]
        assert len(os.listdir(self.folder)) <= 4 + 7


class Resident(Deltas):
    """Rows of a file of which few are resident; a killed process has trained and read them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files = folder.with_name(f"{folder.name} files")
        self.files.mkdir()

    def save(self, step: int) -> None:
        path = self.files / str(step)
        table = speedtorch.HostTable(50, 2, memory="file", path=path, resident="64B")
        weight = speedtorch.Embedding.from_pretrained(table, freeze=False)
        optimizer = torch.optim.SGD(weight.parameters(), lr=1.0)
        table.zeros_()
        for first in range(5):  # row r is -r - first - step after the step of `first`
            ids = torch.arange(first, 50, 5)
            (weight(ids) * (ids + first + step)[:, None]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        expected = [[float(-row - row % 5 - step)] * 2 for row in range(50)]
        speedtorch.save(self.folder, keep=4, rows=weight, step=step, expected=expected)
        os.unlink(path)

    def step(self) -> int:
        for number in generations_of(str(self.folder)):
            found = speedtorch.load(self.folder, generation=number)
            assert found["rows"]["weight"].tolist() == found["expected"]
        step: int = found["step"]
        return step


FIELDS = ("weight", "exp_avg", "exp_avg_sq")
TURNS = soaked(1, 21)
"""Runs of the tests that kill: over 10,000 kills in a whole soak."""


class Table:
    """A table in several .npy files; with `anew`, what is there is removed before each save."""

    def __init__(self, folder: Path, *, anew: bool) -> None:
        self.folder, self.anew = folder, anew
        folder.mkdir()

    def save(self, step: int) -> None:
        save_fields(self.folder / "t.npy", {name: torch.full((9,), step) for name in FIELDS})

    def step(self) -> int:
        """The step that is there, by two ways to open it."""
        step, other = self.opened(None), self.opened(FIELDS)
        assert step == other
        return step

    def opened(self, names: tuple[str, ...] | None) -> int:
        """The one step of all rows of all fields; -1 if there is no table."""
        found: list[int] = []
        try:
            with open_fields(self.folder / "t.npy", names) as stored:
                assert set(stored) == set(FIELDS), set(stored)
                for field in stored.values():
                    field.read_into(rows := torch.zeros(9, dtype=torch.int64))
                    found += rows.tolist()
        except FileNotFoundError:
            assert self.anew
            return -1
        assert len(set(found)) == 1, found
        return found[0]

    def check_files(self, step: int) -> None:
        """A plain NumPy finds them all."""
        for name in FIELDS:
            assert np.array_equal(np.load(self.folder / f"t.{name}.npy"), np.full(9, step))
        assert len(os.listdir(self.folder)) == len(FIELDS)
        if self.anew:
            shutil.rmtree(self.folder)
            self.folder.mkdir()


def saved_and_killed(saved: Run | Table, step: int, number: int) -> tuple[bool, int]:
    """Kills a save at its n-th call, in a fork; whether it switched, and how the fork ended."""
    before = saved.step()
    if (child := os.fork()) == 0:
        try:
            killed_at(number)
            saved.save(step)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL
    after = saved.step()
    assert after in (before, step), (after, before)
    return after != before, status


def main(kind: str, folder: Path, turn: int = 0) -> None:
    """Kills a save at each call; prints how many kills there were, and how many were too late.

    Another turn kills the saves that follow at other calls.
    """
    torch.set_num_threads(1)
    kinds: dict[str, Callable[[Path], Run | Table]] = {
        "run": Run,
        "background": Background,
        "deltas": Deltas,
        "resident": Resident,
        "table": lambda folder: Table(folder, anew=False),
        "first table": lambda folder: Table(folder, anew=True),
    }
    saved = kinds[kind](folder)
    if kind != "first table":
        saved.save(0)
    number = switched = 0
    while True:
        number += 1
        late, status = saved_and_killed(saved, 3 * number, number)
        switched += late
        # The next one is killed as well, often while it completes the one before.
        saved_and_killed(saved, 3 * number + 1, 1 + (number * 5 + turn) % 23)
        saved.save(3 * number + 2)
        assert saved.step() == 3 * number + 2
        saved.check_files(3 * number + 2)
        if status == 0:
            break
    print(number - 1, switched)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
