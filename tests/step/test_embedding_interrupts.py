"""An exception anywhere in training leaves every row before or after a call, and training goes on.

A loop is a list of calls. One of them is interrupted, at each line of the package that it executes:
all tables and their state must then be those before the call or those after it, and the rest of the
training must give the numbers that plain training from there gives.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

import pytest
import torch
from conftest import NEEDS_GPU
from interrupts import (
    AROUND_STEP,
    CACHES,
    ONLY_COUNTING,
    PACKAGE,
    TRAINING,
    CtrlC,
    Lines,
    every_interrupt,
    first_of_each,
    in_step_of_torch,
    out_of_memory,
    source_files,
)
from interrupts import OPTIMIZERS as OPTIMIZER_FILES
from optimizer_cases import CASES
from plain_training import PlainTraining, assert_same_numbers, differences, make_optimizer
from torch import Tensor, nn

import speedtorch
from speedtorch.step import cached_store, hot_rows
from speedtorch.step.hot_rows import HotRows

ROWS, WIDTH = 10, 2
ROUND = [[1, 2], [3, 4], [1, 5, 5], [6, 2, 7]]
"""Ids of the batches: a row comes back after one batch without it; counts that are equal or not."""
pytestmark = [
    pytest.mark.usefixtures("restless"),
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning"  # what may not fail swallows an interrupt
    ),
]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
ERRORS = [out_of_memory, KeyboardInterrupt]


def lines_of_ours(
    at: int | None = None,
    error: Callable[[], BaseException] = KeyboardInterrupt,
    files: frozenset[str] = TRAINING,
) -> Lines:
    return Lines(files, at, error, skip=ONLY_COUNTING)


MADE: WeakSet[HotRows] = WeakSet()
"""All that are there."""


@pytest.fixture(autouse=True)
def counted_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(HotRows):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            MADE.add(self)

    monkeypatch.setattr(cached_store, "HotRows", Counted)


class Ours:
    """Embeddings with an attached optimizer, and what a loop leaves lying about."""

    def __init__(
        self,
        optimizer: str,
        tables: int,
        device: str,
        capacity: int | None = None,
        stored: torch.dtype | None = None,
    ) -> None:
        self.case = CASES[optimizer]
        self.device = device
        self.first = [first_rows(number) for number in range(tables)]
        self.model = nn.ModuleList(
            speedtorch.Embedding(
                ROWS,
                WIDTH,
                _weight=rows,
                device=device,
                capacity=capacity,
                stored=stored,
                rounding="nearest" if stored else "stochastic",
            )
            for rows in self.first
        )
        self.optimizer = make_optimizer(self.case, self.model.parameters())
        speedtorch.attach(self.optimizer, self.model)
        self._fresh = self.optimizer.state_dict()
        self.waiting: list[Tensor] = []
        self.loop: Iterator[Any] = iter(())
        self.batch: Any = None
        self.at = 0

    def begin_anew(self) -> None:
        """As if it had just been made."""
        self.drop()
        self.optimizer.zero_grad()
        for module, rows in zip(self.model, self.first, strict=True):
            module.load_state_dict({"weight": rows})
        self.optimizer.load_state_dict(self._fresh)

    def drop(self) -> None:
        """What an exception does that leaves a loop: its variables are gone."""
        self.waiting.clear()
        close = getattr(self.loop, "close", None)
        self.loop = iter(())
        if close is not None:
            close()

    def check_locks(self) -> None:
        """Another thread can take each table, as a GPU's backward does."""
        locks = [each.trained_rows.lock for each in self.model]

        def take() -> None:
            for lock in locks:
                with lock:
                    pass

        other = threading.Thread(target=take, daemon=True)
        other.start()
        other.join(10)
        if other.is_alive():
            raise AssertionError("the thread that was interrupted still has a table to itself")

    def numbers(self) -> list[dict[str, Any]]:
        """Rows, state and counts of every table."""
        states = self.optimizer.state_dict()["state"]
        result = []
        for number, module in enumerate(self.model):
            module.flush()
            rows = module.state_dict()["weight"].clone().float()
            entries = states.get(number)
            if entries is None:
                entries = self.case.first_fields(rows)
                entries |= {name: make() for name, make in self.case.scalars.items()}
            result.append({"weight": rows, **entries})
        return result


def first_rows(table: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(table))


def factors(ids: Tensor, number: int) -> Tensor:
    """The gradient of a lookup's result."""
    random = torch.Generator().manual_seed(number + 10 * ids.numel())
    return torch.randint(-3, 4, (*ids.shape, WIDTH), generator=random).float().to(ids.device)


# ------------------------------------------------------------------------------------------------
# Calls


@dataclass(frozen=True)
class Call:
    """One call of a loop.

    Attributes:
        kind: its name.
        batch: of which batch, counted from the round's first.
        ours: does it.
        plain: does the same to the reference.
    """

    kind: str
    batch: int
    ours: Callable[[Ours], object]
    plain: Callable[[PlainTraining], object]


def nothing(_: object) -> None:
    pass


def zero_grad(batch: int) -> Call:
    return Call(
        "zero_grad", batch, lambda o: o.optimizer.zero_grad(), lambda plain: plain.zero_grad()
    )


def zero_grad_of_new_lookups(batch: int) -> Call:
    """As torch's tutorials have it: after the lookups, whose step goes on."""
    return Call("zero_grad", batch, lambda o: o.optimizer.zero_grad(), nothing)


def step(batch: int) -> Call:
    return Call("step", batch, lambda o: o.optimizer.step(), lambda plain: plain.step())


def flush(batch: int) -> Call:
    return Call("flush", batch, lambda o: [each.flush() for each in o.model], nothing)


def state_dict(batch: int) -> Call:
    def save(ours: Ours) -> None:
        ours.model.state_dict()
        ours.optimizer.state_dict()

    return Call("state_dict", batch, save, nothing)


def set_cache(batch: int, nbytes: int | None) -> Call:
    return Call("cache", batch, lambda o: speedtorch.cache(o.model, nbytes), nothing)


def write(batch: int) -> Call:
    """Writes to rows in the table, of which some are in a cache's slots."""
    ids = torch.tensor([1, 2, 8])

    def ours(o: Ours) -> None:
        table = o.model[0].table
        rows = torch.full((3, WIDTH), 0.5, dtype=table["weight"].dtype)
        table.scatter(ids, rows, "weight")

    def plain(training: PlainTraining) -> None:
        training.tables[0].weight[ids] = 0.5

    return Call("write", batch, ours, plain)


def read(batch: int) -> Call:
    """Lookups that train nothing, and the table's own rows."""

    def ours(o: Ours) -> None:
        with torch.no_grad():
            rows = o.model[0](torch.arange(ROWS, device=o.device)).cpu()
        assert torch.equal(o.model[0].table.gather(torch.arange(ROWS), "weight").float(), rows)

    return Call("read", batch, ours, nothing)


def announce(batch: int, table: int, *parts: Tensor) -> Call:
    return Call(
        "announce",
        batch,
        lambda o: o.model[table].announce(*parts),
        lambda plain: plain.tables[table].announce(*parts),
    )


def look_up(batch: int, table: int, ids: Tensor, number: int = 0) -> Call:
    def ours(o: Ours) -> None:
        o.waiting.append((o.model[table](ids) * factors(ids, number)).sum())

    return Call("lookup", batch, ours, lambda plain: plain.tables[table].look_up(ids))


def backward(batch: int, *looked_up: tuple[int, Tensor, int]) -> Call:
    def ours(o: Ours) -> None:
        waiting, o.waiting = o.waiting, []
        torch.stack(waiting).sum().backward()

    def plain(training: PlainTraining) -> None:
        for table, ids, number in looked_up:
            training.tables[table].add_gradient(ids, factors(ids, number))

    return Call("backward", batch, ours, plain)


def begin_loop(batch: int, batches: list[Any], ids: Callable[[Ours], Any]) -> Call:
    def ours(o: Ours) -> None:
        o.loop = iter(speedtorch.prefetch(batches, o.model, ids=ids(o)))

    return Call("prefetch", batch, ours, nothing)


def take(batch: int) -> Call:
    def ours(o: Ours) -> None:
        o.batch = next(o.loop)

    return Call("next", batch, ours, nothing)


def end_loop(batch: int) -> Call:
    def ours(o: Ours) -> None:
        assert next(o.loop, None) is None

    return Call("next", batch, ours, nothing)


# ------------------------------------------------------------------------------------------------
# Loops: the calls for the batches from one on, to the end of the round


@cache
def ids_of(batch: int, shift: int, device: str) -> Tensor:
    """The same tensor whenever it is asked for, as of a loader that keeps its batches."""
    return (torch.tensor(ROUND[batch], device=device) + shift) % ROWS


def plain_loop(begin: int, device: str) -> Iterator[Call]:
    for batch in range(begin, len(ROUND)):
        ids = ids_of(batch, 0, device)
        yield look_up(batch, 0, ids)
        if batch % 2:
            yield zero_grad_of_new_lookups(batch)
        yield backward(batch, (0, ids, 0))
        yield step(batch)
        if batch == 1:
            yield flush(batch)
        if batch == 2:
            yield state_dict(batch)
        if batch % 2 == 0:
            yield zero_grad(batch)


def prefetch_loop(begin: int, device: str) -> Iterator[Call]:
    batches = [ids_of(batch, 0, device) for batch in range(begin, len(ROUND))]
    yield begin_loop(begin, batches, lambda o: lambda ids: ids)
    for batch in range(begin, len(ROUND)):
        ids = ids_of(batch, 0, device)
        yield take(batch)
        yield look_up(batch, 0, ids)
        yield backward(batch, (0, ids, 0))
        yield step(batch)
        if batch == 2:
            yield flush(batch)
        yield zero_grad(batch)
    yield end_loop(len(ROUND) - 1)


def several_lookups(begin: int, device: str) -> Iterator[Call]:
    for batch in range(begin, len(ROUND)):
        parts = [ids_of(batch, shift, device) for shift in (0, 3, 0)]
        yield zero_grad(batch)
        if batch % 2:
            yield announce(batch, 0, *parts[:2])
        for number, ids in enumerate(parts):
            yield look_up(batch, 0, ids, number)
            if batch == 2 and number == 1:
                yield flush(batch)
        if batch == 0:
            yield backward(batch, *((0, ids, number) for number, ids in enumerate(parts)))
            yield look_up(batch, 0, ids_of(1, 0, device), 7)
            yield backward(batch, (0, ids_of(1, 0, device), 7))
        else:
            yield backward(batch, *((0, ids, number) for number, ids in enumerate(parts)))
        yield step(batch)


def several_tables(begin: int, device: str) -> Iterator[Call]:
    for batch in range(begin, len(ROUND)):
        parts = [ids_of(batch, shift, device) for shift in (0, 5)]
        yield zero_grad(batch)
        if batch % 2:
            for table in (0, 1):
                yield announce(batch, table, parts[table])
        for table in (0, 1):
            yield look_up(batch, table, parts[table])
        yield backward(batch, *((table, parts[table], 0) for table in (0, 1)))
        yield step(batch)
        if batch == 1:
            yield state_dict(batch)


def several_tables_prefetched(begin: int, device: str) -> Iterator[Call]:
    batches = [
        [ids_of(batch, shift, device) for shift in (0, 5)] for batch in range(begin, len(ROUND))
    ]
    yield begin_loop(begin, batches, lambda o: lambda parts: dict(zip(o.model, parts, strict=True)))
    for batch in range(begin, len(ROUND)):
        parts = batches[batch - begin]
        yield take(batch)
        for table in (0, 1):
            yield look_up(batch, table, parts[table])
        yield backward(batch, *((table, parts[table], 0) for table in (0, 1)))
        yield step(batch)
        yield zero_grad(batch)
    yield end_loop(len(ROUND) - 1)


def with_a_capacity(begin: int, device: str) -> Iterator[Call]:
    yield from plain_loop(begin, device)


def prefetched_with_a_capacity(begin: int, device: str) -> Iterator[Call]:
    yield from several_tables_prefetched(begin, device)


def with_a_cache(begin: int, device: str) -> Iterator[Call]:
    yield from plain_loop(begin, device)


def prefetched_with_a_cache(begin: int, device: str) -> Iterator[Call]:
    yield from prefetch_loop(begin, device)


def with_a_cache_and_a_capacity(begin: int, device: str) -> Iterator[Call]:
    yield from plain_loop(begin, device)


def between_batches(batch: int) -> Iterator[Call]:
    """Changes of a cache, which are no part of a step."""
    if batch == 0:
        yield from (set_cache(batch, 200), write(batch))
    elif batch == 1:
        yield from (read(batch), set_cache(batch, None), set_cache(batch, 50))
    else:
        yield from (write(batch), read(batch), set_cache(batch, 90), flush(batch))


def with_a_changing_cache(begin: int, device: str) -> Iterator[Call]:
    if begin == 0:
        yield set_cache(0, 100)
    for batch in range(begin, len(ROUND)):
        ids = ids_of(batch, 0, device)
        yield look_up(batch, 0, ids)
        yield backward(batch, (0, ids, 0))
        yield step(batch)
        yield zero_grad(batch)
        yield from between_batches(batch)


def prefetched_with_a_changing_cache(begin: int, device: str) -> Iterator[Call]:
    if begin == 0:
        yield set_cache(0, 100)
    for call in prefetch_loop(begin, device):
        yield call
        if call.kind == "zero_grad":
            yield from between_batches(call.batch)


def rows_of_16_bits_with_a_changing_cache(begin: int, device: str) -> Iterator[Call]:
    yield from with_a_changing_cache(begin, device)


Loop = Callable[[int, str], Iterator[Call]]
LOOPS: list[Loop] = [
    plain_loop,
    prefetch_loop,
    several_lookups,
    several_tables,
    several_tables_prefetched,
    with_a_capacity,
    prefetched_with_a_capacity,
    with_a_cache,
    prefetched_with_a_cache,
    with_a_cache_and_a_capacity,
    with_a_changing_cache,
    prefetched_with_a_changing_cache,
    rows_of_16_bits_with_a_changing_cache,
]
TWO_TABLES = [several_tables, several_tables_prefetched, prefetched_with_a_capacity]
CAPACITIES = {with_a_capacity: 3, prefetched_with_a_capacity: 4, with_a_cache_and_a_capacity: 3}
CACHED = [with_a_cache, prefetched_with_a_cache, with_a_cache_and_a_capacity]
CHANGING = [
    with_a_changing_cache,
    prefetched_with_a_changing_cache,
    rows_of_16_bits_with_a_changing_cache,
]
STORED = {rows_of_16_bits_with_a_changing_cache: torch.bfloat16}
OPTIMIZERS = ["SGD-momentum", "Adam"]
WORK = [
    *itertools.product(LOOPS, OPTIMIZERS),
    *((loop, "RowWiseAdagrad") for loop in [*CACHED, *CHANGING]),
]


# ------------------------------------------------------------------------------------------------
# Interrupted training


class Interrupted:
    """Runs a loop, again and again, interrupts it somewhere, and goes on from there."""

    def __init__(self, loop: Loop, optimizer: str, device: str) -> None:
        self.loop, self.optimizer, self.device = loop, optimizer, device
        self.tables = 2 if loop in TWO_TABLES else 1
        self.calls = list(loop(0, device))
        weights = [first_rows(number).to(device) for number in range(self.tables)]
        plain = PlainTraining.begin(CASES[optimizer], weights)
        if loop in STORED:
            for table in plain.tables:
                table.stored = {"weight": STORED[loop]}
                table.round()
        self.plain = [plain]
        """The reference before each call, and after the last one."""
        for call in self.calls:
            plain = plain.copy()
            call.plain(plain)
            self.plain.append(plain)
        self._ours: Ours | None = None
        self._ends: dict[tuple[int, int], list[list[dict[str, Any]]]] = {}

    def ours(self) -> Ours:
        """One whose training begins; made anew after a failure."""
        ours = self._ours
        if ours is None:
            capacity = CAPACITIES.get(self.loop)
            stored = STORED.get(self.loop)
            ours = Ours(self.optimizer, self.tables, self.device, capacity, stored)
            if self.loop in CACHED:
                speedtorch.cache(ours.model, 100)  # three rows with their state, or four
        self._ours = None
        ours.begin_anew()
        return ours

    def run(self, ours: Ours) -> None:
        for ours.at, call in enumerate(self.calls):
            call.ours(ours)

    def rest(self, batch: int) -> list[Call]:
        """What follows on an interrupt in a batch: that batch is left out."""
        return [zero_grad(batch), *self.loop(batch + 1, self.device), *self.calls]

    def ends(self, state: int, batch: int) -> list[list[dict[str, Any]]]:
        """The numbers at the end, going on after a batch from the reference of before a call.

        torch keeps the graph of a backward that failed on the CPU, so that lookups whose gradient
        has not come may count for the next step, in each table by itself.
        """
        if (state, batch) not in self._ends:
            failed = self.calls[state].kind == "backward" if state < len(self.calls) else False
            kept = [(), (0,), (1,), (0, 1)][: 2**self.tables] if failed else [()]
            self._ends[state, batch] = [
                self.go_on(self.plain[state].copy(), batch, tables) for tables in kept
            ]
        return self._ends[state, batch]

    def go_on(
        self, plain: PlainTraining, batch: int, kept: tuple[int, ...] = ()
    ) -> list[dict[str, Any]]:
        held = [set(plain.tables[table].held) for table in kept]
        plain.zero_grad()
        for table, rows in zip(kept, held, strict=True):
            plain.tables[table].held, plain.tables[table].over = rows, False
        for call in self.rest(batch):
            if call.kind == "zero_grad" and kept:
                continue  # it comes before the lookups that join the step
            call.plain(plain)
            kept = () if call.kind == "step" else kept
        return plain.numbers()

    def check(self, ours: Ours, *, at_once: bool) -> None:
        """All is before or after the call that was interrupted, and goes on from there.

        Args:
            ours: was interrupted in `ours.at`.
            at_once: look at the tables before the training goes on.
        """
        ours.drop()
        ours.check_locks()
        batch = self.calls[ours.at].batch
        states = [ours.at, ours.at + 1]
        if at_once:
            found = ours.numbers()
            wrong = [differences(found, self.plain[state].numbers()) for state in states]
            states = [state for state, each in zip(states, wrong, strict=True) if not each]
            if not states:
                raise AssertionError(f"before the call, {wrong[0]}; after it, {wrong[1]}")
        for call in self.rest(batch):
            call.ours(ours)
        found = ours.numbers()
        wrong = [differences(found, end) for state in states for end in self.ends(state, batch)]
        if all(wrong):
            raise AssertionError(f"the training went on with other numbers: {wrong[0]}")
        if len(MADE) > self.tables:
            gc.collect()
            assert len(MADE) <= self.tables, "the memory of another cache was not given back"
        self._ours = ours

    def describe(self, lines: Lines, ours: Ours) -> str:
        file, number, event = lines.where or ("nowhere", 0, "")
        call = self.calls[ours.at]
        return (
            f"{self.loop.__name__}, {self.optimizer}: {call.kind} of batch {call.batch}"
            f" interrupted at {os.path.basename(file)}:{number} ({event})"
        )

    def interrupt(self, lines: Lines, *, at_once: bool) -> str | None:
        """Interrupts one run there; returns what was wrong afterwards."""
        ours = self.ours()
        with lines:
            self.run(ours)
        try:
            if lines.came_out:
                self.check(ours, at_once=at_once)
            else:  # what must not fail has swallowed it
                assert_same_numbers(ours.numbers(), self.plain[-1].numbers())
                self._ours = ours
        except Exception as error:
            gc.collect()  # a loop that is dropped with the error's traceback ends now
            return f"{self.describe(lines, ours)}: {type(error).__name__}: {error}"
        return None

    def seen(self, files: frozenset[str] = TRAINING) -> list[tuple[str, Any]]:
        """Each line that a run executes of the files, with the call that it belongs to."""
        ours = self.ours()
        kinds: list[tuple[str, Any]] = []
        with lines_of_ours(files=files) as lines:
            for ours.at, call in enumerate(self.calls):
                call.ours(ours)
                assert lines.seen is not None
                kinds += [(call.kind, line) for line in lines.seen[len(kinds) :]]
        assert_same_numbers(ours.numbers(), self.plain[-1].numbers())
        self._ours = ours
        return kinds


def report(wrong: list[str | None]) -> None:
    found = [each for each in wrong if each is not None]
    assert not found, f"{len(found)} of {len(wrong)} interrupts:\n" + "\n".join(found[:12])


def over(work: Iterable[tuple[Loop, str]]) -> Callable[[Any], Any]:
    """Tests each of these loops with its optimizer, on each device."""

    def mark(test: Any) -> Any:
        ids = [f"{loop.__name__}-{optimizer}" for loop, optimizer in chosen]
        test = pytest.mark.parametrize(("loop", "optimizer"), chosen, ids=ids)(test)
        return pytest.mark.parametrize("device", DEVICES)(test)

    chosen = list(work)
    return mark


over_the_grid = over(WORK)


@over_the_grid
def test_the_loops_give_the_numbers_of_plain_training(
    loop: Loop, optimizer: str, device: str
) -> None:
    work = Interrupted(loop, optimizer, device)
    ours = work.ours()
    for _ in range(2):
        work.run(ours)
        assert_same_numbers(ours.numbers(), work.plain[-1].numbers())
        ours.begin_anew()


@pytest.mark.dealt("optimizer")
@over_the_grid
def test_an_error_at_a_line_of_ours_leaves_all_before_or_after_the_call(
    loop: Loop, optimizer: str, device: str
) -> None:
    work = Interrupted(loop, optimizer, device)
    work.seen()  # what is imported or measured at first use is there
    # A share of the lines, by the first time that a kind of call comes there, and of all times;
    # the loops have most lines in common, and take other shares. The next test takes all.
    seen, shares, share = work.seen(), len(WORK), WORK.index((loop, optimizer))
    numbers = sorted(
        {*first_of_each(seen)[share :: 8 * shares], *range(1 + share, len(seen), 1599)}
    )
    report(
        [
            work.interrupt(lines_of_ours(n, ERRORS[i % 2]), at_once=i % 3 != 0)
            for i, n in enumerate(numbers)
        ]
    )


@pytest.mark.dealt("optimizer")
@over((loop, optimizer) for loop, optimizer in WORK if loop in [*CACHED, *CHANGING])
def test_an_error_at_a_line_of_a_cache_leaves_all_before_or_after_the_call(
    loop: Loop, optimizer: str, device: str
) -> None:
    """A share of the lines that move rows to slots and back, which differs from loop to loop."""
    work = Interrupted(loop, optimizer, device)
    work.seen(CACHES)
    lines = first_of_each(work.seen(CACHES))[WORK.index((loop, optimizer)) :: 61]
    report(
        [
            work.interrupt(lines_of_ours(n, ERRORS[i % 2], CACHES), at_once=i % 3 != 0)
            for i, n in enumerate(lines)
        ]
    )


@pytest.mark.parametrize("every_line", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "kind",
    [pytest.param({}, marks=pytest.mark.nightly), {"stored": torch.bfloat16}],
    ids=["rows", "stored"],
)
def test_an_error_at_any_line_that_moves_rows_of_a_cache_loses_none(
    kind: dict[str, Any], every_line: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refresh in which rows take slots of others, a flush, and rows that take slots again."""
    monkeypatch.setattr(hot_rows, "CHUNK_BYTES", 1 << 20)
    sides = [speedtorch.Embedding(ROWS, WIDTH, _weight=first_rows(0), device=device, **kind)]
    sides.append(copy.deepcopy(sides[0]))
    cached, plain = sides
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.25) for each in sides]
    for side, optimizer in zip(sides, optimizers, strict=True):
        speedtorch.attach(optimizer, side)
    speedtorch.cache(cached, "180B")

    def train(ids: Tensor) -> None:
        for side, optimizer in zip(sides, optimizers, strict=True):
            optimizer.zero_grad()
            side(ids).sin().sum().backward()
            optimizer.step()

    def move() -> None:
        store.before_replay()
        cached.flush()
        store.before_replay()

    every, store = torch.arange(ROWS, device=device), cached.trained_rows.exchange.held.store

    def move_and_fail(number: int | None, turn: int) -> Lines:
        with monkeypatch.context() as patch:
            patch.setattr(hot_rows, "FIRST", ())
            patch.setattr(hot_rows, "EVERY", 1 << 20)
            for shift in (turn, turn + 1, turn):  # of other rows each time
                train(every[:4].add(3 * shift) % ROWS)
        with lines_of_ours(number, ERRORS[turn % 2], CACHES) as lines:
            move()
        for side in sides:
            side.table["weight"][turn % ROWS] = 0.5
        with torch.no_grad():
            assert torch.equal(cached(every), plain(every)), lines.where
        train(every[turn % 5 :])
        for side in sides:
            side.flush()
        for name in plain.table.fields:
            assert torch.equal(cached.table[name], plain.table[name]), lines.where
        return lines

    for turn in range(4):
        seen = move_and_fail(None, turn).seen
    assert seen is not None
    numbers = list(range(1, len(seen) + 1)) if every_line else first_of_each(seen)
    for turn, number in enumerate(numbers * 3):  # each with some rows of others
        move_and_fail(number, turn)
    assert len(numbers) > 60
    assert cached.report().rows_moved > len(numbers)


@pytest.mark.nightly
@pytest.mark.parametrize("way", range(4), ids="way{}".format)
@over_the_grid
def test_an_error_at_every_line_of_ours_leaves_all_before_or_after_the_call(
    loop: Loop, optimizer: str, way: int, device: str
) -> None:
    """Each way interrupts every line; the four do it with both errors, looked at early and late."""
    work = Interrupted(loop, optimizer, device)
    work.seen()
    ways = [(error, at_once) for error in ERRORS for at_once in (False, True)]
    report(
        [
            work.interrupt(lines_of_ours(number, error), at_once=at_once)
            for number in range(1, len(work.seen()) + 1)
            for error, at_once in [ways[(number + way) % 4]]
        ]
    )


# ------------------------------------------------------------------------------------------------
# torch's own step


def interrupt_step_of_torch(
    work: Interrupted, at: int, line: int | None, *, at_once: bool
) -> str | None:
    """Interrupts both optimizers at a line of theirs; returns what is different afterwards."""
    ours, plain, batch = work.ours(), work.plain[at].copy(), work.calls[at].batch
    for call in work.calls[:at]:
        call.ours(ours)
    here, there = in_step_of_torch(line), in_step_of_torch(line)
    with here:
        work.calls[at].ours(ours)
    plain.step(during=there)
    assert here.where == there.where and here.count == there.count
    ours.drop()
    wrong = differences(ours.numbers(), plain.numbers()) if at_once else ""
    if not wrong:
        for call in work.rest(batch):
            call.ours(ours)
        wrong = differences(ours.numbers(), work.go_on(plain, batch))
        wrong = wrong and f"the training went on with other numbers: {wrong}"
    if wrong:
        file, number, event = here.where or ("nowhere", 0, "")
        return f"batch {batch}, {os.path.basename(file)}:{number} ({event}): {wrong}"
    work._ours = ours
    return None


def interrupt_steps_of_torch(
    work: Interrupted, chosen: Callable[[list[Any]], list[int]]
) -> list[str | None]:
    steps = [at for at, call in enumerate(work.calls) if call.kind == "step"]
    wrong = []
    for at in (steps[0], steps[2]):
        with in_step_of_torch() as lines:
            work.plain[at].copy().step()
        assert lines.seen is not None
        wrong += [
            interrupt_step_of_torch(work, at, line, at_once=number % 4 != 0)
            for number, line in enumerate(chosen(lines.seen))
        ]
    return wrong


LOOPS_OF_STEPS = pytest.mark.parametrize(
    "loop", [plain_loop, prefetch_loop, several_tables], ids=lambda loop: loop.__name__
)


@pytest.mark.dealt("optimizer")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@LOOPS_OF_STEPS
def test_an_interrupt_within_torchs_step_leaves_what_it_leaves_of_plain_rows(
    loop: Loop, optimizer: str, device: str
) -> None:
    every = 4 if loop is plain_loop else 9
    work = Interrupted(loop, optimizer, device)
    report(interrupt_steps_of_torch(work, lambda seen: first_of_each(seen)[::every]))


@pytest.mark.nightly
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@LOOPS_OF_STEPS
def test_an_interrupt_at_every_line_of_torchs_step_leaves_what_it_leaves_of_plain_rows(
    loop: Loop, optimizer: str, device: str
) -> None:
    work = Interrupted(loop, optimizer, device)
    report(interrupt_steps_of_torch(work, lambda seen: list(range(1, len(seen) + 1))))


# ------------------------------------------------------------------------------------------------
# Real interrupts


def is_within_torchs_step(error: BaseException) -> bool:
    """Whether an optimizer was interrupted that is none of our hooks."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    stepping = [
        number
        for number, code in enumerate(frames)
        if code.co_filename in OPTIMIZER_FILES and code.co_name not in AROUND_STEP
    ]
    hooks = [number for number, code in enumerate(frames) if code.co_filename in PACKAGE]
    return bool(stepping) and not any(number > stepping[0] for number in hooks)


def check_half_done(work: Interrupted, ours: Ours) -> None:
    """torch's step was left half done: other rows are those of before, and training goes on."""
    ours.drop()
    before = work.plain[ours.at]
    found = ours.numbers()
    for table, plain in zip(found, before.tables, strict=True):
        free = torch.tensor([row for row in range(ROWS) if row not in plain.held])
        assert torch.equal(table["weight"].cpu()[free], plain.weight.cpu()[free])
        for name, field in plain.fields.items():
            assert torch.equal(table[name].cpu()[free], field.cpu()[free])
    ours.begin_anew()
    work.run(ours)
    assert_same_numbers(ours.numbers(), work.plain[-1].numbers())


def press_ctrl_c(work: Interrupted, times: int, seed: int) -> int:
    """Trains that often, with a Ctrl-C each time; returns how many came in time."""
    work.run(work.ours())
    seconds = math.inf
    for _ in range(3):  # the shortest: the machine may do something else in between
        ours = work.ours()
        begin = time.perf_counter()
        work.run(ours)
        seconds = min(seconds, time.perf_counter() - begin)
        work._ours = ours
    keys, came = CtrlC(seed), 0
    wrong: list[str | None] = []
    for number in range(times):
        ours = work.ours()
        error = keys.during(lambda ours=ours: work.run(ours), seconds)
        came += error is not None
        where = "".join(traceback.format_tb(error.__traceback__)[-2:-1]) if error else "nowhere"
        half_done = (
            error is not None
            and work.calls[ours.at].kind == "step"
            and is_within_torchs_step(error)
        )
        error = None  # with its traceback the loop goes
        wrong.append(None)
        try:
            if half_done:
                check_half_done(work, ours)
                work._ours = ours
            elif where == "nowhere":
                assert_same_numbers(ours.numbers(), work.plain[-1].numbers())
                work._ours = ours
            else:
                work.check(ours, at_once=number % 2 == 0)
        except Exception as failed:
            gc.collect()
            wrong[-1] = f"{work.calls[ours.at].kind}: {failed}\n{where}"
    report(wrong)
    return came


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "loop",
    [several_lookups, prefetched_with_a_capacity, prefetched_with_a_cache],
    ids=lambda loop: loop.__name__,
)
def test_ctrl_c_leaves_all_before_or_after_a_call(loop: Loop, device: str) -> None:
    assert press_ctrl_c(Interrupted(loop, "Adam", device), 20, seed=1) > 2


@pytest.mark.nightly
@over_the_grid
def test_300_times_ctrl_c_leave_all_before_or_after_a_call(
    loop: Loop, optimizer: str, device: str
) -> None:
    press_ctrl_c(Interrupted(loop, optimizer, device), 300, seed=2)


# ------------------------------------------------------------------------------------------------
# Programs


class FailingSwap:
    """The swap of a step's rows, wherever the package calls it, that fails once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, *, after: bool) -> None:
        self.left, self.after, self.failed = number, after, False
        self.real = speedtorch.ops.functions.exchange_rows
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "speedtorch" and hasattr(module, "exchange_rows"):
                monkeypatch.setattr(module, "exchange_rows", self)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.left -= 1
        if self.left == 0 and not self.after:
            self.failed = True
            raise torch.OutOfMemoryError("pretended")
        self.real(*args, **kwargs)
        if self.left == 0:
            self.failed = True
            raise torch.OutOfMemoryError("pretended")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_prefetched_loop_that_runs_out_of_memory_loses_no_step(
    device: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [torch.tensor(ids, device=device) for ids in ([1, 2], [3, 4], [1, 5], [6, 7])]
    for number in itertools.count(1):
        embedding = speedtorch.Embedding(10, 1, _weight=torch.zeros(10, 1), device=device)
        sgd = torch.optim.SGD(embedding.parameters(), lr=1.0)
        expected = torch.zeros(10, 1)
        with monkeypatch.context() as patch:
            swap = FailingSwap(patch, number, after=after)
            loop = speedtorch.prefetch(batches, embedding, ids=lambda ids: ids)
            try:
                for ids in loop:
                    embedding(ids).sum().backward()
                    sgd.step()
                    expected[ids.cpu()] -= 1
                    sgd.zero_grad()
            except torch.OutOfMemoryError:
                pass
        embedding.flush()
        assert torch.equal(embedding.table["weight"].cpu(), expected), f"swap {number} failed"
        if not swap.failed:
            break
    assert number > 2


@pytest.mark.parametrize("following", [[3, 4], [3, 4, 5]], ids=["as-many", "more"])
@pytest.mark.parametrize("device", DEVICES)
def test_ctrl_c_in_the_lookup_after_a_step_loses_no_row(device: str, following: list[int]) -> None:
    embedding = speedtorch.Embedding(10, 1, _weight=torch.zeros(10, 1), device=device)
    sgd = torch.optim.SGD(embedding.parameters(), lr=1.0)
    first, second = torch.tensor([1, 2], device=device), torch.tensor(following, device=device)

    def train() -> None:
        embedding.load_state_dict({"weight": torch.zeros(10, 1)})
        embedding(first).sum().backward()
        sgd.step()
        sgd.zero_grad()

    for _, lines in every_interrupt(train, lambda _: embedding(second)):
        embedding.flush()
        rows = embedding.state_dict()["weight"].flatten().tolist()
        assert rows == [0, -1, -1, *[0] * 7], lines.where


@pytest.mark.parametrize("device", DEVICES)
def test_prefetch_changes_nothing_where_a_batch_is_trained_in_two_steps(device: str) -> None:
    bias = torch.tensor([0], device=device)
    batches = [torch.tensor(ids, device=device) for ids in ([1, 2], [7, 8], [1, 9])]

    def train(*, ahead: bool) -> Tensor:
        rows = torch.arange(40.0).view(20, 2)
        embedding = speedtorch.Embedding.from_pretrained(rows, freeze=False, device=device)
        sgd = torch.optim.SGD(embedding.parameters(), lr=0.1, weight_decay=0.5)
        loop: Any = batches
        if ahead:
            loop = speedtorch.prefetch(batches, embedding, ids=lambda ids: [ids, bias])
        for ids in loop:
            sgd.zero_grad()
            (embedding(ids).sum() + embedding(bias).sum()).backward()
            sgd.step()
            sgd.zero_grad()
            embedding(bias).square().sum().backward()
            sgd.step()
        return embedding.state_dict()["weight"].clone()

    different = (train(ahead=True) != train(ahead=False)).any(1)
    assert different.nonzero().flatten().tolist() == []


@pytest.mark.parametrize("sparse", [False, True])
def test_what_was_written_to_a_gradient_outlives_an_interrupted_step(sparse: bool) -> None:
    files = source_files("step/parameter_view.py", "step/whole_weight.py", "step/exchange.py")

    def written() -> tuple[speedtorch.Embedding, torch.optim.Optimizer]:
        ones = torch.ones(5, 2)
        embedding = speedtorch.Embedding(5, 2, _weight=ones, sparse=sparse)
        sgd = torch.optim.SGD(embedding.parameters(), lr=1.0)
        embedding(torch.tensor([1, 2])).sum().backward()
        gradient = embedding.weight.grad
        assert gradient is not None
        if sparse:
            more = torch.sparse_coo_tensor([[1, 2, 3]], ones[:3], (5, 2), check_invariants=False)
            gradient.add_(more)
        else:
            gradient[[1, 2, 3]] += 1.0
        return embedding, sgd

    number = 0
    for number, ((embedding, sgd), _) in enumerate(  # noqa: B007
        every_interrupt(written, lambda made: made[1].step(), files=files), 1
    ):
        sgd.step()
        once, twice = [1.0, -1.0, -1.0, 0.0, 1.0], [1.0, -3.0, -3.0, -1.0, 1.0]
        assert embedding.numpy()[:, 0].tolist() in (once, twice)
    assert number > 50
