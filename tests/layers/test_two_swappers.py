"""Two models on two streams, each with a Swapper: neither sees the other.

SPEEDTORCH_ROUNDS sets how many random programs run, 6 by default, and SPEEDTORCH_FIRST the first.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from ordinary_run import programs
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.layers import Swapper

ROUNDS = int(os.environ.get("SPEEDTORCH_ROUNDS", programs(6)))
FIRST = int(os.environ.get("SPEEDTORCH_FIRST", "0"))
WIDTH = 256 if torch.cuda.is_available() else 64  # copies to a GPU must take a while
ROWS, MODULES, STEPS = 16, 5, 4
UNIT_BYTES = 4 * WIDTH * (WIDTH + 1)
MODES = ["use", "prefetch", "auto", "auto step"]


class Program:
    """A model of layers that is trained, with a swapper in one of its ways or resident."""

    def __init__(self, seed: int, device: str, mode: str | None = None) -> None:
        chosen = random.Random(seed)
        self.device = device
        self.mode = mode or chosen.choice(MODES)
        self.is_adam = chosen.random() < 0.7
        # Weights, gradients and state of one module at least.
        self.budget = chosen.choice([None, int(chosen.uniform(4.4, 14) * UNIT_BYTES)])
        self.batches = torch.randn(
            STEPS, ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)
        ).to(device)
        self.pauses = [chosen.choice([0, 0, 0, 100_000, 2_000_000]) for _ in range(STEPS * MODULES)]
        self.reads = [chosen.random() < 0.3 for _ in range(STEPS)]
        self.seed = seed
        self.seen: list[Tensor] = []

    def pause(self) -> None:
        """Lets the current stream fall behind the host, which then queues what races with it."""
        self.paused += 1
        cycles = self.pauses[self.paused % len(self.pauses)]
        if cycles and self.device == "cuda":
            torch.cuda._sleep(cycles)

    def steps(self, *, swaps: bool) -> Iterator[None]:
        """Trains, and lets the other in between any two parts of a step."""
        self.paused = -1
        torch.manual_seed(self.seed)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(MODULES)))
        if not swaps:
            model.to(self.device)
        made = optim.AdamW(model.parameters(), 1e-2) if self.is_adam else None
        optimizer = made or optim.SGD(model.parameters(), 1e-2, momentum=0.9)
        swapper: Any = None
        if swaps:
            swapper = Swapper(model, optimizer, device=self.device, budget=self.budget)
            if self.mode.startswith("auto"):
                swapper.auto(step=self.mode == "auto step")
        for number, batch in enumerate(self.batches):
            yield from self.train(model, optimizer, swapper, batch)
            if self.reads[number]:
                self.read(model, swapper)
        if swapper is not None:
            swapper.close()
        self.seen += [each.detach() for each in model.parameters()]
        yield

    def train(self, model: Any, optimizer: Any, swapper: Any, batch: Tensor) -> Iterator[None]:
        by_hand = self.mode in ("use", "prefetch")
        if not by_hand:
            self.pause()
            loss = model(batch).square().mean()
            yield
            self.pause()
            loss.backward()
            yield
            optimizer.step()
            optimizer.zero_grad()
            self.seen.append(loss.detach())
            return
        # Each layer learns to give the tanh of what it was given.
        for at, layer in enumerate(model):
            with swapper.use(layer) if swapper is not None else nullcontext():
                if swapper is not None and self.mode == "prefetch":
                    swapper.prefetch(model[(at + 1) % MODULES], state=True)
                self.pause()
                loss = (layer(batch) - batch.tanh()).square().mean()
                loss.backward()
                if swapper is not None:
                    swapper.step()
                else:
                    optimizer.step()
                optimizer.zero_grad()
            self.seen.append(loss.detach())
            batch = batch.tanh()
            yield

    def read(self, model: Any, swapper: Any) -> None:
        """A sum of a weight, on the current stream, and the layer leaves at once."""
        layer = model[self.paused % MODULES]
        with swapper.use(layer) if swapper is not None else nullcontext(), torch.no_grad():
            self.pause()
            self.seen.append(layer.weight.double().sum())
        if swapper is not None:
            swapper.evict(layer)


class Lookups(Program):
    """An Embedding that is prefetched, as the other model."""

    def steps(self, *, swaps: bool) -> Iterator[None]:
        self.paused = -1
        generator = torch.Generator().manual_seed(self.seed)
        weight = torch.randn(20_000, 64, generator=generator)
        ids = [torch.randint(20_000, (3000,), generator=generator) for _ in range(STEPS)]
        model = speedtorch.Embedding(20_000, 64, _weight=weight, device=self.device)
        optimizer = optim.Adam(model.parameters(), 1e-2)
        speedtorch.attach(optimizer, model)
        loop = [each.to(self.device) for each in ids]
        for batch in speedtorch.prefetch(loop, model, ids=lambda batch: batch) if swaps else loop:
            self.pause()
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
            yield
        self.seen.append(model.state_dict()["weight"].clone())
        yield


def run(programs: list[Program], streams: list[Any], order: random.Random, *, swaps: bool) -> None:
    loops = {at: program.steps(swaps=swaps) for at, program in enumerate(programs)}
    while loops:
        at = order.choice(list(loops))
        with torch.cuda.stream(streams[at]) if streams else nullcontext():
            if next(loops[at], loops) is loops:
                del loops[at]
    if streams:
        torch.cuda.synchronize()


def check(seed: int, device: str, *kinds: tuple[type[Program], str | None]) -> None:
    resident, swapped = (
        [kind(2 * seed + at, device, mode) for at, (kind, mode) in enumerate(kinds)] for _ in "ab"
    )
    gpu = device == "cuda"
    for each in resident:
        streams = [torch.cuda.current_stream()] if gpu else []
        run([each], streams, random.Random(seed), swaps=False)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()] if gpu else []
    if gpu:
        torch.cuda.synchronize()
    run(swapped, streams, random.Random(seed), swaps=True)
    for one, other in zip(resident, swapped, strict=True):
        case = (seed, other.mode, [each.mode for each in swapped])
        assert len(one.seen) == len(other.seen), case
        for a, b in zip(one.seen, other.seen, strict=True):
            assert torch.equal(a.cpu(), b.cpu()), case


@pytest.mark.parametrize(
    ("other", "rounds"),
    [pytest.param(Program, ROUNDS, marks=pytest.mark.slow), (Lookups, ROUNDS // 3)],
    ids=["a swapper", "an Embedding"],
)
def test_two_models_train_like_resident_ones(
    other: type[Program], rounds: int, device: str
) -> None:
    for seed in range(FIRST, FIRST + rounds):
        check(seed, device, (Program, None), (other, None))


@pytest.mark.parametrize("mode", MODES)
def test_two_models_of_one_mode_train_like_resident_ones(mode: str, device: str) -> None:
    for seed in range(2):
        check(seed, device, (Program, mode), (Program, mode))


@NEEDS_GPU
def test_a_model_with_a_swapper_may_change_its_stream() -> None:
    for seed in range(FIRST, FIRST + ROUNDS // 3):
        resident, moving = (Program(seed, "cuda") for _ in "ab")
        run([resident], [torch.cuda.current_stream()], random.Random(seed), swaps=False)
        streams, order = [torch.cuda.Stream(), torch.cuda.Stream()], random.Random(seed)
        loop, last = moving.steps(swaps=True), streams[0]
        last.wait_stream(torch.cuda.current_stream())
        is_over = False
        while not is_over:
            stream = order.choice(streams)
            stream.wait_stream(last)  # as torch asks its users to
            with torch.cuda.stream(stream):
                is_over = next(loop, loop) is loop
            last = stream
        torch.cuda.synchronize()
        for a, b in zip(resident.seen, moving.seen, strict=True):
            assert torch.equal(a.cpu(), b.cpu()), (seed, moving.mode)
