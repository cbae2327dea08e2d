"""Random programs of announce and prefetch, interrupted at any line, against plain training.

A collection of two groups is trained batch after batch. Some batches are given up: an exception is
raised at some line of the package, or between two calls, and the program goes on with the next
batch. Batches that were not given up must be trained, and every row must be as if the others had
never been there. A lookup of the same ids as an announced one that was given up may be taken for
that: such a batch may be refused by name before it is stepped.

SPEEDTORCH_ANNOUNCE_PROGRAMS is how many programs are run; by default few, always the same ones.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupts import PACKAGE, Lines, out_of_memory
from ordinary_run import programs
from torch import Tensor, optim

import speedtorch
from speedtorch import EmbeddingBagCollection, EmbeddingBagConfig

PROGRAMS = int(os.environ.get("SPEEDTORCH_ANNOUNCE_PROGRAMS", programs(25)))
ROWS, BATCHES, CAPACITY = 9, 6, 5
TABLES = {"a": 2, "b": 3}
"""Columns of each table, which is a group by itself."""
Features = dict[str, Tensor]
SETTINGS: dict[str, float] = {"lr": 0.25, "momentum": 0.5, "weight_decay": 0.5}


class Plain:
    """Full-size tables, whose steps change the rows that were looked up."""

    def __init__(self) -> None:
        self.tables = {name: first_rows(name) for name in TABLES}
        self.momentum = {name: torch.zeros_like(rows) for name, rows in self.tables.items()}

    def copy(self) -> Plain:
        made = Plain()
        made.tables = {name: rows.clone() for name, rows in self.tables.items()}
        made.momentum = {name: rows.clone() for name, rows in self.momentum.items()}
        return made

    def train(self, lookups: list[Features]) -> None:
        for name, rows in self.tables.items():
            ids = torch.cat([lookup[name] for lookup in lookups])
            held = ids.unique()
            gradient = torch.zeros_like(rows).index_add_(
                0, ids, torch.ones(len(ids), rows.shape[1])
            )[held]
            parameter = torch.nn.Parameter(rows[held])
            sgd = optim.SGD([parameter], **SETTINGS)  # type: ignore[arg-type]
            sgd.state[parameter] = {"momentum_buffer": self.momentum[name][held]}
            parameter.grad = gradient
            sgd.step()
            rows[held] = parameter.detach()
            self.momentum[name][held] = sgd.state[parameter]["momentum_buffer"]


class Ours:
    """The collection and its optimizer, and the results that the program keeps."""

    def __init__(self, capacity: int | None) -> None:
        configs = [EmbeddingBagConfig(ROWS, columns, name) for name, columns in TABLES.items()]
        rows = {name: first_rows(name) for name in TABLES}
        self.tables = EmbeddingBagCollection.from_pretrained(
            configs, rows, freeze=False, capacity=capacity, memory="plain"
        )
        self.sgd = optim.SGD(self.tables.parameters(), **SETTINGS)  # type: ignore[arg-type]
        speedtorch.attach(self.sgd, self.tables)
        self.results: list[Tensor] = []

    def look_up(self, features: Features) -> None:
        pooled = self.tables({name: ids[:, None] for name, ids in features.items()})
        self.results.append(sum(value.sum() for value in pooled.to_dict().values()))  # type: ignore[arg-type]

    def announce(self, *lookups: Features) -> None:
        self.tables.announce(*({n: ids[:, None] for n, ids in part.items()} for part in lookups))

    def backward(self) -> None:
        torch.stack(self.results).sum().backward()

    def differ_from(self, plain: Plain) -> str:
        """Which rows are others, by table."""
        found = []
        state, counts = self.tables.state_dict(), self.sgd.state_dict()["state"]
        for number, name in enumerate(TABLES):
            pairs = {"weight": (state[f"embedding_bags.{name}.weight"], plain.tables[name])}
            if number in counts:
                pairs["momentum"] = (counts[number]["momentum_buffer"], plain.momentum[name])
            for field, (actual, expected) in pairs.items():
                if rows := (actual != expected).any(1).nonzero().flatten().tolist():
                    found.append(f"{field} of {name}: rows {rows}")
        return "; ".join(found)


def first_rows(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(TABLES[name])
    return torch.randint(-8, 8, (ROWS, TABLES[name]), generator=generator).float()


class Program:
    """A program of so many batches, which a seed draws."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.capacity = self.random.choice([None, CAPACITY, CAPACITY])
        self.ours, self.plain = Ours(self.capacity), Plain()
        self.log: list[str] = []
        self.given_up: list[Features] = []
        """Lookups of batches that were given up since the last step."""

    def draw(self, number: int) -> list[Features]:
        """The lookups of a batch, whose rows have room together.

        With a capacity none of them is equal to one of the batches before: it could be the lookup
        of an announced tensor, or of rows that are held.
        """
        known = {name: self.random.sample(range(ROWS), CAPACITY) for name in TABLES}
        lengths = [0, 1, 2, 3]
        if self.capacity is not None:
            lengths = [2 * (number % 3) + 1, 2 * (number % 3) + 2]
        samples = self.random.choices(lengths, k=self.random.randint(1, 3))
        return [
            {
                name: torch.tensor(self.random.choices(known[name], k=n), dtype=torch.int64)
                for name in TABLES
            }
            for n in samples
        ]

    def run(self) -> None:
        batches = [self.draw(number) for number in range(BATCHES)]
        ahead = self.random.random() < 0.5
        loop: Any = batches
        if ahead:
            loop = speedtorch.prefetch(batches, self.ours.tables, ids=as_looked_up)
        for batch in loop:
            try:
                self.one(batch, ahead=ahead)
            except RuntimeError as error:
                if "was not looked up" not in str(error) or not self.is_alike(batch):
                    raise
                self.log.append("refused")
                self.ours.results = []
                self.ours.sgd.zero_grad()

    def is_alike(self, batch: list[Features]) -> bool:
        """Whether a lookup of a batch may be that of a tensor announced for one given up."""
        return any(
            torch.equal(each[name], other[name])
            for each in batch
            for other in self.given_up
            for name in TABLES
        )

    def one(self, batch: list[Features], *, ahead: bool) -> None:
        """Trains a batch, or gives it up on the way."""
        calls = self.calls(batch, ahead=ahead)
        failing = self.random.randrange(len(calls)) if self.random.random() < 0.5 else None
        self.log.append(f"{'+'.join(name for name, _ in calls)} of {shown(batch)}")
        for number, (name, call) in enumerate(calls):
            if number != failing:
                call()
                if name == "step":
                    self.plain.train(batch)
                continue
            if self.random.random() < 0.2:  # the user's own code raises before this call
                self.log.append(f"given up before {name}")
                self.given_up += batch
                return self.give_up(stepped=None, went_back=name in ("step", "end"))
            error = self.random.choice([KeyboardInterrupt, out_of_memory])
            line = self.random.randint(1, self.random.choice([30, 100, 400]))
            with Lines(PACKAGE, line, error) as lines:
                call()
            if lines.raised is None:
                if name == "step":
                    self.plain.train(batch)
                continue
            self.log.append(f"{name} failed at {lines.where}")
            stepped = batch if name == "step" else None
            if name == "end":
                self.ours.results = []
                return self.ours.sgd.zero_grad()
            self.given_up += batch
            return self.give_up(stepped, went_back=name in ("backward", "step"))
        self.ours.results, self.given_up = [], []

    def calls(
        self, batch: list[Features], *, ahead: bool
    ) -> list[tuple[str, Callable[[], object]]]:
        ours, calls = self.ours, list[tuple[str, Callable[[], object]]]()
        several = self.capacity is not None and len(batch) > 1
        if not ahead and (several or self.random.random() < 0.7):
            if self.random.random() < 0.5:
                calls.append(("announce", lambda: ours.announce(*batch)))
            else:
                calls += [("announce", lambda each=each: ours.announce(each)) for each in batch]
        if self.random.random() < 0.5:
            calls.append(("zero_grad", ours.sgd.zero_grad))
        calls += [("lookup", lambda each=each: ours.look_up(each)) for each in batch]
        if self.random.random() < 0.5:
            calls.append(("zero_grad", ours.sgd.zero_grad))
        calls += [("backward", ours.backward), ("step", ours.sgd.step)]
        calls.append(("end", ours.sgd.zero_grad))
        return calls

    def give_up(self, stepped: list[Features] | None, *, went_back: bool) -> None:
        """Leaves a batch as users do."""
        kept, self.ours.results = self.ours.results, []
        ways = ["zero_grad", "zeros", "load", *(["nothing"] if self.capacity is None else [])]
        way = self.random.choice(ways)
        if way == "zeros":
            self.ours.sgd.zero_grad(set_to_none=False)
        elif way != "nothing" or went_back:
            self.ours.sgd.zero_grad()
        if way == "nothing":
            kept = []  # which would count for the next batch
        self.keep(kept)
        if stepped is not None:
            self.resolve(stepped)
        if way == "load":
            self.ours.tables.load_state_dict(self.ours.tables.state_dict())

    def keep(self, kept: list[Tensor]) -> None:
        """Results live on, as in a variable of the loop, until those of the next batch come."""
        self.kept = kept if self.random.random() < 0.5 else []

    def resolve(self, stepped: list[Features]) -> None:
        """An interrupted step was done for all tables, or for none."""
        if self.ours.differ_from(self.plain):
            self.plain.train(stepped)


def as_looked_up(batch: list[Features]) -> list[Features]:
    return [{name: ids[:, None] for name, ids in each.items()} for each in batch]


def shown(batch: list[Features]) -> list[dict[str, list[int]]]:
    return [{name: ids.tolist() for name, ids in each.items()} for each in batch]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("one_thread")
def test_discarded_batches_change_nothing() -> None:
    wrong = []
    for seed in range(PROGRAMS):
        program = Program(seed)
        try:
            program.run()
            if differing := program.ours.differ_from(program.plain):
                wrong.append(f"{seed}: {differing}\n  " + "\n  ".join(program.log))
        except Exception as error:
            wrong.append(f"{seed}: {type(error).__name__}: {error}\n  " + "\n  ".join(program.log))
    assert not wrong, f"{len(wrong)} of {PROGRAMS} programs:\n" + "\n".join(wrong[:8])
