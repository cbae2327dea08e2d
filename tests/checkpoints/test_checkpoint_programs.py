"""Random programs that train, save, damage and load one folder, against copies that the test keeps.

Each program has tables with attached optimizers, plain modules, a scheduler and values. It saves
all of them in every way, deletes, cuts and changes files, and loads into old and new objects. After
each call the objects are bitwise identical to the copies of the generation that must be loaded, or
the call has raised and changed nothing.

SPEEDTORCH_PROGRAMS is how many programs are run; by default 20, always the same ones.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.optim import RowWiseAdagrad

PROGRAMS = int(os.environ.get("SPEEDTORCH_PROGRAMS", "20"))
SHARES, CALLS, ROWS, WIDTH = 4, 16, 16, 3
TABLES: list[dict[str, Any]] = [
    {},
    {"cache": "1KiB"},
    {"capacity": 8},
    {"stored": torch.bfloat16},
    {"padding_idx": 2},
]
OPTIMIZERS: list[Callable[[Any], optim.Optimizer]] = [
    lambda given: optim.SGD(given, lr=0.1),
    lambda given: optim.SGD(given, lr=0.1, momentum=0.9),
    lambda given: optim.Adam(given, lr=0.1),
    lambda given: optim.AdamW(given, lr=0.1, amsgrad=True),
    lambda given: optim.Adagrad(given, lr=0.1),
    lambda given: optim.RMSprop(given, lr=0.1, centered=True, momentum=0.5),
    lambda given: RowWiseAdagrad(given, lr=0.1),
]
LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(WIDTH, 1),
    lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
    lambda: nn.Sequential(nn.PReLU(), nn.Linear(WIDTH, 1, dtype=torch.float32)),
]


def copied(value: Any) -> Any:
    """A value as plain bytes and Python's own types, which are equal if all bits are."""
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous().clone()
        data = plain.view(-1).view(torch.uint8) if plain.numel() else torch.empty(0)
        return str(plain.dtype), tuple(plain.shape), data.numpy().tobytes()
    if isinstance(value, np.ndarray | np.generic):
        return type(value).__name__, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [copied(each) for each in value]
    return type(value).__name__, repr(value)


class Kinds(NamedTuple):
    """What a run is made of."""

    tables: list[int]
    optimizers: list[int]
    layer: int
    rate: int


class Run:
    """Tables, layers, optimizers and a scheduler of random kinds, with values beside them."""

    def __init__(self, kinds: Kinds, seed: int) -> None:
        torch.manual_seed(seed)
        self.kinds = kinds
        self.tables = [speedtorch.Embedding(ROWS, WIDTH, **TABLES[at]) for at in kinds.tables]
        self.optimizers = []
        for emb, at in zip(self.tables, kinds.optimizers, strict=True):
            self.optimizers.append(OPTIMIZERS[at](emb.parameters()))
            speedtorch.attach(self.optimizers[-1], emb)
        self.layer = LAYERS[kinds.layer]()
        self.dense = optim.Adam(self.layer.parameters(), lr=0.1)
        self.scheduler = optim.lr_scheduler.StepLR(self.dense, kinds.rate, 0.5)

    def parts(self) -> dict[str, Any]:
        return {
            "tables": self.tables,
            "optimizers": self.optimizers,
            "layer": self.layer,
            "dense": self.dense,
            "scheduler": self.scheduler,
        }

    def train(self, ids: list[int]) -> None:
        every = [self.dense, *self.optimizers]
        for each in every:
            each.zero_grad()
        rows = torch.stack([emb(torch.tensor(ids)) for emb in self.tables]).sum(0)
        self.layer(rows).sin().sum().backward()
        for each in every:
            each.step()
        self.scheduler.step()

    def copies(self) -> dict[str, Any]:
        states = {
            name: [each.state_dict() for each in part]
            if isinstance(part, list)
            else part.state_dict()
            for name, part in self.parts().items()
        }
        return {name: copied(each) for name, each in states.items()}

    def looked_up(self) -> Any:
        """All rows as lookups return them."""
        with torch.no_grad():
            ids = torch.arange(ROWS).split(4)
            return [copied(torch.cat([emb(each) for each in ids])) for emb in self.tables]


@dataclass
class Saved:
    """A generation as it must be.

    Attributes:
        copies: Of all parts and values, by name.
        rows: As lookups return them.
        base: The generation that it goes on from.
        is_damaged: Whether a file of its own has other bytes now; of `is_changed`, as many as then.
    """

    copies: dict[str, Any]
    rows: Any
    base: int | None = None
    is_damaged: bool = False
    is_changed: bool = False


class Program:
    """A folder, the runs that use it, and what must be in it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        count = self.rng.randint(1, 2)
        self.kinds = Kinds(
            [self.rng.randrange(len(TABLES)) for _ in range(count)],
            [self.rng.randrange(len(OPTIMIZERS)) for _ in range(count)],
            self.rng.randrange(len(LAYERS)),
            self.rng.randint(1, 3),
        )
        self.runs = [Run(self.kinds, each) for each in range(2)]
        self.run = self.runs[0]
        self.noted = speedtorch.HostTable(ROWS, 2, memory="plain").fill_(0)
        if self.rng.random() < 0.5:
            self.noted.track_changes()
        self.there: dict[int, Saved] = {}
        self.saving: tuple[Future[Any], Saved, int] | None = None
        self.last, self.done = 0, list[str]()
        self.is_unreadable = False

    def other(self) -> Run:
        """A run of the same kinds, new or used."""
        run = self.rng.choice([each for each in self.runs if each is not self.run])
        if self.rng.random() < 0.15:
            run = Run(self.kinds, self.rng.randrange(1000))
            self.runs.append(run)
        for each in run.tables:
            if self.rng.random() < 0.7:
                each.table.track_changes()
        if self.rng.random() < 0.5:
            run.train(self.ids())
        return run

    def ids(self) -> list[int]:
        return [self.rng.randrange(ROWS) for _ in range(self.rng.randint(2, 6))]

    # What there must be.

    def chain(self, number: int) -> list[int]:
        found = [number]
        while found[-1] in self.there and (base := self.there[found[-1]].base) is not None:
            found.append(base)
        return found

    def is_whole(self, number: int) -> bool:
        """Whether nothing of a generation is damaged or missing."""
        chain = self.chain(number)
        return all(each in self.there and not self.there[each].is_damaged for each in chain)

    def retain(self, keep: int) -> None:
        """Looks which generations a save has left: the last ones, and what these go on from."""
        last = sorted(self.there)[-keep:]
        needed = {each for number in last for each in self.chain(number)} & set(self.there)
        found = {number for number in self.there if self.path(number).is_dir()}
        whole = {each for number in last if self.is_whole(number) for each in self.chain(number)}
        assert {*last, *whole} <= found <= needed, (found, needed)
        assert found == needed or self.is_unreadable, (found, needed)
        self.there = {each: self.there[each] for each in sorted(found)}

    def path(self, number: int) -> Path:
        return self.folder / f"generation-{number:08d}"

    # Calls.

    def train(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            self.run.train(self.ids())

    def write(self) -> None:
        """Writes rows by hand."""
        table = self.rng.choice([self.noted, *[each.table for each in self.run.tables]])
        row, weight = self.rng.randrange(ROWS), table["weight"]
        number = self.rng.randint(-8, 8) / 8
        if self.rng.random() < 0.3:
            weight[row] = number
        else:
            rows = torch.full_like(weight[:1], number)
            table.scatter(torch.tensor([row]), rows, "weight")
        if self.rng.random() < 0.2:
            with torch.no_grad():
                self.rng.choice(self.run.tables).weight.mul_(0.5)

    def values(self) -> dict[str, Any]:
        draw = np.random.RandomState(self.rng.randrange(1000))
        tied = torch.randn(2, 3)
        made = {
            "step": self.rng.choice([0, -5, 2**70, 10**700, True]),
            "loss": self.rng.choice([0.1, float("inf"), -0.0, 1e-310, float("nan")]),
            "note": self.rng.choice(["", "a\u00e9\n", None, b"\0\xff", torch.float64]),
            "random": draw.get_state(),
            "array": np.asarray(
                draw.standard_normal(self.rng.choice([(), (0, 3), (2, 1, 3)])),
                self.rng.choice(["<f4", ">f8", "<i2", "?", "<c16"]),
            ),
            "scalar": self.rng.choice([np.float32(1.5), np.int64(-3), np.bool_(True)]),
            "tied": [tied, tied.t(), {"again": tied}, tied[:, 1:]],
            "odd": self.rng.choice(
                [
                    torch.tensor(2.5, dtype=torch.float64),
                    torch.empty(0, 4, dtype=torch.int16),
                    torch.tensor([True, False]),
                    torch.arange(6, dtype=torch.uint8).view(3, 2).t(),
                    torch.tensor([1.0, float("nan")]).to(torch.bfloat16),
                    torch.ones(2, dtype=torch.complex64).conj(),
                ]
            ),
            "nested": {"a": (1, [2.5, {3: None}]), 4: torch.Size([2, 3]), False: []},
        }
        names = self.rng.sample(list(made), self.rng.randint(0, len(made)))
        return {name: made[name] for name in names}

    def save(self) -> None:
        self.wait()
        keep, base = self.rng.choice([1, 2, 3, 9]), None
        if self.there and self.rng.random() < 0.6:
            base = self.rng.choice(sorted(self.there)[-2:][-self.rng.randint(1, 2) :])
        values: dict[str, Any] = {**self.values(), "rows": self.noted["weight"]}
        parts = self.run.parts()
        for name in self.rng.sample(list(parts), self.rng.choice([0, 0, 0, 1])):
            del parts[name]
        copies = {each: copy for each, copy in self.run.copies().items() if each in parts}
        copies |= {name: copied(each) for name, each in values.items()}
        saved = Saved(copies, self.run.looked_up())
        given = self.shuffled({**parts, **values})
        in_background = self.rng.random() < 0.4
        most = self.rng.choice([None, 1, 1000, "1MiB"])
        how: dict[str, Any] = {"keep": keep, "base": base} | (
            {"max_memory": most} if in_background else {}
        )
        call: Any = speedtorch.async_save if in_background else speedtorch.save
        # A base whose files have other sizes is found; one whose bytes are others is not.
        is_told = base is not None and not all(
            each in self.there and (not self.there[each].is_damaged or self.there[each].is_changed)
            for each in self.chain(base)
        )
        if is_told:
            before = sorted(os.listdir(self.folder))
            with pytest.raises(ValueError, match="is damaged, or not of|is missing"):
                call(self.folder, **how, **given)
            assert sorted(os.listdir(self.folder)) == before
            return
        made = call(self.folder, **how, **given)
        if in_background:
            self.saving = made, saved, keep
        else:
            self.keep(made, saved, keep)

    def shuffled(self, given: dict[str, Any]) -> dict[str, Any]:
        return dict(self.rng.sample(list(given.items()), len(given)))

    def keep(self, made: Any, saved: Saved, keep: int) -> None:
        assert made.generation > max(self.there, default=0)
        self.last, saved.base = made.generation, made.base
        self.there[made.generation] = saved
        self.retain(keep)

    def wait(self) -> None:
        if self.saving is not None:
            future, saved, keep = self.saving
            self.saving = None
            self.keep(future.result(60), saved, keep)

    def damage(self) -> None:
        """Removes, cuts or changes a file, as a disk, a killed copy or a person may."""
        self.wait()
        if not self.there:
            return
        number = self.rng.choice([max(self.there), self.rng.choice(list(self.there))])
        saved, path = self.there[number], self.path(number)
        if self.rng.random() < 0.1:
            shutil.rmtree(path)
            del self.there[number]
            return
        files = sorted(path.iterdir())
        if not files:
            return
        file = self.rng.choice([*files, files[-1]])
        data = bytearray(file.read_bytes())
        how = self.rng.choice(["gone", "cut", "long", "other", "other"])
        if how == "gone":
            file.unlink()
        elif how == "cut":
            file.write_bytes(data[: self.rng.randrange(len(data))] if data else b"x")
        elif how == "long":
            file.write_bytes(data + b"\0" * self.rng.randint(1, 9))
        else:
            place = self.rng.randrange(len(data)) if data else 0
            # Of a file of tensors only the values, as its header is read by a save, too.
            header = 8 + int.from_bytes(data[:8], "little")
            if file.suffix == ".safetensors" and header < len(data):
                place = self.rng.randrange(header, len(data))
            if data:
                data[place] ^= 1 << self.rng.randrange(8)
            file.write_bytes(data or b"x")
        is_value = how == "other" and file.suffix == ".safetensors" and header < len(data)
        saved.is_changed = is_value and (saved.is_changed or not saved.is_damaged)
        saved.is_damaged = True
        if file.name == "manifest.json":
            self.is_unreadable = True

    def stray(self) -> None:
        """Puts what is no generation beside them."""
        self.wait()
        if not self.folder.exists():
            return
        number = self.last + self.rng.randint(1, 3)
        path = self.path(number)
        if path.exists() or path.is_symlink():
            return
        what = self.rng.randrange(5)
        if what == 0:
            path.write_text("x")
        elif what == 1:
            path.symlink_to("nowhere")
        elif what == 2:
            (path / "manifest.json").mkdir(parents=True)
        elif what == 3:
            (self.folder / f".generation-{number}.1-0123abcd.partial").mkdir(exist_ok=True)
        else:
            (self.folder / f"generation-{number}").mkdir(exist_ok=True)

    # Loads.

    def expected(self) -> int | None:
        """The generation that a load without a number must take."""
        return max(filter(self.is_whole, self.there), default=None)

    def load(self) -> None:
        """Loads the last whole generation, or one by its number, into old or new objects."""
        self.wait()
        number = None
        if self.there and self.rng.random() < 0.4:
            number = self.rng.choice([*self.there, max(self.there) + 7])
        self.check_load(self.rng.choice([self.run, self.other()]), number)

    def follow(self) -> None:
        """Loads one generation, and then what has changed since."""
        self.wait()
        whole = [each for each in self.there if self.is_whole(each)]
        if whole:
            run, since = self.other(), self.rng.choice(self.chain(max(whole)))
            if set(run.parts()) <= set(self.there[since].copies):
                self.check_load(run, since, every=True)
                self.check_load(run, None, since=since)
            self.check_load(self.other(), None, since=max(self.there) + 9)  # which no one has

    def check_load(
        self, run: Run, number: int | None, since: int | None = None, *, every: bool = False
    ) -> None:
        taken = self.expected() if number is None else number
        parts, before = run.parts(), run.copies()
        if not every and self.rng.random() < 0.3:
            parts = dict(self.rng.sample(list(parts.items()), self.rng.randint(0, len(parts))))
        parts, error = self.shuffled(parts), None
        if not self.there or (number is not None and number not in self.there):
            error = FileNotFoundError
        elif taken is None or not self.is_whole(taken):
            error = ValueError
        elif not set(parts) <= set(self.there[taken].copies):
            error = KeyError
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            how: dict[str, Any] = {"generation": number, "since": since}
            if not any(each.is_changed for each in self.there.values()):
                how["verify"] = self.rng.random() < 0.7
            try:
                found = speedtorch.load(self.folder, **how, **parts)
            except (FileNotFoundError, ValueError, KeyError) as raised:
                assert type(raised) is error or (
                    error is ValueError and isinstance(raised, ValueError)
                ), (raised, error, self.done)
                assert run.copies() == before, self.done
                return
        assert error is None and taken is not None, (error, self.done)
        later = [each for each in sorted(self.there) if number is None and each > taken]
        texts = [str(each.message) for each in caught if each.category is RuntimeWarning]
        assert len(texts) == bool(later), (texts, later)
        for text in texts:
            told_of = re.search(r"loads generation (\d+), because (\[.*?\]) are", text)
            assert told_of is not None and int(told_of[1]) == taken, text
            passed = [each for each in json.loads(told_of[2]) if each in self.there]
            assert passed == later, (text, later)  # beside bases that are not there
        saved, now = self.there[taken], run.copies()
        for name, copy in saved.copies.items():
            if name in parts:
                assert now[name] == copy, (name, self.done)
            else:
                assert copied(found.pop(name)) == copy, (name, self.done)
        assert found == {}, found
        for name in before.keys() - parts.keys():
            if name != "dense":  # whose rate a scheduler may write
                assert now[name] == before[name], (name, self.done)
        if "tables" in parts:
            assert run.looked_up() == saved.rows, self.done
        if since is None and set(parts) == set(run.parts()):
            self.run = run

    def refuse(self) -> None:
        """Loads into objects that do not fit: nothing changes."""
        self.wait()
        if (number := self.expected()) is None:
            return
        run, saved = self.other(), self.there[number].copies
        parts: dict[str, Any] = {each: part for each, part in run.parts().items() if each in saved}
        wrong = {
            "layer": nn.Linear(WIDTH + 1, 1),
            "tables": self.rng.choice(
                [
                    [*run.tables, nn.Linear(1, 1)],
                    [*run.tables[:-1], speedtorch.Embedding(ROWS, WIDTH + 1)],
                    [*run.tables[:-1], nn.Embedding(ROWS + 1, WIDTH)],
                ]
            ),
            "dense": optim.Adam([torch.ones(1), torch.ones(2), torch.ones(3)]),
            "optimizers": [optim.Adam([torch.ones(2)], lr=0.1)] * (len(run.tables) + 1),
            "nobody": nn.Linear(1, 1),
            "rows": nn.Linear(1, 1),
            "scheduler": 3,
        }
        names = [each for each in wrong if each in saved or each == "nobody"]
        if "dense" in saved and not saved["dense"]["state"]:
            names.remove("dense")  # no state fits any parameters
        name = self.rng.choice(names)
        parts[name], before = wrong[name], run.copies()
        since = self.rng.choice([None, number])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            with pytest.raises((ValueError, RuntimeError, KeyError, TypeError)):
                speedtorch.load(self.folder, since=since, **self.shuffled(parts))
        assert run.copies() == before, (name, self.done)

    def resume(self) -> None:
        """Trains a run and what is loaded of it alike."""
        self.wait()
        made = speedtorch.save(self.folder, keep=9, **self.run.parts())
        self.keep(made, Saved(self.run.copies(), self.run.looked_up()), 9)
        other = self.other()
        speedtorch.load(self.folder, **other.parts())
        for _ in range(3):
            ids, state = self.ids(), torch.get_rng_state()
            for run in (self.run, other):
                torch.set_rng_state(state)
                run.train(ids)
        assert self.run.copies() == other.copies(), self.done
        assert self.run.looked_up() == other.looked_up(), self.done
        self.run = other

    def go(self) -> None:
        calls = ["train"] * 4 + ["write"] * 2 + ["save"] * 7 + ["load"] * 3 + ["follow"] * 2
        calls += ["damage"] * 3 + ["stray", "refuse", "refuse", "resume"]
        for _ in range(CALLS):
            self.done.append(self.rng.choice(calls))
            getattr(self, self.done[-1])()
        self.wait()
        self.check_load(self.other(), None)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("share", range(SHARES))
def test_programs_load_what_was_saved_or_raise(share: int, tmp_path: Path) -> None:
    for seed in range(share, PROGRAMS, SHARES):
        program = Program(tmp_path / str(seed), seed)
        try:
            program.go()
        except BaseException as error:
            raise AssertionError(f"program {seed}: {program.done}: {error!r}") from error
        shutil.rmtree(tmp_path / str(seed), ignore_errors=True)
