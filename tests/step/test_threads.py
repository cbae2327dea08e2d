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
from collections.abc import Callable, Iterable, Iterator
from functools import partial
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


def step(model: Any, optimizer: optim.Optimizer, batch: list[Tensor]) -> None:
    optimizer.zero_grad()
    sum(table(ids).square().sum() for table, ids in zip(model, batch, strict=True)).backward()
    optimizer.step()


def looked_up(table: Any) -> Tensor:
    with torch.no_grad():
        rows: Tensor = table(torch.arange(ROWS))
    return rows


def saved(table: Any) -> Tensor:
    rows: Tensor = table.state_dict()["weight"]
    return rows


class Program:
    """Tables that are trained on batches, by torch alone and by this library."""

    def __init__(self, seed: int, tables: int = 1) -> None:
        generator = random.Random(seed)
        self.seed, self.kind = seed, generator.choice(list(KINDS))
        self.prefetches = tables > 1 or generator.random() < 0.5
        self.capacity = ROWS if tables == 1 and generator.random() < 0.3 else None
        numbers = torch.Generator().manual_seed(seed)
        self.first = [torch.randn(ROWS, COLUMNS, generator=numbers) for _ in range(tables)]
        self.batches = [
            [torch.randint(ROWS, (generator.randint(1, 6),), generator=numbers) for _ in self.first]
            for _ in range(STEPS)
        ]
        self.evaluates = [generator.random() < 0.3 for _ in range(STEPS)]
        self.saves = [generator.random() < 0.2 for _ in range(STEPS)]

    def made(self, make: Any = speedtorch.Embedding) -> tuple[nn.ModuleList, optim.Optimizer]:
        given = {"capacity": self.capacity} if make is speedtorch.Embedding else {}
        given["sparse"] = self.kind == "SparseAdam"
        model = nn.ModuleList(
            make(ROWS, COLUMNS, _weight=rows.clone(), **given) for rows in self.first
        )
        optimizer = KINDS[self.kind](model.parameters())
        if make is speedtorch.Embedding and "SGD" not in self.kind:
            speedtorch.attach(optimizer, model)
        return model, optimizer

    def plain(self) -> list[list[Tensor]]:
        """The weights before the first step and after each."""
        model, optimizer = self.made(nn.Embedding)
        seen = [self.first]
        for batch in self.batches:
            step(model, optimizer, batch)
            seen.append([each.weight.detach().clone() for each in model])
        return seen

    def train(self, model: nn.ModuleList, optimizer: optim.Optimizer) -> list[str]:
        """Trains, and evaluates and saves in between; what was not as in plain torch."""
        expected, wrong = self.plain(), []
        loop: Any = self.batches
        if self.prefetches:
            loop = speedtorch.prefetch(
                loop, model, ids=lambda batch: dict(zip(model, batch, strict=True))
            )
        for number, batch in enumerate(loop, 1):
            step(model, optimizer, batch)
            if self.evaluates[number - 1]:
                wrong += differing(map(looked_up, model), expected[number], f"read after {number}")
            if self.saves[number - 1]:
                wrong += differing(map(saved, model), expected[number], f"saved after {number}")
                optimizer.state_dict()
        return wrong + differing(map(saved, model), expected[-1], "saved at the end")

    def note(self, made: tuple[nn.ModuleList, optim.Optimizer], wrong: list[str]) -> None:
        """Trains, and adds what was wrong."""
        wrong.extend([f"seed {self.seed}, {self.kind}: {each}" for each in self.train(*made)])


def differing(found: Iterable[Tensor], expected: list[Tensor], when: str) -> list[str]:
    pairs = enumerate(zip(found, expected, strict=True))
    return [f"rows of table {n} {when}" for n, pair in pairs if not torch.equal(*pair)]


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
        two = [Program(2 * seed), Program(2 * seed + 1)]
        assert run_in_threads(*(partial(each.note, each.made(), wrong) for each in two)) == []
    assert wrong == []


@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize("seed", range(FIRST, FIRST + ROUNDS))
def test_another_thread_reads_rows_as_they_are_between_two_steps(seed: int, tables: int) -> None:
    """Rows of two tables are exchanged together."""
    program = Program(seed, tables)
    made, expected = program.made(), program.plain()
    wrong: list[str] = []
    read: list[tuple[int, Tensor]] = []
    is_over = threading.Event()

    def train() -> None:
        try:
            program.note(made, wrong)
        finally:
            is_over.set()

    def look() -> None:
        while not is_over.is_set():
            for number in reversed(range(tables)):
                read.append((number, looked_up(made[0][number])))
                if "SGD" not in program.kind:  # else the table's own rows
                    read.append((number, saved(made[0][number])))

    assert run_in_threads(train, look) == wrong == []
    for number, rows in read:
        assert any(torch.equal(rows, each[number]) for each in expected), program.kind


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


def test_an_optimizer_may_wait_for_another_thread_in_its_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the first step of an optimizer that is not attached, copies of it step small rows."""
    monkeypatch.setattr(stepped_rows, "_TIMEOUT", 0.05)
    model = speedtorch.Embedding(6, 2).init_(nn.init.ones_)
    ended: list[bool] = []

    class Patient(optim.Optimizer):
        """SGD whose step waits for a thread that reads the rows."""

        def step(self, closure: Any = None) -> None:
            thread = threading.Thread(target=run_in_threads, args=[model.state_dict], daemon=True)
            thread.start()
            thread.join(10)
            if thread.is_alive():
                raise TimeoutError
            ended.append(True)
            with torch.no_grad():
                for param in self.param_groups[0]["params"]:
                    if param.grad is not None:
                        param.sub_(0.5 * param.grad)

    optimizer = Patient(model.parameters(), {})
    model(torch.tensor([3])).sum().backward()
    optimizer.step()
    assert len(ended) > 1  # also in the copies
    assert moved(model) == [3]


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


def waiting(lock: Any, order: list[object], name: object) -> threading.Thread:
    """A thread that waits for a lock, and notes that it has it."""
    has_asked = threading.Event()

    def ask() -> None:
        has_asked.set()
        with lock:
            order.append(name)

    thread = threading.Thread(target=ask)
    thread.start()
    assert has_asked.wait(10)
    time.sleep(0.05)  # until it waits
    return thread


def test_a_lock_goes_to_threads_in_the_order_in_which_they_ask() -> None:
    lock, order = RowLock(), list[object]()
    with lock, lock:
        threads = [waiting(lock, order, number) for number in range(4)]
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
    locks, order = [RowLock() for _ in range(3)], list[object]()
    with locks[2]:
        thread = waiting(locks[2], order, "the other thread")
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
    first, second, order = RowLock(), RowLock(), list[object]()
    with second:
        thread = waiting(RowLocks(first, second), order, "both")
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


def child_status(work: Callable[[], object]) -> int:
    """How a forked child ends that does this work, for ten seconds at most."""
    if (child := os.fork()) == 0:
        signal.alarm(10)
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def test_a_new_thread_of_a_child_does_not_own_the_lock_of_a_lost_thread() -> None:
    """The system gives the new thread the stack, and so the identity, of the lost one."""
    lock, is_held, may_end = RowLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            may_end.wait()

    def use() -> None:
        with lock:
            pass

    def in_child() -> None:
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        use()
        threading.Thread(target=use).start()

    owner = threading.Thread(target=hold)
    owner.start()
    is_held.wait()
    try:
        assert child_status(in_child) == 0
    finally:
        may_end.set()
        owner.join()


def test_a_child_passes_no_lock_to_a_thread_that_it_does_not_have() -> None:
    """The parent forks while it owns the lock and another thread waits for the lock."""
    lock, waits = RowLock(), threading.Event()

    def wait() -> None:
        waits.set()
        with lock:
            pass

    def in_child() -> None:
        lock.__exit__(None, None, None)  # of the parent's with statement
        for _ in range(2):
            thread = threading.Thread(target=wait)
            thread.start()
            thread.join()

    waiter = threading.Thread(target=wait)
    with lock:
        waiter.start()
        waits.wait()
        time.sleep(0.1)
        status = child_status(in_child)
    waiter.join()
    assert status == 0


@pytest.mark.parametrize("locked", [lambda lock: lock, RowLocks], ids=["one", "several"])
@pytest.mark.parametrize("raises", [False, True])
def test_a_signal_handler_may_fork_while_its_thread_waits_for_the_lock(
    raises: bool, locked: Callable[[RowLock], RowLock | RowLocks]
) -> None:
    lock, is_held, may_end = RowLock(), threading.Event(), threading.Event()
    statuses = []

    def hold() -> None:
        with lock:
            is_held.set()
            may_end.wait()

    def fork(*_: object) -> None:
        if (child := os.fork()) != 0:
            statuses.append(os.waitpid(child, 0)[1])
            may_end.set()
            return
        signal.alarm(10)
        if raises:
            raise InterruptedError

    owner, parent = threading.Thread(target=hold), os.getpid()
    owner.start()
    is_held.wait()
    before = signal.signal(signal.SIGUSR1, fork)
    try:
        threading.Timer(0.2, os.kill, (parent, signal.SIGUSR1)).start()
        try:
            with locked(lock), lock:
                pass
        except InterruptedError:
            with lock:
                pass
    finally:
        if os.getpid() != parent:
            os._exit(0 if (sys.exc_info()[0] is None) else 1)
        signal.signal(signal.SIGUSR1, before)
        may_end.set()
        owner.join()
    assert statuses == [0]


@pytest.mark.slow
@pytest.mark.parametrize("work", ["trains", "reads"])
@pytest.mark.parametrize("memory", ["plain", "file"])
def test_a_child_forked_while_another_thread_uses_the_rows_does_not_hang(
    memory: str, work: str, tmp_path: Path
) -> None:
    """The thread does not exist in the child, which takes its locks and ends its step."""
    rows, path = 120, {"path": tmp_path / "rows", "resident": 60 * 4 * COLUMNS}
    kept: Any = {"memory": memory, **(path if memory == "file" else {})}
    table = speedtorch.HostTable(rows, COLUMNS, **kept).normal_()
    model: Any = speedtorch.Embedding.from_pretrained(table, freeze=False)
    optimizer, has_ended = optim.SGD(model.parameters(), lr=0.1), threading.Event()

    def use() -> None:
        while not has_ended.is_set():
            ids = torch.randint(rows, (20,))
            if work == "trains":
                step([model], optimizer, [ids])
            else:
                table.gather(ids)

    def look_up() -> None:
        with torch.no_grad():
            model(torch.arange(0, rows, 7))
        table.gather(torch.arange(20))

    thread = threading.Thread(target=use)
    thread.start()
    try:
        for _ in range(60):
            assert child_status(look_up) == 0
    finally:
        has_ended.set()
        thread.join()
