"""Ways for a process that trains to end. Each gives what is to live until the process does.

`import endings; kept = endings.begin("end", 0, "cpu", folder)` is a program that ends so.
"""

from __future__ import annotations

import _thread
import atexit
import gc
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim

import speedtorch
from speedtorch import HostTable

ROWS, WIDTH = 300, 16
KINDS = {"cpu": ["plain", "shared"], "cuda": ["managed", "registered", "shared"]}


class Training:
    """An Embedding with Adam, whose table is of some kind of memory, cached or not."""

    def __init__(self, chance: random.Random, device: str) -> None:
        self.chance, self.device = chance, device
        capacity = 40
        self.embedding = speedtorch.Embedding(
            ROWS,
            WIDTH,
            device=device,
            memory=chance.choice(KINDS[device]),
            **chance.choice([{}, {"cache": "4KiB"}, {"capacity": capacity}]),
        )
        parameters = self.embedding.parameters()
        self.optimizer = optim.Adam(parameters, lr=0.1, capturable=device == "cuda")
        speedtorch.attach(self.optimizer, self.embedding)

    def batch(self) -> Tensor:
        ids = [self.chance.randrange(ROWS) for _ in range(self.chance.randint(1, 40))]
        return torch.tensor(ids, device=self.device)

    def step(self, ids: Tensor) -> None:
        self.optimizer.zero_grad()
        self.embedding(ids).square().sum().backward()
        self.optimizer.step()

    def run(self, steps: int = 5) -> None:
        for _ in range(steps):
            self.step(self.batch())

    def prefetched(self) -> Any:
        """A loop that brings the rows of its next batch."""
        batches = (self.batch() for _ in range(1 << 20))
        return speedtorch.prefetch(batches, self.embedding, ids=lambda ids: ids)


def end(training: Training, folder: str) -> Any:
    return training


def exit_3(training: Training, folder: str) -> Any:
    sys.exit(3)


def error(training: Training, folder: str) -> Any:
    raise ValueError("the last words")


def os_exit(training: Training, folder: str) -> Any:
    training.run(1)
    os._exit(7)


def _soon(training: Training, action: Callable[[], object]) -> None:
    """Does something at a random moment, and again should a finaliser have swallowed it."""
    first = training.chance.uniform(0, 0.05)

    def work() -> None:
        for wait in (first, 5, 5):
            time.sleep(wait)
            action()

    threading.Thread(target=work, daemon=True).start()


def _train_on(training: Training) -> None:
    for number, ids in enumerate(training.prefetched()):
        training.step(ids)
        if number % 20 == 19:
            training.embedding.flush()


def ctrl_c(training: Training, folder: str) -> Any:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _soon(training, lambda: os.kill(os.getpid(), signal.SIGINT))
    _train_on(training)


def sigterm(training: Training, folder: str) -> Any:
    _soon(training, lambda: os.kill(os.getpid(), signal.SIGTERM))
    _train_on(training)


def sigterm_handled(training: Training, folder: str) -> Any:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    _soon(training, lambda: os.kill(os.getpid(), signal.SIGTERM))
    _train_on(training)


def by_a_thread(training: Training, folder: str) -> Any:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _soon(training, _thread.interrupt_main)
    _train_on(training)


def thread(training: Training, folder: str) -> Any:
    """The main thread ends while another trains, which Python waits for."""
    threading.Thread(target=training.run, args=(30,)).start()
    return training


def daemon_thread(training: Training, folder: str) -> Any:
    """The main thread ends while another trains, which Python does not wait for."""
    training.run(1)
    threading.Thread(target=_train_on, args=(training,), daemon=True).start()
    time.sleep(training.chance.uniform(0, 0.05))
    return training


def saving(training: Training, folder: str) -> Any:
    training.run()
    parts = {"model": training.embedding, "optimizer": training.optimizer}
    return speedtorch.async_save(folder, step=5, **parts), training


def prefetching(training: Training, folder: str) -> Any:
    loop = iter(training.prefetched())
    for _ in range(training.chance.randint(1, 4)):
        training.step(next(loop))
    return loop, training


def graph(training: Training, folder: str) -> Any:
    """A captured step that was replayed; on the CPU the step itself."""
    capacity = 40
    embedding = speedtorch.Embedding(ROWS, WIDTH, device=training.device, capacity=capacity)
    adam = optim.Adam(embedding.parameters(), capturable=training.device == "cuda")
    speedtorch.attach(adam, embedding)

    def step(ids: Tensor) -> Tensor:
        adam.zero_grad()
        loss = embedding(ids).square().sum()
        loss.backward()
        adam.step()
        return loss.detach()

    ids = torch.arange(capacity, device=training.device)
    graphed = speedtorch.graphed(step, ids, modules=embedding, optimizers=adam)
    for _ in range(training.chance.randint(0, 3)):
        graphed(torch.randperm(ROWS, device=training.device)[:capacity])
    return graphed, embedding, adam


def cycle(training: Training, folder: str) -> Any:
    """Garbage that no collection has found."""
    gc.disable()
    training.run()
    me: list[object] = [training]
    me.append(me)


class _UsesAtItsEnd:
    def __init__(self, training: Training) -> None:
        self.training, self.table = training, training.embedding.table
        self.ids = torch.arange(0, ROWS, 7)

    def __del__(self) -> None:
        assert self.table.gather(self.ids, "weight").shape == (len(self.ids), WIDTH)


def teardown(training: Training, folder: str) -> Any:
    """A global of a module, whose finaliser reads the table."""
    training.run()
    training.embedding.flush()
    module: Any = types.ModuleType("keeper")
    module.kept = [_UsesAtItsEnd(training)]
    sys.modules["keeper"] = module
    return _UsesAtItsEnd(training)


def at_exit(training: Training, folder: str) -> Any:
    """A handler that trains and reads."""

    def handler() -> None:
        training.run()
        training.embedding.flush()
        assert training.embedding.table["weight"].isfinite().all()

    atexit.register(handler)


def train_in_a_child(seed: int, device: str) -> None:
    """What a child that was spawned does."""
    Training(random.Random(seed), device).run()


def spawned_child(training: Training, folder: str) -> Any:
    training.run()
    multiprocessing.set_executable(os.environ["PYTHON_OF_CHILDREN"])
    context = multiprocessing.get_context("spawn")
    seed = training.chance.randrange(1 << 20)
    child = context.Process(target=train_in_a_child, args=(seed, training.device))
    child.start()
    child.join()
    assert child.exitcode == 0, child.exitcode
    return training


def forked_child(training: Training, folder: str) -> Any:
    """A child that reads what it may, and ends as Python does, or where CUDA is as multiprocessing.

    Torch itself aborts a child in which memory goes that several streams have used.
    """
    table = HostTable(ROWS, WIDTH, memory="shared").fill_(2)
    training.run()
    if (child := os.fork()) == 0:
        assert table.gather(torch.arange(3), "weight").eq(2).all()
        (sys.exit if training.device == "cpu" else os._exit)(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    training.run()
    return training


WAYS = (end, exit_3, error, os_exit, ctrl_c, sigterm, sigterm_handled, by_a_thread, thread)
WAYS += (daemon_thread, saving, prefetching, graph, cycle, teardown, at_exit, spawned_child)
WAYS += (forked_child,)
BY_NAME = {way.__name__: way for way in WAYS}


def begin(way: str, seed: int, device: str, folder: str) -> Any:
    """Trains a little, and begins to end so."""
    torch.set_num_threads(1 + seed % 2)
    training = Training(random.Random(f"{way} {seed}"), device)
    training.run(training.chance.randint(0, 3))
    return BY_NAME[way](training, folder)
