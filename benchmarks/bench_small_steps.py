"""Small steps, where the host is the bottleneck: loops, the host's phases, prefetch, CUDA graphs.

Ways take turns loop by loop, so that whatever else the machine does comes to each of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn, optim

import speedtorch
from benchmarks.bench_many_tables import KAGGLE, Work, collection
from benchmarks.bench_word2vec import (
    CENTRES,
    COLUMNS,
    NEGATIVES,
    POSITIVES,
    Batch,
    SkipGram,
    batches,
    fbgemm_loops,
    graphed,
    ids_by_table,
    in_blocks,
    skip_gram_loop,
)
from benchmarks.harness import Figure, Measured, figure_of, forget, synchronize, take_turn
from benchmarks.sections import zipf_ids
from benchmarks.sizes import DEVICE, SIZES
from benchmarks.training import Loop, graph_loop, loop_of, prefetched

STEPS, LOOPS = SIZES.long_loops
TITLE = (
    f"small steps in loops of {STEPS}: word2vec ({CENTRES} centres, {POSITIVES} positives and"
    f" {NEGATIVES} negatives each, 2 tables of {SIZES.rows:,} x {COLUMNS}, fused Adam); one table"
    " and 26 tables; eager with and without prefetch, and in a CUDA graph"
)
PHASES = 60
"""Steps whose phases are timed."""
Ways: TypeAlias = dict[str, tuple[Loop, Callable[[], Sequence[Any]]]]
"""By the name of each: its loop, and what makes the batches of one loop."""


def in_turns(section: str, ways: Ways, **told: Any) -> Iterator[Figure]:
    """Times loop after loop, each way in turn; the first loop of each warms up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(LOOPS + 1):
        for name, (loop, make) in ways.items():
            given = make()
            take_turn()
            synchronize()
            begin = time.perf_counter()
            for _ in loop(given):
                pass
            synchronize()
            if number:
                times[name].append((time.perf_counter() - begin) * 1e3 / len(given))
    for name, each in times.items():
        yield figure_of(section, name, each, way=name, **told)


def body_batches(steps: int) -> list[Batch]:
    """Positions of rows that are all on the device."""

    def ids(rows: int, *shape: int) -> Tensor:
        return torch.randint(rows, shape, device=DEVICE)

    return [
        Batch(
            ids(CENTRES, CENTRES),
            ids(24 * CENTRES, CENTRES, POSITIVES),
            ids(24 * CENTRES, CENTRES, NEGATIVES),
        )
        for _ in range(steps)
    ]


def body() -> tuple[SkipGram, optim.Optimizer]:
    """The model with about as many rows as a batch names, as plain parameters."""
    sizes = iter((CENTRES, 24 * CENTRES))
    model = SkipGram(lambda: nn.Embedding(next(sizes), COLUMNS, device=DEVICE))
    return model, optim.Adam(model.parameters(), fused=True)


class Clock:
    """Adds up the host's microseconds of each phase of a step."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self._begin = time.perf_counter()

    def start(self) -> None:
        synchronize()
        self._begin = time.perf_counter()

    def end(self, phase: str) -> None:
        now = time.perf_counter()
        self.times.setdefault(phase, []).append((now - self._begin) * 1e6)
        self._begin = now

    def medians(self) -> dict[str, int]:
        return {
            phase: round(statistics.median(each[len(each) // 3 :]))
            for phase, each in self.times.items()
        }


def phases(model: SkipGram, optimizer: optim.Optimizer, given: Sequence[Batch]) -> dict[str, int]:
    """The host's microseconds of each phase; nothing waits for the device but the model itself."""
    clock = Clock()
    for batch in given:
        clock.start()
        if isinstance(model.u, speedtorch.Embedding) and isinstance(model.v, speedtorch.Embedding):
            model.u.announce(batch.centres)
            model.v.announce(batch.positives, batch.negatives)
            clock.end("announce")
        optimizer.zero_grad()
        clock.end("zero_grad")
        columns = model.u(batch.centres)
        clock.end("first lookup of table 1")
        near = model.v(batch.positives)
        clock.end("first lookup of table 2")
        far = model.v(batch.negatives)
        clock.end("lookup of held rows")
        loss = model.loss(columns, near, far)
        clock.end("loss")
        loss.backward()
        clock.end("backward")
        optimizer.step()
        clock.end("step")
    return clock.medians()


def word2vec() -> Measured:
    """Ours in three ways beside the same step on plain parameters and FBGEMM."""
    model = SkipGram(lambda: speedtorch.Embedding(SIZES.rows, COLUMNS, device=DEVICE))
    optimizer = optim.Adam(model.parameters(), fused=True)
    speedtorch.attach(optimizer, model)
    plain, plain_optimizer = body()
    in_graph, graph_optimizer = in_blocks(v_share=3 / 4)
    graph = graphed(in_graph, graph_optimizer, batches(SIZES.rows, 1)[0])

    def many(steps: int = STEPS) -> list[Batch]:
        return batches(SIZES.rows, steps)

    loops = {
        "speedtorch": loop_of(optimizer, lambda batch: model(batch).backward()),
        "speedtorch, announce": skip_gram_loop(model, optimizer),
        "speedtorch, prefetch": skip_gram_loop(model, optimizer, ahead=True),
        "speedtorch, CUDA graph": graph_loop(graph),
        "speedtorch, CUDA graph, next_ids": graph_loop(graph, ids_by_table(in_graph)),
        **{title: loop for title, loop in fbgemm_loops() if "cache" not in title},
    }
    ways: Ways = {
        "the step alone, on plain parameters": (
            skip_gram_loop(plain, plain_optimizer),
            lambda: body_batches(STEPS),
        )
    }
    ways |= {name: (loop, many) for name, loop in loops.items()}
    yield from in_turns("word2vec", ways)
    yield "phases_us", phases(model, optimizer, many(PHASES))
    yield "phases_us, plain parameters", phases(plain, plain_optimizer, body_batches(PHASES))


GRAPH_IDS = 1 << 16
"""The most ids of a step that is small enough for a CUDA graph to help."""


class Case(NamedTuple):
    """A model, and what one of its steps does between zero_grad() and step()."""

    model: nn.Module
    optimizer: optim.Optimizer
    backward: Callable[[Any], object]

    def step(self, ids: Any) -> None:
        self.optimizer.zero_grad()
        self.backward(ids)
        self.optimizer.step()

    def graph(self, first: Any) -> Any:
        """The step in a CUDA graph."""
        return speedtorch.graphed(
            self.step, first, modules=self.model, optimizers=self.optimizer, next_ids=first
        )


def ways_of(eager: Case, in_graph: Case | None, make: Callable[[], Any], steps: int) -> Ways:
    """The same loop without and with prefetch, and in a CUDA graph without and with next_ids."""

    def many() -> list[Any]:
        return [make() for _ in range(steps)]

    model, optimizer, backward = eager
    loops = {
        "plain loop": loop_of(optimizer, backward),
        "prefetch": loop_of(optimizer, backward, loader=prefetched(model)),
    }
    if in_graph is not None:
        graph = in_graph.graph(make())
        loops["CUDA graph"] = graph_loop(graph)
        loops["CUDA graph, next_ids"] = graph_loop(graph, lambda ids: ids)
    return {name: (loop, many) for name, loop in loops.items()}


def multiplied(products: int) -> Callable[[], None]:
    """Work of the device beside the lookups: so many products of matrices."""
    side = SIZES.product // 2
    matrix = torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16)

    def multiply() -> None:
        for _ in range(products):
            _ = matrix @ matrix

    return multiply


def one_table() -> Measured:
    """Batches of several sizes, alone and beside products of matrices."""

    def made(capacity: int | None) -> tuple[speedtorch.Embedding, optim.Optimizer]:
        model = speedtorch.Embedding(SIZES.rows, COLUMNS, device=DEVICE, capacity=capacity)
        model.init_(nn.init.zeros_)
        optimizer = optim.Adam(model.parameters(), fused=True, capturable=capacity is not None)
        speedtorch.attach(optimizer, model)
        return model, optimizer

    eager = made(None)
    for count in SIZES.prefetched_ids:
        gradient = torch.randn(count, COLUMNS, device=DEVICE)
        in_blocks = made(count) if count <= GRAPH_IDS else None
        for products in (0, 8):
            multiply = multiplied(products)

            def case(
                model: nn.Module,
                optimizer: optim.Optimizer,
                gradient: Tensor = gradient,
                multiply: Callable[[], None] = multiply,
            ) -> Case:
                def backward(ids: Tensor) -> None:
                    model(ids).backward(gradient)
                    multiply()

                return Case(model, optimizer, backward)

            def make(count: int = count) -> Tensor:
                return zipf_ids(SIZES.rows, count)

            steps = STEPS if count < 200_000 else max(1, STEPS // 5)
            graph = None if in_blocks is None else case(*in_blocks)
            section = f"one table, {count:,} ids, {products} products"
            ways = ways_of(case(*eager), graph, make, steps)
            yield from in_turns(section, ways, tables=1, ids=count, products=products)
            del ways


def many_tables() -> Measured:
    """A dict of 26 features, alone and beside products of matrices."""
    work = Work.of(len(KAGGLE))
    sizes = dict(zip(work.names, work.sizes, strict=True))

    def made(capacity: int | None) -> tuple[nn.Module, optim.Optimizer]:
        model = collection(work, capacity)
        return model, optim.SGD(model.parameters(), lr=0.01, fused=capacity is not None)

    eager = made(None)
    for count in SIZES.prefetched_samples:

        def make(count: int = count) -> dict[str, Tensor]:
            return {name: zipf_ids(size, count) for name, size in sizes.items()}

        rows = sum(len(each.unique()) for each in make().values())
        in_blocks = made(int(1.2 * rows) + len(sizes))
        for products in (0, 8):
            multiply = multiplied(products)

            def case(
                model: nn.Module,
                optimizer: optim.Optimizer,
                multiply: Callable[[], None] = multiply,
            ) -> Case:
                def backward(ids: dict[str, Tensor]) -> None:
                    model(ids).values().sum().backward()
                    multiply()

                return Case(model, optimizer, backward)

            ways = ways_of(case(*eager), case(*in_blocks), make, max(1, STEPS * 3 // 5))
            section = f"26 tables, {count:,} samples, {products} products"
            yield from in_turns(section, ways, tables=26, ids=count, products=products)
            del ways


def measured() -> Measured:
    """Each part's tables go before the next begins."""
    for part in (word2vec(), one_table(), many_tables()):
        yield from part
        forget()
