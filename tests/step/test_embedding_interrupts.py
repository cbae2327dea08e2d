"""An exception anywhere in training leaves every row before or after a call, and training goes on.

A loop is a list of calls. One of them is interrupted: all tables and their state must then be those
before the call or those after it, and the rest of the training must give the numbers that plain
training from there gives. The ordinary run raises at the first line and at the return of functions
that move rows or end a step, `make nightly` at every line.
"""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import WeakSet

import pytest
import torch
from interrupts import (
    AROUND_STEP,
    ONLY_COUNTING,
    PACKAGE,
    TRAINING,
    CtrlC,
    Line,
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
from speedtorch.optim.step_hooks import OptimizerStep
from speedtorch.optim.step_state import StepState
from speedtorch.step import cached_store, hot_rows
from speedtorch.step.cached_store import CachedStore
from speedtorch.step.counted_memory import CountedMemory
from speedtorch.step.fixed_blocks import FixedBlocks
from speedtorch.step.held_rows import HeldRows
from speedtorch.step.hot_rows import HotRows
from speedtorch.step.joint_exchange import JointExchange
from speedtorch.step.row_store import RowStore, StoreInSlots
from speedtorch.step.stepped_rows import SteppedRows
from speedtorch.step.whole_weight import WholeWeight

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
ERRORS = [out_of_memory, KeyboardInterrupt]
PLACES: list[Any] = [
    *(HeldRows.take, HeldRows.complete, HeldRows.write_back),
    *(RowStore.exchange, RowStore.load_batch, RowStore.join_batch, RowStore.append_batch),
    *(RowStore.exchange_counted, RowStore.write, CachedStore.exchange),
    *(CachedStore.exchange_counted, StoreInSlots.load_batch, StoreInSlots.join_batch),
    StoreInSlots.append_batch,
    *(JointExchange.begin, JointExchange._exchange),
    *(FixedBlocks.begin, FixedBlocks.send, FixedBlocks.write_back),
    *(WholeWeight.add_gradient, SteppedRows.settle, SteppedRows.after),
    *(OptimizerStep.enter, OptimizerStep.stop, OptimizerStep.finish),
    *(StepState.begin_step, StepState.end_step),
]
"""Functions that move rows, or that begin or end a step."""
WHOLE: list[Any] = [
    *(HotRows._move, HotRows.write_back, HotRows._reload),
    *(CountedMemory._joined, CountedMemory.ordered),
]
"""Functions of which each line counts: they change a map of rows along with the rows."""


@cache
def lines_of_places() -> frozenset[Line]:
    lines: set[Line] = set()
    for function in (*PLACES, *WHOLE):
        code = inspect.unwrap(function).__code__
        assert code.co_filename in TRAINING
        numbers = {line for *_, line in code.co_lines() if line and line > code.co_firstlineno}
        begin = numbers if function in WHOLE else {min(numbers)}
        lines |= {(code.co_filename, line, "line") for line in begin}
        lines |= {(code.co_filename, line, "return") for line in numbers}
    return frozenset(lines)


def at_places(seen: list[tuple[str, Line]]) -> list[int]:
    """Numbers of the last time that each kind of call comes to one of these places."""
    places = lines_of_places()
    last = {each: number for number, each in enumerate(seen, 1) if each[1] in places}
    return sorted(last.values())


def lines_of_ours(
    at: int | None = None, error: Callable[[], BaseException] = KeyboardInterrupt
) -> Lines:
    return Lines(TRAINING, at, error, skip=ONLY_COUNTING)


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

    def __init__(self, loop: Loop, optimizer: str, device: str) -> None:
        self.case = CASES[optimizer]
        self.device = device
        self.first = [first_rows(number) for number in range(loop.tables)]
        given: dict[str, Any] = {
            "device": device,
            "rounding": "nearest" if loop.stored else "stochastic",
        }
        given |= {"capacity": loop.capacity, "stored": loop.stored}
        self.model = nn.ModuleList(
            speedtorch.Embedding(ROWS, WIDTH, _weight=rows, **given) for rows in self.first
        )
        self.optimizer = make_optimizer(self.case, self.model.parameters())
        speedtorch.attach(self.optimizer, self.model)
        if loop.cached:
            speedtorch.cache(self.model, 100)  # three rows with their state, or four
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


def zero_grad(batch: int, *, is_early: bool = True) -> Call:
    """As torch's tutorials have it, after the lookups (not `is_early`), their step goes on."""
    plain = PlainTraining.zero_grad if is_early else nothing
    return Call("zero_grad", batch, lambda o: o.optimizer.zero_grad(), plain)


def step(batch: int) -> Call:
    return Call("step", batch, lambda o: o.optimizer.step(), lambda plain: plain.step())


def flush(batch: int) -> Call:
    return Call("flush", batch, lambda o: [each.flush() for each in o.model], nothing)


def state_dict(batch: int) -> Call:
    return Call(
        "state_dict", batch, lambda o: (o.model.state_dict(), o.optimizer.state_dict()), nothing
    )


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


def usual(begin: int, device: str, *, tables: int = 1, ahead: bool = False) -> Iterator[Call]:
    """One lookup of each table in a step; some steps are announced, or all are prefetched."""
    batches = [
        [ids_of(batch, 5 * table, device) for table in range(tables)] for batch in range(len(ROUND))
    ]
    if ahead:
        yield begin_loop(
            begin, batches[begin:], lambda o: lambda parts: dict(zip(o.model, parts, strict=True))
        )
    for batch in range(begin, len(ROUND)):
        parts = list(enumerate(batches[batch]))
        if ahead:
            yield take(batch)
        elif tables > 1 and batch % 2:
            yield from (announce(batch, table, ids) for table, ids in parts)
        yield from (look_up(batch, table, ids) for table, ids in parts)
        if batch % 2 and not ahead:
            yield zero_grad(batch, is_early=False)
        yield backward(batch, *((table, ids, 0) for table, ids in parts))
        yield step(batch)
        if batch == 1:
            yield flush(batch)
        if batch == 2:
            yield state_dict(batch)
        if ahead or batch % 2 == 0:
            yield zero_grad(batch)
    if ahead:
        yield end_loop(len(ROUND) - 1)


def several_lookups(begin: int, device: str) -> Iterator[Call]:
    for batch in range(begin, len(ROUND)):
        shifts = (0, 3, 0, 4, 8) if batch == 2 else (0, 3, 0)  # the last two append rows
        parts = [ids_of(batch, shift, device) for shift in shifts]
        yield zero_grad(batch)
        if batch % 2:
            yield announce(batch, 0, *parts[:2])
        for number, ids in enumerate(parts):
            yield look_up(batch, 0, ids, number)
            if batch == 2 and number == 1:
                yield flush(batch)
        yield backward(batch, *((0, ids, number) for number, ids in enumerate(parts)))
        if batch == 0:
            yield look_up(batch, 0, ids_of(1, 0, device), 7)
            yield backward(batch, (0, ids_of(1, 0, device), 7))
        yield step(batch)


def between_batches(batch: int) -> Iterator[Call]:
    """Changes of a cache, which are no part of a step."""
    if batch == 0:
        yield from (set_cache(batch, 200), write(batch))
    elif batch == 1:
        yield from (read(batch), set_cache(batch, None), set_cache(batch, 50))
    else:
        yield from (write(batch), read(batch), set_cache(batch, 90), flush(batch))


def with_a_changing_cache(begin: int, device: str, *, ahead: bool = False) -> Iterator[Call]:
    if begin == 0:
        yield set_cache(0, 100)
    for call in usual(begin, device, ahead=True):
        if ahead or call.kind not in ("prefetch", "next"):
            yield call
        if call.kind == "zero_grad":
            yield from between_batches(call.batch)


@dataclass(frozen=True)
class Loop:
    """The calls from a batch on, on a device, and settings of the embeddings."""

    calls: Callable[..., Iterator[Call]] = usual
    given: Mapping[str, Any] = field(default_factory=dict)
    capacity: int | None = None
    stored: torch.dtype | None = None
    cached: bool = False

    @property
    def tables(self) -> int:
        return int(self.given.get("tables", 1))

    def calls_from(self, begin: int, device: str) -> list[Call]:
        return list(self.calls(begin, device, **self.given))


TWO, AHEAD = {"tables": 2}, {"ahead": True}
LOOPS = {
    "plain": Loop(),
    "prefetch": Loop(given=AHEAD),
    "lookups": Loop(several_lookups),
    "tables": Loop(given=TWO),
    "tables-prefetch": Loop(given={**TWO, **AHEAD}),
    "capacity": Loop(capacity=3),
    "capacity-prefetch": Loop(given={**TWO, **AHEAD}, capacity=4),
    "cache": Loop(cached=True),
    "cache-prefetch": Loop(given=AHEAD, cached=True),
    "cache-capacity": Loop(capacity=3, cached=True),
    "changing-cache": Loop(with_a_changing_cache),
    "changing-cache-prefetch": Loop(with_a_changing_cache, AHEAD),
    "changing-cache-16-bits": Loop(with_a_changing_cache, stored=torch.bfloat16),
}
OPTIMIZERS = ["SGD-momentum", "Adam"]
WORK = list(itertools.product(LOOPS, OPTIMIZERS))
WORK += [(name, "RowWiseAdagrad") for name in LOOPS if "cache" in name]


# ------------------------------------------------------------------------------------------------
# Interrupted training


class Interrupted:
    """Runs a loop, again and again, interrupts it somewhere, and goes on from there."""

    def __init__(self, name: str, optimizer: str, device: str) -> None:
        self.name, self.optimizer, self.device = name, optimizer, device
        self.loop = LOOPS[name]
        self.tables = self.loop.tables
        self.calls = self.loop.calls_from(0, device)
        weights = [first_rows(number).to(device) for number in range(self.tables)]
        plain = PlainTraining.begin(CASES[optimizer], weights)
        if self.loop.stored is not None:
            for table in plain.tables:
                table.stored = {"weight": self.loop.stored}
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
        ours = self._ours or Ours(self.loop, self.optimizer, self.device)
        self._ours = None
        ours.begin_anew()
        return ours

    def run(self, ours: Ours) -> None:
        for ours.at, call in enumerate(self.calls):
            call.ours(ours)

    def rest(self, batch: int) -> list[Call]:
        """What follows on an interrupt in a batch: that batch is left out."""
        return [zero_grad(batch), *self.loop.calls_from(batch + 1, self.device), *self.calls]

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
            call = self.calls[ours.at]
            where = f"{call.kind} of batch {call.batch} interrupted at {shown(lines)}"
            return f"{self.name}, {self.optimizer}: {where}: {type(error).__name__}: {error}"
        return None

    def interrupt_each(self, numbers: Iterable[int], way: int = 0) -> None:
        """Interrupts a run at each line, with both errors; a way begins with another of them."""
        ways = [(error, at_once) for error in ERRORS for at_once in (False, True)]
        report(
            [
                self.interrupt(lines_of_ours(number, error), at_once=at_once)
                for turn, number in enumerate(numbers)
                for error, at_once in [ways[(turn + way) % 4]]
            ]
        )

    def seen(self) -> list[tuple[str, Line]]:
        """Each line of ours that a run executes, with the call that it belongs to."""
        ours = self.ours()
        kinds: list[tuple[str, Line]] = []
        with lines_of_ours() as lines:
            for ours.at, call in enumerate(self.calls):
                call.ours(ours)
                assert lines.seen is not None
                kinds += [(call.kind, line) for line in lines.seen[len(kinds) :]]
        assert_same_numbers(ours.numbers(), self.plain[-1].numbers())
        self._ours = ours
        return kinds


def shown(lines: Lines) -> str:
    file, number, event = lines.where or ("nowhere", 0, "")
    return f"{os.path.basename(file)}:{number} ({event})"


def report(wrong: list[str | None]) -> None:
    found = [each for each in wrong if each is not None]
    assert not found, f"{len(found)} of {len(wrong)} interrupts:\n" + "\n".join(found[:12])


over_the_grid = pytest.mark.parametrize(
    ("loop", "optimizer"), WORK, ids=["-".join(each) for each in WORK]
)


@pytest.mark.dealt("optimizer")
@over_the_grid
def test_an_error_where_rows_move_leaves_all_before_or_after_the_call(
    loop: str, optimizer: str, device: str
) -> None:
    work = Interrupted(loop, optimizer, device)
    work.seen()  # what is imported or measured at first use is there
    work.interrupt_each(at_places(work.seen()))


@pytest.mark.nightly
@pytest.mark.parametrize("way", range(4), ids="way{}".format)
@over_the_grid
def test_an_error_at_every_line_of_ours_leaves_all_before_or_after_the_call(
    loop: str, optimizer: str, way: int, device: str
) -> None:
    work = Interrupted(loop, optimizer, device)
    work.seen()
    work.interrupt_each(range(1, len(work.seen()) + 1), way)


@pytest.mark.parametrize(
    "every_line", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["some", "all"]
)
@pytest.mark.parametrize(
    "stored",
    [pytest.param(None, marks=pytest.mark.nightly), torch.bfloat16],
    ids=["rows", "stored"],
)
def test_an_error_while_rows_take_slots_of_others_loses_none(
    stored: torch.dtype | None, every_line: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refresh in which rows take slots of others, a flush, and rows that take slots again."""
    monkeypatch.setattr(hot_rows, "CHUNK_BYTES", 1 << 20)
    cached = speedtorch.Embedding(ROWS, WIDTH, _weight=first_rows(0), device=device, stored=stored)
    sides = cached, copy.deepcopy(cached)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.25) for each in sides]
    for side, optimizer in zip(sides, optimizers, strict=True):
        speedtorch.attach(optimizer, side)
    speedtorch.cache(cached, "180B")
    every, store = torch.arange(ROWS, device=device), cached.trained_rows.exchange.held.store

    def train(ids: Tensor) -> None:
        for side, optimizer in zip(sides, optimizers, strict=True):
            optimizer.zero_grad()
            side(ids).sin().sum().backward()
            optimizer.step()

    def move_and_fail(number: int | None, turn: int) -> Lines:
        with monkeypatch.context() as patch:
            patch.setattr(hot_rows, "FIRST", ())
            patch.setattr(hot_rows, "EVERY", 1 << 20)
            for shift in (turn, turn + 1, turn):  # of other rows each time
                train(every[:4].add(3 * shift) % ROWS)
        with lines_of_ours(number, ERRORS[turn % 2]) as lines:
            store.before_replay()
            cached.flush()
            store.before_replay()
        for side in sides:
            side.table["weight"][turn % ROWS] = 0.5
        with torch.no_grad():
            assert torch.equal(*(side(every) for side in sides)), lines.where
        train(every[turn % 5 :])
        for side in sides:
            side.flush()
        for name in cached.table.fields:
            assert torch.equal(*(side.table[name] for side in sides)), lines.where
        return lines

    for turn in range(4):
        seen = move_and_fail(None, turn).seen
    assert seen is not None
    numbers = list(range(1, len(seen) + 1))
    if not every_line:
        numbers = [number for number in numbers if seen[number - 1] in lines_of_places()]
    for turn, number in enumerate(numbers * 3):  # each with some rows of others
        move_and_fail(number, turn)
    assert len(numbers) > 30
    assert cached.report().rows_moved > len(numbers)


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
        return f"batch {batch}, {shown(here)}: {wrong}"
    work._ours = ours
    return None


@pytest.mark.dealt("optimizer")
@pytest.mark.parametrize(
    "every_line", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["some", "all"]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("loop", ["plain", "prefetch", "tables"])
def test_an_interrupt_within_torchs_step_leaves_what_it_leaves_of_plain_rows(
    loop: str, optimizer: str, every_line: bool, device: str
) -> None:
    work = Interrupted(loop, optimizer, device)
    steps = [at for at, call in enumerate(work.calls) if call.kind == "step"]
    wrong = []
    for at in (steps[0], steps[2]):
        with in_step_of_torch() as lines:
            work.plain[at].copy().step()
        assert lines.seen is not None
        chosen = range(1, len(lines.seen) + 1) if every_line else first_of_each(lines.seen)[::9]
        wrong += [
            interrupt_step_of_torch(work, at, line, at_once=number % 4 != 0)
            for number, line in enumerate(chosen)
        ]
    report(wrong)


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
        for name, rows in plain.fields.items():
            assert torch.equal(table[name].cpu()[free], rows.cpu()[free])
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


@pytest.mark.nightly
@over_the_grid
def test_300_times_ctrl_c_leave_all_before_or_after_a_call(
    loop: str, optimizer: str, device: str
) -> None:
    assert press_ctrl_c(Interrupted(loop, optimizer, device), 300, seed=2) > 30


# ------------------------------------------------------------------------------------------------
# Programs


@pytest.mark.parametrize("sparse", [False, True])
def test_what_was_written_to_a_gradient_outlives_an_interrupted_step(
    sparse: bool,
) -> None:
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
