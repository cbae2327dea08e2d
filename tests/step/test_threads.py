"""Threads: each may train its own model, and one module is used by one of them at a time.

SPEEDTORCH_ROUNDS sets how many random programs run, 10 by default, and SPEEDTORCH_FIRST the first.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from ordinary_run import programs
from torch import Tensor, nn, optim
from warm_python import warm_python

import speedtorch
from speedtorch.step import stepped_rows
from speedtorch.step.row_lock import RowLock, RowLocks, merge_locks

ROUNDS = int(os.environ.get("SPEEDTORCH_ROUNDS", programs(10)))
FIRST = int(os.environ.get("SPEEDTORCH_FIRST", "0"))
ROWS, COLUMNS, STEPS = 12, 3, 6

# Optimizers of which torch's nn.Embedding takes the same steps, row by row.
KINDS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda parameters: optim.SGD(parameters, lr=0.1),
    "fused SGD": lambda parameters: optim.SGD(parameters, lr=0.1, fused=True),
    "Adagrad": lambda parameters: optim.Adagrad(parameters, lr=0.1),
    "SparseAdam": lambda parameters: optim.SparseAdam(list(parameters), lr=0.1),
}


class Program:
    """A model that is trained on batches, by torch alone and by this library."""

    def __init__(self, seed: int) -> None:
        generator = random.Random(seed)
        self.kind = generator.choice(list(KINDS))
        self.prefetches = generator.random() < 0.5
        self.capacity = ROWS if generator.random() < 0.3 else None
        numbers = torch.Generator().manual_seed(seed)
        self.first = torch.randn(ROWS, COLUMNS, generator=numbers)
        sizes = [generator.randint(1, 6) for _ in range(STEPS)]
        self.batches = [torch.randint(ROWS, (size,), generator=numbers) for size in sizes]
        self.evaluates = [generator.random() < 0.3 for _ in range(STEPS)]
        self.saves = [generator.random() < 0.2 for _ in range(STEPS)]

    def plain(self) -> list[Tensor]:
        """The weights before the first step and after each."""
        model = nn.Embedding(
            ROWS, COLUMNS, _weight=self.first.clone(), sparse=self.kind == "SparseAdam"
        )
        optimizer, seen = KINDS[self.kind](model.parameters()), [self.first]
        for batch in self.batches:
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
            seen.append(model.weight.detach().clone())
        return seen

    def made(self) -> tuple[speedtorch.Embedding, optim.Optimizer]:
        model = speedtorch.Embedding(
            ROWS,
            COLUMNS,
            _weight=self.first,
            sparse=self.kind == "SparseAdam",
            capacity=self.capacity,
        )
        optimizer = KINDS[self.kind](model.parameters())
        if "SGD" not in self.kind:
            speedtorch.attach(optimizer, model)
        return model, optimizer

    def train(self, model: speedtorch.Embedding, optimizer: optim.Optimizer) -> list[str]:
        """Trains, and evaluates and saves in between; what was not as in plain torch."""
        expected, wrong = self.plain(), []
        loop: Any = self.batches
        if self.prefetches:
            loop = speedtorch.prefetch(self.batches, model, ids=lambda batch: batch)
        for step, batch in enumerate(loop):
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
            if self.evaluates[step]:
                with torch.no_grad():
                    if not torch.equal(model(torch.arange(ROWS)), expected[step + 1]):
                        wrong.append(f"rows that were read after step {step}")
            if self.saves[step]:
                if not torch.equal(model.state_dict()["weight"], expected[step + 1]):
                    wrong.append(f"rows that were saved after step {step}")
                optimizer.state_dict()
        if not torch.equal(model.state_dict()["weight"], expected[-1]):
            wrong.append("rows at the end")
        return wrong


def run_in_threads(*works: Callable[[], object]) -> list[BaseException]:
    """Runs functions at once, each in a thread of its own; gives what they raise."""
    errors: list[BaseException] = []
    begin = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> None:
        try:
            begin.wait(60)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    return errors


@pytest.fixture(autouse=True)
def switches_often(one_thread: None) -> Iterator[None]:
    """Threads of Python take turns at nearly every line."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_models_in_threads_of_their_own_train_as_in_plain_torch() -> None:
    wrong: list[str] = []
    for seed in range(FIRST, FIRST + ROUNDS):
        programs = [Program(2 * seed), Program(2 * seed + 1)]
        made = [each.made() for each in programs]
        found: list[list[str]] = [[], []]

        def work(
            at: int, programs: Any = programs, made: Any = made, found: Any = found
        ) -> Callable[[], None]:
            def train() -> None:
                found[at] = programs[at].train(*made[at])

            return train

        assert run_in_threads(work(0), work(1)) == []
        wrong += [f"seed {seed}, thread {at}: {each}" for at in (0, 1) for each in found[at]]
    assert wrong == []


def test_another_thread_reads_rows_as_they_are_between_two_steps() -> None:
    for seed in range(FIRST, FIRST + ROUNDS):
        program = Program(seed)
        model, optimizer = program.made()
        expected, read = program.plain(), []
        is_over, copies = threading.Event(), "SGD" not in program.kind  # else the table's own rows

        def train(
            model: Any = model,
            optimizer: Any = optimizer,
            program: Any = program,
            over: Any = is_over,
        ) -> None:
            try:
                assert program.train(model, optimizer) == []
            finally:
                over.set()

        def look(
            model: Any = model, read: Any = read, over: Any = is_over, copies: bool = copies
        ) -> None:
            while not over.is_set():
                with torch.no_grad():
                    read.append(model(torch.arange(ROWS)))
                if copies:
                    read.append(model.state_dict()["weight"])

        assert run_in_threads(train, look) == []
        for rows in read:
            assert any(torch.equal(rows, each) for each in expected), program.kind


class Pair:
    """Two tables whose rows are exchanged together, trained by torch alone and by this library."""

    def __init__(self, seed: int) -> None:
        generator = random.Random(seed)
        self.kind = generator.choice(["SGD", "fused SGD", "Adagrad"])
        numbers = torch.Generator().manual_seed(seed)
        self.first = [torch.randn(ROWS, COLUMNS, generator=numbers) for _ in range(2)]
        sizes = [[generator.randint(1, 6) for _ in range(2)] for _ in range(STEPS)]
        self.batches = [
            [torch.randint(ROWS, (size,), generator=numbers) for size in pair] for pair in sizes
        ]

    def made(self, kind: type[nn.Module]) -> tuple[nn.ModuleList, optim.Optimizer]:
        model = nn.ModuleList(kind(ROWS, COLUMNS, _weight=rows.clone()) for rows in self.first)
        optimizer = KINDS[self.kind](model.parameters())
        if kind is speedtorch.Embedding and "SGD" not in self.kind:
            speedtorch.attach(optimizer, model)
        return model, optimizer

    def train(self, model: nn.ModuleList, optimizer: optim.Optimizer) -> list[list[Tensor]]:
        """The weights of both tables before the first step and, of torch's, after each."""
        ours, seen = isinstance(model[0], speedtorch.Embedding), [self.first]
        loop: Any = self.batches
        if ours:
            loop = speedtorch.prefetch(
                loop, model, ids=lambda batch: {m: [i] for m, i in zip(model, batch, strict=True)}
            )
        for batch in loop:
            optimizer.zero_grad()
            sum(m(ids).square().sum() for m, ids in zip(model, batch, strict=True)).backward()
            optimizer.step()
            if not ours:
                seen.append([each.weight.detach().clone() for each in model])
        return seen


def test_another_thread_reads_tables_that_exchange_their_rows_together() -> None:
    for seed in range(FIRST, FIRST + ROUNDS):
        pair = Pair(seed)
        expected = pair.train(*pair.made(nn.Embedding))
        model, optimizer = pair.made(speedtorch.Embedding)
        read: list[tuple[int, Tensor]] = []
        is_over = threading.Event()

        def train(pair: Any = pair, made: Any = (model, optimizer), over: Any = is_over) -> None:
            try:
                pair.train(*made)
            finally:
                over.set()

        def look(pair: Any = pair, model: Any = model, read: Any = read, o: Any = is_over) -> None:
            while not o.is_set():
                for number in (1, 0):
                    with torch.no_grad():
                        read.append((number, model[number](torch.arange(ROWS))))
                    if "SGD" not in pair.kind:  # else the table's own rows
                        read.append((number, model[number].state_dict()["weight"]))

        assert run_in_threads(train, look) == [], seed
        read += [(number, model[number].state_dict()["weight"]) for number in range(2)]
        for number, rows in read:
            assert any(torch.equal(rows, each[number]) for each in expected), (seed, pair.kind)
        for number in range(2):
            assert torch.equal(model[number].state_dict()["weight"], expected[-1][number])


def stepped_models(
    kind: Callable[[Any], optim.Optimizer], ids: list[int]
) -> tuple[speedtorch.Embedding, optim.Optimizer]:
    model = speedtorch.Embedding(6, 2, _weight=torch.ones(6, 2))
    optimizer = kind(model.parameters())
    if not isinstance(optimizer, optim.SGD):
        speedtorch.attach(optimizer, model)
    model(torch.tensor(ids)).sum().backward()
    return model, optimizer


def moved(model: speedtorch.Embedding) -> list[int]:
    rows = (model.state_dict()["weight"] != 1).any(1)
    return rows.nonzero().flatten().tolist()


def call_within_step(
    optimizer: optim.Optimizer, work: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lets its own step function, Adam's or SGD's, call `work` once, before anything else."""
    kind: Any = type(optimizer)
    own, to_call = kind._init_group, [work]

    def called(self: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self is optimizer and to_call:
            to_call.pop()()
        return own(self, *args, **kwargs)

    monkeypatch.setattr(kind, "_init_group", called)


OPTIMIZERS = [lambda p: optim.Adam(p, lr=0.5), lambda p: optim.Adam(p, lr=0.5, fused=True)]
OPTIMIZERS += [lambda p: optim.SGD(p, lr=0.5), lambda p: optim.SGD(p, lr=0.5, foreach=True)]
IDS = ["Adam", "fused Adam", "SGD", "foreach SGD"]


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=IDS)
def test_a_step_in_another_thread_leaves_a_step_that_is_under_way(
    kind: Callable[[Any], optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = stepped_models(kind, [3])
    other, others = stepped_models(kind, [1])
    errors: list[list[BaseException]] = []
    call_within_step(optimizer, lambda: errors.append(run_in_threads(others.step)), monkeypatch)
    optimizer.step()
    assert errors == [[]]
    assert moved(model) == [3] and moved(other) == [1]


def test_a_step_of_another_thread_within_a_closure_leaves_the_rows_that_it_steps() -> None:
    model, optimizer = stepped_models(OPTIMIZERS[0], [3])
    other, others = stepped_models(OPTIMIZERS[2], [1])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.tensor([3])).sum()
        loss.backward()
        assert run_in_threads(others.step) == []
        return loss

    optimizer.step(closure)
    assert moved(model) == [3] and moved(other) == [1]


USES: dict[str, Callable[[speedtorch.Embedding, optim.Optimizer], object]] = {
    "state_dict": lambda model, optimizer: model.state_dict(),
    "the optimizer's state_dict": lambda model, optimizer: optimizer.state_dict(),
    "flush": lambda model, optimizer: model.flush(),
    "a lookup": lambda model, optimizer: model(torch.tensor([0])),
    "announce": lambda model, optimizer: model.announce(torch.tensor([0])),
    "the table": lambda model, optimizer: model.table["weight"],
    "the table's rows": lambda model, optimizer: model.table.gather(torch.tensor([0])),
    "save": lambda model, optimizer: model.table.save("rows.npy"),
    "step": lambda model, optimizer: optimizer.step(),
    "load_state_dict": lambda model, optimizer: model.load_state_dict(
        {"weight": torch.zeros(6, 2)}
    ),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_module_that_another_thread_steps_is_refused_after_a_while(
    use: Callable[[speedtorch.Embedding, optim.Optimizer], object],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(stepped_rows, "_TIMEOUT", 0.05)
    monkeypatch.chdir(tmp_path)
    model, optimizer = stepped_models(OPTIMIZERS[0], [3])
    errors: list[BaseException] = []

    def meanwhile() -> None:
        errors.extend(run_in_threads(lambda: use(model, optimizer)))

    call_within_step(optimizer, meanwhile, monkeypatch)
    optimizer.step()
    (error,) = errors
    assert isinstance(error, RuntimeError)
    assert "an optimizer's step() in another thread" in str(error) and "Embedding" in str(error)
    assert moved(model) == [3]


def test_a_use_waits_for_the_step_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = stepped_models(OPTIMIZERS[2], [3])
    read: list[Tensor] = []
    threads: list[threading.Thread] = []

    def meanwhile() -> None:
        threads.append(threading.Thread(target=lambda: read.append(model.state_dict()["weight"])))
        threads[0].start()

    call_within_step(optimizer, meanwhile, monkeypatch)
    optimizer.step()
    threads[0].join()
    assert torch.equal(read[0][3], torch.full((2,), 0.5))


def test_a_step_that_an_exception_left_in_a_thread_that_ended_holds_nothing_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = stepped_models(OPTIMIZERS[0], [3])

    def fail() -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as until_here:
        call_within_step(optimizer, fail, until_here)
        (error,) = run_in_threads(optimizer.step)
    assert isinstance(error, ZeroDivisionError)
    assert moved(model) == []
    optimizer.step()
    assert moved(model) == [3]


def test_a_step_is_refused_while_lookups_of_another_thread_wait_for_their_backward() -> None:
    model, optimizer = stepped_models(OPTIMIZERS[0], [3])
    kept: list[Tensor] = []
    assert run_in_threads(lambda: kept.append(model(torch.tensor([4])))) == []
    with pytest.raises(RuntimeError, match="lookups of another thread .* wait for their backward"):
        optimizer.step()
    assert moved(model) == []
    kept[0].sum().backward()
    kept.clear()
    optimizer.step()
    assert moved(model) == [3, 4]


def test_gradients_of_lookups_in_several_threads_add_up() -> None:
    model, optimizer = stepped_models(OPTIMIZERS[2], [3])
    works = [lambda: model(torch.tensor([3, 4])).sum().backward() for _ in range(4)]
    assert run_in_threads(*works) == []
    optimizer.step()
    assert model.state_dict()["weight"][:, 0].tolist() == [1, 1, 1, 1 - 0.5 * 5, 1 - 0.5 * 4, 1]


def test_a_thread_that_waits_for_its_lock_gets_it() -> None:
    lock, taken = RowLock(), count()
    is_over = threading.Event()

    def again_and_again() -> None:
        while not is_over.is_set():
            with lock:
                next(taken)

    def a_few_times() -> None:
        try:
            for _ in range(20):
                with lock:
                    pass
        finally:
            is_over.set()

    assert run_in_threads(again_and_again, a_few_times) == []


def test_a_lock_goes_to_threads_in_the_order_in_which_they_ask() -> None:
    lock, order = RowLock(), []
    has_asked = [threading.Event() for _ in range(4)]

    def ask(number: int) -> None:
        has_asked[number].set()
        with lock:
            order.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    with lock:
        for thread, event in zip(threads, has_asked, strict=True):
            thread.start()
            assert event.wait(10)
            time.sleep(0.02)  # until it waits
    with lock:
        order.append(4)
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, 2, 3, 4]


def test_ctrl_c_ends_the_wait_for_a_lock_and_takes_none() -> None:
    lock = RowLock()
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            assert is_over.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(10)
    sender = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sender.start()
        with pytest.raises(KeyboardInterrupt), lock:
            raise AssertionError("has the lock of another thread")
    finally:
        sender.join()
        signal.signal(signal.SIGINT, before)
        is_over.set()
        holder.join(10)
    with lock:
        pass
    assert run_in_threads(lambda: lock.__enter__()) == []


def test_locks_that_are_one_wait_for_each_other() -> None:
    locks, order = [RowLock() for _ in range(3)], []
    has_asked = threading.Event()

    def ask() -> None:
        has_asked.set()
        with locks[2]:
            order.append("the other thread")

    thread = threading.Thread(target=ask)
    with locks[2]:
        thread.start()
        assert has_asked.wait(10)
        time.sleep(0.05)  # until it waits
        with locks[0], locks[1]:
            merge_locks(locks)
        with locks[0]:
            order.append("this thread")
    with locks[1]:
        order.append("this thread again")
    thread.join(10)
    assert order == ["this thread", "the other thread", "this thread again"]
    with locks[0], pytest.raises(RuntimeError, match="does not own the lock"):
        locks[0].merge(RowLock())
    with locks[0], pytest.raises(TypeError, match="accepts only a RowLock"):
        locks[0].merge(threading.Lock())  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 1, 2, 3000])
def test_several_locks_are_taken_by_threads_in_any_order(count: int) -> None:
    locks, seen = [RowLock() for _ in range(count)], []

    def take(locks: list[RowLock]) -> None:
        for _ in range(50):
            with RowLocks(*locks):
                seen.append(len(seen))

    def take_each() -> None:
        for _ in range(50):
            for lock in (*locks[:2], *locks[-2:]):
                with lock:
                    seen.append(len(seen))

    works = [lambda: take(locks), lambda: take(locks[::-1]), take_each]
    assert run_in_threads(*works) == []
    assert len(seen) == 100 + 50 * len([*locks[:2], *locks[-2:]])
    with RowLocks(*locks), RowLocks(*locks, *locks):
        merge_locks(locks[:5])
    seen.clear()
    assert run_in_threads(lambda: take(locks), take_each) == []
    with pytest.raises(TypeError, match="accepts only RowLock objects"):
        RowLocks(RowLock(), threading.Lock())  # type: ignore[arg-type]


def test_a_thread_that_waits_for_several_locks_has_none_of_them() -> None:
    first, second, order = RowLock(), RowLock(), []
    has_asked = threading.Event()

    def take_both() -> None:
        has_asked.set()
        with RowLocks(first, second):
            order.append("both")

    thread = threading.Thread(target=take_both)
    with second:
        thread.start()
        assert has_asked.wait(10)
        time.sleep(0.05)  # until it waits
        with first:
            order.append("first")
    thread.join(10)
    assert order == ["first", "both"]


def test_a_lock_is_given_back_by_the_thread_that_has_it_alone() -> None:
    lock = RowLock()
    with pytest.raises(RuntimeError, match="this thread does not own the lock"):
        lock.__exit__(None, None, None)
    with lock:
        (error,) = run_in_threads(lambda: lock.__exit__(None, None, None))
        assert isinstance(error, RuntimeError)


def test_a_lock_may_be_taken_again_by_its_thread() -> None:
    lock = RowLock()
    with lock, lock:
        pass
    assert run_in_threads(lambda: lock.__enter__()) == []


@pytest.mark.slow
def test_python_ends_though_a_thread_that_it_leaves_behind_has_a_lock() -> None:
    program = """
import os, sys, threading, time
from speedtorch.step.row_lock import RowLock

class Last:
    def __del__(self, lock=RowLock(), write=os.write, is_ending=sys.is_finalizing):
        with lock:
            write(1, b"ending: %d" % is_ending())

def keep(lock):
    with lock:
        has_it.set()
        time.sleep(1000)

has_it, sys.last = threading.Event(), Last()
threading.Thread(target=keep, args=Last.__del__.__defaults__[:1], daemon=True).start()
has_it.wait()
"""
    known = {**os.environ, "PYTHONPATH": str(Path(speedtorch.__file__).parents[1])}
    done = subprocess.run(
        [warm_python(), "-c", program], env=known, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "ending: 1"), done.stderr


@pytest.mark.slow
def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    page = Path(speedtorch.__file__).parents[1] / "docs" / "streams_and_threads.md"
    (program,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    command = [warm_python(), "-c", program]
    known = {**os.environ, "PYTHONPATH": str(page.parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=known, capture_output=True, text=True)
    assert done.stdout == "rows: [10000, 10000]\n", done.stderr


def test_two_threads_may_restore_a_step_that_has_ended() -> None:
    embedding = speedtorch.Embedding(ROWS, 2)
    optimizer = torch.optim.Adam(embedding.parameters())
    speedtorch.attach(optimizer, embedding)
    rows = embedding.trained_rows

    class State(dict[Any, Any]):
        """An optimizer's state; another thread restores it behind the second read at its end."""

        reads = 0

        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            call = rows.exchange.stepping.call
            if key is rows.parameter and call is not None and call[0].done:
                self.reads += 1
                if self.reads == 2:
                    self.pop(key, None)
            return found

    optimizer.state = State(optimizer.state)  # type: ignore[assignment]
    optimizer.state.setdefault(embedding.weight, {})
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert list(optimizer.state) == [embedding.weight] and optimizer.state.reads == 2  # type: ignore[attr-defined]
