"""Streams of a GPU: any module is trained on any of them, and two models on two never meet.

SPEEDTORCH_ROUNDS sets how many random programs run, 12 by default, and SPEEDTORCH_FIRST the first.
"""

from __future__ import annotations

import gc
import os
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.memory.side_stream import SharedSideStream, SideStream

pytestmark = NEEDS_GPU

ROUNDS = int(os.environ.get("SPEEDTORCH_ROUNDS", "12"))
FIRST = int(os.environ.get("SPEEDTORCH_FIRST", "0"))
ROWS, COLUMNS, MOST, STEPS = 20_000, 64, 6_000, 5
GPU = torch.device("cuda", 0)
MODES = ["plain", "announce", "prefetch", "two loops", "capacity", "graphed"]


def pause(cycles: int) -> None:
    """Lets the current stream fall behind the host, which then queues what races with it."""
    if cycles:
        torch.cuda._sleep(cycles)


@pytest.mark.parametrize("memory", ["shared", "managed", "registered"])
@pytest.mark.parametrize("way", ["table", "flush", "state_dict", "lookup", "goes"])
def test_rows_in_use_on_one_stream_are_complete_on_another(way: str, memory: str) -> None:
    """The stream of the loop lags behind; then the rows are read, or their module goes."""
    first = torch.full((500, 128), 10.0)
    seen: list[Tensor] = []
    with torch.cuda.stream(torch.cuda.Stream()):
        model = speedtorch.Embedding(
            500,
            128,
            _weight=first,
            device=GPU,
            memory=memory,  # type: ignore[arg-type]
        )
        sgd = optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
        speedtorch.attach(sgd, model)
        table = model.table
        batches = torch.arange(500, device=GPU).chunk(5)
        for number, ids in enumerate(speedtorch.prefetch(batches, model, ids=lambda ids: ids)):
            pause(30_000_000)
            found = model(ids)
            seen.append(found.detach())
            found.sum().backward()
            sgd.step()
            if number == 2:
                break
    if way == "goes":
        del model, sgd, found
        gc.collect()
    elif way == "flush":
        model.flush()
    if way == "state_dict":
        rows = model.state_dict()["weight"].clone()
    elif way == "lookup":
        with torch.no_grad():
            rows = model(torch.arange(500, device=GPU)).cpu()
    else:
        rows = table["weight"].clone()
    torch.cuda.synchronize()
    assert all(bool((each == 10).all()) for each in seen)
    assert bool((rows[:300] == 9.75).all())
    assert bool((rows[300:] == 10).all())


class Program:
    """A model that is trained step by step, in one of the ways that there are."""

    def __init__(self, seed: int, mode: str | None = None) -> None:
        generator = random.Random(seed)
        self.mode = mode or generator.choice(MODES)
        self.is_adam = generator.random() < 0.5
        numbers = torch.Generator().manual_seed(seed)
        self.first = torch.randn(ROWS, COLUMNS, generator=numbers)
        size = generator.randint(100, MOST)
        self.batches = [torch.randint(ROWS, (size,), generator=numbers) for _ in range(STEPS)]
        self.are_pinned = generator.random() < 0.3
        self.pauses = [generator.choice([0, 0, 200_000, 5_000_000]) for _ in range(STEPS)]
        self.reads = [generator.random() < 0.2 for _ in range(STEPS)]
        self.seen: list[Tensor] = []

    def ids(self) -> list[Tensor]:
        return [ids.pin_memory() if self.are_pinned else ids.cuda() for ids in self.batches]

    def steps(self) -> Iterator[None]:
        """Trains a step each time it is asked for one; the last gives all rows."""
        has_capacity = self.mode in ("capacity", "graphed")
        model = speedtorch.Embedding(
            ROWS, COLUMNS, _weight=self.first, device=GPU, capacity=MOST if has_capacity else None
        )
        optimizer: optim.Optimizer = optim.SGD(model.parameters(), lr=0.1)
        if self.is_adam:
            options = {"capturable": True, "fused": True} if self.mode == "graphed" else {}
            optimizer = optim.Adam(model.parameters(), lr=0.1, **options)
            speedtorch.attach(optimizer, model)

        def train(ids: Tensor) -> None:
            optimizer.zero_grad()
            model(ids).square().sum().backward()
            optimizer.step()

        step: Callable[[Tensor], Any] = train
        batches = self.ids()
        if self.mode == "graphed":
            step = speedtorch.graphed(train, batches[0].cuda(), modules=model, optimizers=optimizer)
        loop: Any = batches
        if self.mode in ("prefetch", "capacity"):
            loop = speedtorch.prefetch(batches, model, ids=lambda ids: ids)
        if self.mode == "two loops":
            loops = [
                speedtorch.prefetch(half, model, ids=lambda ids: ids)
                for half in (batches[:2], batches[2:])
            ]
            loop = (ids for each in loops for ids in each)
        for number, ids in enumerate(loop):
            pause(self.pauses[number])
            if self.mode == "announce":
                model.announce(ids)
            step(ids)
            if self.reads[number]:
                with torch.no_grad():
                    self.seen.append(model(ids))
            yield
        self.seen.append(model.state_dict()["weight"].clone())
        yield


def run(
    programs: list[Program], streams: list[torch.cuda.Stream], order: random.Random, *, moves: bool
) -> None:
    """Trains by turns, each program on its stream, or on any (`moves`)."""
    loops = {at: program.steps() for at, program in enumerate(programs)}
    last = {at: streams[at % len(streams)] for at in loops}
    while loops:
        at = order.choice(list(loops))
        if moves:
            stream = order.choice(streams)
            stream.wait_stream(last[at])  # as torch asks its users to
            last[at] = stream
        with torch.cuda.stream(last[at]):
            if next(loops[at], loops) is loops:
                del loops[at]
    torch.cuda.synchronize()


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def check(seed: int, *modes: str | None, moves: bool = False) -> None:
    alone, together = ([Program(2 * seed + k, mode) for k, mode in enumerate(modes)] for _ in "ab")
    for each in alone:
        run([each], [torch.cuda.current_stream()], random.Random(seed), moves=False)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    run(together, streams, random.Random(seed), moves=moves)
    for one, other in zip(alone, together, strict=True):
        assert same(one.seen, other.seen), (seed, other.mode, [each.mode for each in together])


@pytest.mark.slow
def test_two_models_on_two_streams_train_as_each_alone() -> None:
    for seed in range(FIRST, FIRST + ROUNDS):
        check(seed, None, None)


@pytest.mark.parametrize("mode", MODES)
def test_two_models_of_one_kind_on_two_streams_train_as_each_alone(mode: str) -> None:
    for seed in range(2):
        check(seed, mode, mode)


@pytest.mark.slow
def test_a_model_that_changes_its_stream_trains_as_on_one() -> None:
    for seed in range(FIRST, FIRST + ROUNDS):
        check(seed, None, None, moves=True)


def test_rows_that_a_loop_gave_up_are_not_overwritten_by_a_model_on_another_stream() -> None:
    # Large enough that memory which is freed too early is given to the other model at once.
    rows, columns, size = 200_000, 128, 100_000
    torch.manual_seed(0)
    ids = [torch.randint(rows, (size,), device=GPU) for _ in range(12)]

    def made() -> tuple[speedtorch.Embedding, optim.Optimizer]:
        model = speedtorch.Embedding.from_pretrained(
            torch.zeros(rows, columns), freeze=False, device=GPU
        )
        return model, optim.SGD(model.parameters(), lr=1.0)

    def train(model: nn.Module, optimizer: optim.Optimizer, batch: Tensor) -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    def one(model: Any, optimizer: Any) -> Iterator[None]:
        for first in (0, 3, 6):
            for batch in speedtorch.prefetch(ids[first : first + 2], model, ids=lambda b: b):
                train(model, optimizer, batch)
            train(model, optimizer, ids[first + 2])
            yield

    def other(model: Any, optimizer: Any) -> Iterator[None]:
        for batch in speedtorch.prefetch(ids[6:], model, ids=lambda b: b):
            train(model, optimizer, batch)
            yield

    expected = []
    for loop in (one, other):
        alone = made()
        for _ in loop(*alone):
            pass
        expected.append(alone[0].state_dict()["weight"].clone())
    torch.cuda.synchronize()
    models, streams = [made(), made()], [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    loops = [loop(*model) for loop, model in zip((one, other), models, strict=True)]
    for _ in range(7):
        for at in (0, 1):
            with torch.cuda.stream(streams[at]):
                next(loops[at], None)
    torch.cuda.synchronize()
    for model, rows_of in zip(models, expected, strict=True):
        assert torch.equal(model[0].state_dict()["weight"], rows_of)


def test_each_stream_has_side_streams_of_its_own_that_torch_gives_to_no_caller() -> None:
    side, shared = SideStream("a test"), SharedSideStream("a test")
    theirs = [torch.cuda.Stream() for _ in range(64)]  # of torch's pool of 32
    found, ours = set(), set()
    for stream in theirs:
        with torch.cuda.stream(stream):
            found.add(stream.cuda_stream)
            ours.add(side.stream(GPU).cuda_stream)
            assert shared.stream(GPU).cuda_stream not in ours
    assert len(ours) == len(found) and ours.isdisjoint(found)


def test_a_side_stream_waits_for_its_last_work_where_the_caller_has_changed_its_stream() -> None:
    side, value = SideStream("a test"), torch.zeros(1, device=GPU)
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(one), side.after_current(GPU):
        torch.cuda._sleep(50_000_000)
        value.fill_(1)
    with torch.cuda.stream(other), side.after_current(GPU):
        value.mul_(2)
    torch.cuda.synchronize()
    assert float(value) == 2


def test_a_graph_reads_the_ids_that_it_was_given_whatever_the_caller_writes_there() -> None:
    torch.manual_seed(0)
    batches = [torch.randint(ROWS, (500,)) for _ in range(4)]
    tables = []
    for pins in (False, True):
        model = speedtorch.Embedding.from_pretrained(
            torch.zeros(ROWS, 8), freeze=False, device=GPU, capacity=500
        )
        optimizer = optim.SGD(model.parameters(), lr=1.0)

        def train(ids: Tensor, model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(ids).sum().backward()
            optimizer.step()

        first = batches[0].cuda()
        step = speedtorch.graphed(train, first, modules=model, optimizers=optimizer, next_ids=first)
        buffer, following = (torch.empty(500, dtype=torch.int64, pin_memory=pins) for _ in "ab")
        for ids, more in zip(batches, [*batches[1:], batches[0]], strict=True):
            pause(20_000_000 * pins)  # the GPU is behind the host
            buffer.copy_(ids)
            following.copy_(more)
            step(buffer, next_ids=following)
        torch.cuda.synchronize()
        tables.append(model.state_dict()["weight"].clone())
    assert torch.equal(*tables)


def test_torch_warns_of_nothing_where_graphs_and_plain_steps_take_turns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.Sequential(
            speedtorch.Embedding(ROWS, 8, device=GPU, capacity=500), nn.Linear(8, 1, device=GPU)
        )
        optimizer = optim.Adam(model.parameters(), capturable=True, fused=True)
        speedtorch.attach(optimizer, model)

        def train(ids: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(ids).square().sum()
            loss.backward()
            optimizer.step()
            return loss

        train(torch.arange(300, device=GPU))
        step = speedtorch.graphed(
            train, torch.arange(500, device=GPU), modules=model, optimizers=optimizer
        )
        for count in (500, 400, 500):
            loss = step(torch.arange(count, device=GPU))
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            train(torch.arange(200, device=GPU))
        torch.cuda.synchronize()
        assert bool(loss.isfinite())
