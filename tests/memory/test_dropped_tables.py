"""Tables that are deleted while kernels use them: right results, no late write, no memory kept."""

from __future__ import annotations

import gc
import os
import random
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from ordinary_run import soaked
from torch import Tensor, optim

import speedtorch
from speedtorch import HostTable, memory_stats

ROWS, WIDTH = 500, 128
KINDS = {"cpu": ["plain", "shared"], "cuda": ["managed", "registered", "shared", "plain"]}
BUSY = 8_000_000  # GPU cycles, about 4 milliseconds: work on a stream lags behind the host
Stream = AbstractContextManager[object]


class Drops:
    """Tables full of one number each, which go as soon as work on them has begun."""

    def __init__(self, device: str, seed: int) -> None:
        self.chance, self.device = random.Random(seed), device
        self.streams: list[Stream] = [nullcontext(), nullcontext()]
        if device == "cuda":
            self.streams = [torch.cuda.stream(torch.cuda.Stream()) for _ in range(2)]
        self.ids = torch.arange(ROWS, device=device).flip(0)
        self.results: list[tuple[float, Tensor]] = []
        self.later: deque[tuple[float, HostTable]] = deque(maxlen=4)
        """Tables that were made after others went, and the number that each is full of."""
        self.keep_busy()  # loads its kernel
        speedtorch.synchronize()

    def kind(self) -> str:
        return self.chance.choice(KINDS[self.device])

    def keep_busy(self) -> None:
        if self.device == "cuda":
            torch.cuda._sleep(BUSY)

    def table(self, number: float) -> HostTable:
        """With a state, so that a row is a record."""
        table = HostTable(ROWS, WIDTH, state=("m",), memory=self.kind())  # type: ignore[arg-type]
        return table.fill_(number).fill_(number, "m")

    def gathered(self, number: float) -> None:
        table = self.table(number)
        for stream in self.streams:
            with stream:
                self.keep_busy()
                for name in ("weight", "m"):
                    self.results.append((number, table.gather(self.ids, name)))

    def scattered(self, number: float) -> None:
        table = self.table(number)
        for stream in self.streams:
            with stream:
                self.keep_busy()
                rows = torch.full((ROWS, WIDTH), number, device=self.device)
                for name in ("weight", "m"):
                    table.scatter(self.ids, rows, name)

    def swapped(self, number: float) -> None:
        table = self.table(number)
        half = self.ids.chunk(2)
        for stream in self.streams:
            with stream:
                self.keep_busy()
                leaving = [torch.full((len(half[0]), WIDTH), number, device=self.device)] * 2
                arriving = [torch.empty(len(half[1]), WIDTH, device=self.device) for _ in range(2)]
                fields = [table["weight"], table["m"]]
                speedtorch.optimizer_state_swap(fields, leaving, half[0], arriving, half[1])
                self.results += [(number, tensor) for tensor in arriving]

    def in_a_cycle(self, number: float) -> None:
        table = self.table(number)
        cycle: list[object] = [table]
        cycle.append(cycle)
        self.keep_busy()
        self.results.append((number, table.gather(self.ids, "weight")))

    def trained(self, number: float) -> None:
        """The module, its optimizer and a loop that has brought rows ahead go together."""
        weight, kind = torch.full((ROWS, WIDTH), number), self.kind()
        stream = self.chance.choice(self.streams)
        with stream:
            module = speedtorch.Embedding(
                ROWS,
                WIDTH,
                device=self.device,
                _weight=weight,
                memory=kind,  # type: ignore[arg-type]
                cache=self.chance.choice([None, 100 * WIDTH * 8]) if kind != "plain" else None,
            )
            sgd = optim.SGD(module.parameters(), lr=1.0, momentum=0.5)
            speedtorch.attach(sgd, module)
            for step, ids in enumerate(
                speedtorch.prefetch(self.ids.chunk(5), module, ids=lambda ids: ids)
            ):
                self.keep_busy()
                found = module(ids)
                self.results.append((number, found.detach()))
                found.sum().backward()
                sgd.step()
                if step == 2:
                    break

    def check(self) -> None:
        """Compares what came of the tables, and the tables that were made later."""
        speedtorch.synchronize()
        for number, rows in self.results:
            assert (rows == number).all(), number
        self.results.clear()
        for number, table in self.later:
            assert all((table[name] == number).all() for name in ("weight", "m")), number

    def drop(self, number: float) -> None:
        work: list[Callable[[float], None]]
        work = [self.gathered, self.scattered, self.swapped, self.in_a_cycle, self.trained]
        self.chance.choice(work)(number)
        self.later.append((-number, self.table(-number)))
        if self.chance.random() < 0.1:
            gc.collect()
            self.check()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.soak
@pytest.mark.slow
def test_tables_dropped_while_kernels_use_them_are_freed(device: str) -> None:
    drops = Drops(device, seed=1)
    for number in range(1, 20):  # what libraries keep after the first uses
        drops.drop(float(number))
    drops.check()
    drops.later.clear()
    gc.collect()
    before, resident = memory_stats(), resident_bytes()
    for number in range(20, 20 + soaked(40, 1000)):
        drops.drop(float(number))
    drops.check()
    drops.later.clear()
    gc.collect()
    assert memory_stats() == before
    assert resident_bytes() < resident + (64 << 20)
