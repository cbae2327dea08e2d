"""Random programs of everything that an Embedding can do, with a cache and bit for bit without.

A program makes a few calls of an embedding with a cache and of one without, which were alike
before: what they give and all of their rows must be the same. A call may be interrupted at a line
of the package in the one with the cache: then it was done or was not, and the other does as much.

SPEEDTORCH_PROGRAMS is how many programs are run on a device, 3,000 by default and the same ones
each time. Each optimizer of the tests has a share of them with each kind of rows. A failure says
what the program did; tests/nn/test_embedding_machine.py has longer ones, which it makes short.
"""

from __future__ import annotations

import inspect
import math
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from interrupts import ONLY_COUNTING, TRAINING, Lines, out_of_memory, source_files
from optimizer_cases import CASES
from reference import as_bytes, copied
from torch import Tensor, optim

import speedtorch

ROWS, WIDTH, MOST = 24, 2, 6
"""Rows of the table, their columns, and the ids of a batch."""
PROGRAMS = int(os.environ.get("SPEEDTORCH_PROGRAMS", "3000"))
CALLS = (1, 3)
"""Fewest and most of a program."""
SIZES = [1, 2, 3, 5, 8, 2 * ROWS]
"""Rows of a cache."""
ALL = torch.arange(ROWS)
KINDS: dict[str, dict[str, Any]] = {
    "rows": {},
    "capacity": {"capacity": MOST},
    "stored": {"stored": torch.bfloat16, "rounding": "nearest"},
}
SHARE = math.ceil(PROGRAMS / len(CASES) / len(KINDS))
"""Programs of an optimizer with a kind of rows."""
PROGRAMS_OF_EACH = 60
"""How many programs two embeddings run: what one leaves the next one finds."""
MOVING = source_files("step/hot_rows.py")
"""What moves rows to slots and back."""


class Side:
    """An embedding with its optimizer, and what a program keeps of it."""

    def __init__(self, optimizer: str, kind: str, device: str) -> None:
        self.case = case = CASES[optimizer]
        rows = torch.randn(ROWS, WIDTH, generator=_generator(1))
        self.device = device
        self.embedding = speedtorch.Embedding(
            ROWS,
            WIDTH,
            _weight=rows,
            device=device,
            sparse=optimizer == "SparseAdam",
            **KINDS[kind],
        )
        settings = {"lr": 0.25, **case.settings}
        self.is_graphed = kind == "capacity"
        if device == "cuda" and kind == "capacity":
            known = inspect.signature(case.make).parameters
            self.is_graphed = "capturable" in known or case.make is optim.SGD
            if "capturable" in known:
                settings |= {name: True for name in ("capturable", "fused") if name in known}
        self.optimizer = case.make(self.embedding.parameters(), **settings)
        speedtorch.attach(self.optimizer, self.embedding)
        self.saved = self.state()
        self.run: Callable[[Tensor], Tensor] | None = None
        self.results: list[Tensor] = []

    def state(self) -> Any:
        return copied([dict(self.embedding.state_dict()), self.optimizer.state_dict()])

    def rows(self) -> list[Tensor]:
        """All rows and their state, in the table."""
        self.embedding.flush()
        table = self.embedding.table
        return [table[name].clone() for name in table.fields]

    def counts(self) -> list[Tensor]:
        """What the optimizer keeps beside the rows."""
        kept = self.optimizer.state_dict()["state"].get(0, {})
        return [torch.as_tensor(kept[name]) for name in self.case.scalars if name in kept]

    # ---- calls

    def look_up(self, *parts: Tensor) -> Tensor:
        self.results = [self.embedding(ids) for ids in parts]
        return torch.cat([result.detach().view(-1, WIDTH) for result in self.results])

    def backward(self) -> None:
        results, self.results = self.results, []
        torch.stack([result.sin().sum() for result in results]).sum().backward()

    def step(self) -> None:
        self.optimizer.step()

    def give_up(self) -> None:
        self.results = []
        self.optimizer.zero_grad()

    def train(self, ids: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        looked_up = self.embedding(ids)
        loss: Tensor = looked_up.sin().sum()
        loss.backward()
        self.optimizer.step()
        return loss

    def replay(self, ids: Tensor) -> Tensor:
        if self.run is None:
            self.run = speedtorch.graphed(
                self.train, ids, modules=self.embedding, optimizers=self.optimizer
            )
        return self.run(ids).clone()

    def evaluate(self) -> Tensor:
        self.embedding.eval()
        with torch.no_grad():
            rows: Tensor = self.embedding(ALL.to(self.device))
        self.embedding.train()
        return rows

    def read(self, how: str) -> Tensor | None:
        if how == "gather":
            return self.embedding.table.gather(ALL, "weight")
        if how == "view":
            return self.embedding.table["weight"].clone()
        if how == "state":
            return self.embedding.state_dict()["weight"].clone()
        self.embedding.flush()
        return None

    def write(self, how: str, ids: Tensor) -> None:
        table = self.embedding.table
        if how == "scatter":
            rows = torch.full((len(ids), WIDTH), 0.5, dtype=table["weight"].dtype)
            table.scatter(ids.unique(), rows[: len(ids.unique())], "weight")
        elif how == "view":
            table["weight"][int(ids[0])] = 2.0
        else:
            table["weight"].fill_(0.25)

    def save(self) -> None:
        self.saved = self.state()

    def load(self) -> None:
        model, optimizer = copied(self.saved)
        self.embedding.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def refresh(self) -> None:
        self.embedding.trained_rows.exchange.held.store.before_replay()

    def resize(self, slots: int | None, members: Tensor | None = None) -> None:
        self.run = None  # its graph uses the rows
        rows = self.embedding.trained_rows
        nbytes = None if slots is None else slots * rows.cache_need().slot_bytes
        if members is None:
            speedtorch.cache(self.embedding, nbytes)
        else:
            rows.cache(nbytes, members)  # as cache_rows= does when an embedding is built


def _alike(found: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(as_bytes(one), as_bytes(other)) for one, other in pairs)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Programs:
    """Programs of an optimizer and a kind of rows, one after the other on the same embeddings."""

    def __init__(self, optimizer: str, kind: str, device: str, seed: int) -> None:
        self.random = random.Random(f"{optimizer} {kind} {seed}")
        self.cached, self.plain = (Side(optimizer, kind, device) for _ in range(2))
        self.log: list[str] = []
        self.slots: int | None = None
        self.armed: Lines | None = None
        draw = [self.random.choices(range(n, n + 7), k=MOST) for n in range(0, ROWS - 7, 2)]
        self.batches = [torch.tensor(ids, device=device) for ids in draw]
        actions = [
            self.train,
            self.train,
            self.train,
            self.prefetch,
            self.announce,
            self.evaluate,
            self.read,
        ]
        actions += [self.write, self.save, self.load, self.resize_or_remove]
        actions += [self.refresh] * 3
        actions += [self.replay] * self.cached.is_graphed
        self.actions = actions

    def one(self) -> None:
        """A program, which begins with a cache: that of the program before, or another."""
        self.log = [f"a cache of {self.slots}"]
        if self.slots is None or self.random.random() < 0.1:
            self.resize(self.random.choice(SIZES))
        for action in self.random.choices(self.actions, k=self.random.randint(*CALLS)):
            if self.random.random() < 0.15:
                files = self.random.choice([TRAINING, MOVING])
                line = self.random.randint(1, self.random.choice([10, 40, 60]))
                error = self.random.choice([KeyboardInterrupt, out_of_memory])
                self.armed = Lines(files, line, error, skip=ONLY_COUNTING)
            action()
        self.armed = None
        self.check(counts=self.random.random() < 0.2)  # they take long to read

    def check(self, *, counts: bool = True) -> None:
        assert _alike(self.cached.rows(), self.plain.rows()), "rows"
        assert not counts or _alike(self.cached.counts(), self.plain.counts()), "counts"

    def do(self, name: str, call: Callable[[Side], Any]) -> bool:
        """A call of both; whether it was done, as one that is interrupted may be or not."""
        self.log.append(name)
        lines, self.armed = self.armed, None
        if lines is None:
            found = call(self.cached)
        else:
            with lines:
                found = call(self.cached)
            if lines.came_out:
                self.log.append(f"which failed at {lines.where}")
                if _alike(self.cached.rows(), self.plain.rows()):
                    return False
                call(self.plain)
                self.check()
                return False
        expected = call(self.plain)
        assert (found is None) is (expected is None)
        assert found is None or _alike([found], [expected]), "what it gives"
        return True

    def give_up(self) -> None:
        for side in (self.cached, self.plain):
            side.give_up()

    def ids(self) -> Tensor:
        ids = self.random.choice(self.batches)
        return ids if self.random.random() < 0.7 else ids.clone()

    # ---- actions

    def learn(self, *parts: Tensor) -> bool:
        """A step; whether all of it was done."""
        done = self.do(f"look up {[ids.tolist() for ids in parts]}", lambda s: s.look_up(*parts))
        if done:
            for side in (self.cached, self.plain):
                side.backward()
            done = self.do("step", Side.step)
        self.give_up()
        return done

    def train(self) -> None:
        self.learn(self.ids())

    def replay(self) -> None:
        ids, self.armed = self.ids(), None
        self.do(f"replay {ids.tolist()}", lambda side: side.replay(ids))

    def prefetch(self) -> None:
        batches = [self.ids() for _ in range(self.random.randint(1, 3))]
        loops: dict[Side, Iterator[Tensor]] = {
            side: iter(speedtorch.prefetch(batches, side.embedding, ids=lambda ids: ids))
            for side in (self.cached, self.plain)
        }
        deferred: list[Lines] = []
        for ids in batches[: self.random.randint(0, len(batches))]:
            deferred += [] if self.armed is None else [self.armed]
            try:
                if not self.do("next batch", lambda side: next(loops[side])):
                    break
            except BaseException as error:  # raised when the batch it belongs to is due
                if not any(error is each.raised for each in deferred):
                    raise
                self.give_up()
                break
            if self.random.random() < 0.8 and not self.learn(ids):
                break
        for loop in loops.values():
            loop.close()  # type: ignore[attr-defined]

    def announce(self) -> None:
        ids = self.ids()
        parts = (ids[:2], ids[2:])
        done = self.do(f"announce {ids.tolist()}", lambda side: side.embedding.announce(*parts))
        if done and self.random.random() < 0.8:
            self.learn(*parts)
        self.give_up()

    def evaluate(self) -> None:
        self.do("evaluate", Side.evaluate)

    def read(self) -> None:
        how = self.random.choice(["gather", "view", "state", "flush"])
        self.do(f"read by {how}", lambda side: side.read(how))

    def write(self) -> None:
        how, ids = self.random.choice(["scatter", "view", "fill"]), self.ids().cpu()
        self.do(f"write by {how} {ids.tolist()}", lambda side: side.write(how, ids))

    def save(self) -> None:
        self.armed = None  # of what is copied some is ours
        self.do("save", Side.save)

    def load(self) -> None:
        self.armed = None
        self.do("load", Side.load)

    def refresh(self) -> None:
        self.do("refresh", Side.refresh)

    def resize_or_remove(self) -> None:
        self.resize(self.random.choice([None, *SIZES]))

    def resize(self, slots: int | None) -> None:
        self.slots = None  # where it is interrupted
        members = self.ids().cpu().unique() if slots and self.random.random() < 0.2 else None
        if self.do(
            f"a cache of {slots} for {members}",
            lambda side: side.resize(slots, members) if side is self.cached else side.resize(None),
        ):
            self.slots = slots


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread", "restless", "deterministic")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", CASES)
def test_programs_with_a_cache_give_the_numbers_without(
    optimizer: str, kind: str, device: str, record_property: Callable[[str, object], None]
) -> None:
    for number in range(SHARE):
        if number % PROGRAMS_OF_EACH == 0:
            made = Programs(optimizer, kind, device, seed=number)
        try:
            made.one()
        except Exception as error:
            log = "\n".join(made.log)
            raise AssertionError(f"program {number} of {optimizer}, {kind}:\n{log}") from error
    record_property("programs", SHARE)
