"""word2vec steps of the seed's size: two tables, few rows a step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import speedtorch
from benchmarks import fbgemm
from benchmarks.harness import Measured, forget, turns
from benchmarks.sections import zipf_ids
from benchmarks.sizes import DEVICE, SIZES
from benchmarks.tables import cupy_view, has_cupy
from benchmarks.training import (
    Loop,
    cache_share,
    graph_loop,
    loop_of,
    prefetched,
    step_figure,
)

COLUMNS = 128
POSITIVES, NEGATIVES = 4, 64
CENTRES = SIZES.centres
STEPS = 60
TITLE = (
    f"word2vec, {CENTRES} centres, {POSITIVES} positives and {NEGATIVES} negatives each, "
    f"2 tables of {SIZES.rows:,} x {COLUMNS}"
)


class Batch(NamedTuple):
    """Row ids of a step."""

    centres: Tensor
    positives: Tensor
    negatives: Tensor


def batches(rows: int = SIZES.rows, steps: int = STEPS) -> list[Batch]:
    """Frequent words are frequent everywhere."""

    def ids(*shape: int) -> Tensor:
        return zipf_ids(rows, torch.Size(shape).numel()).view(shape)

    return [
        Batch(ids(CENTRES), ids(CENTRES, POSITIVES), ids(CENTRES, NEGATIVES)) for _ in turns(steps)
    ]


class SkipGram(nn.Module):
    """Skip-gram with negative sampling, two tables of one kind."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.u, self.v = make(), make()

    def forward(self, batch: Batch) -> Tensor:
        return self.loss(self.u(batch.centres), self.v(batch.positives), self.v(batch.negatives))

    @staticmethod
    def loss(centres: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        """Of rows `[n, columns]` and those beside each, `[n, m, columns]`."""
        columns = centres.unsqueeze(2)
        near, far = torch.bmm(positives, columns), torch.bmm(negatives, columns)
        return -(F.logsigmoid(near).sum() + F.logsigmoid(-far).sum()) / len(centres)


def skip_gram_loop(model: SkipGram, optimizer: optim.Optimizer, *, ahead: bool = False) -> Loop:
    """Trains on batch after batch; our rows come by announce or prefetch."""

    def announce(batch: Batch) -> None:
        model.u.announce(batch.centres)
        model.v.announce(batch.positives, batch.negatives)

    ways: dict[str, Any] = {}
    if ahead:
        ways["loader"] = prefetched(model, ids_by_table(model))
    elif isinstance(model.v, speedtorch.Embedding):
        ways["before"] = announce
    return loop_of(optimizer, lambda batch: model(batch).backward(), **ways)


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SparseAdam": lambda parameters: optim.SparseAdam(list(parameters)),
    "Adam, fused": lambda parameters: optim.Adam(parameters, fused=True),
    "Adamax": lambda parameters: optim.Adamax(parameters),
}


def ours(name: str) -> Measured:
    """Rows and state in host memory."""
    model = SkipGram(lambda: speedtorch.Embedding(SIZES.rows, COLUMNS, device=DEVICE))
    optimizer = OPTIMIZERS[name](model.parameters())
    speedtorch.attach(optimizer, model)
    for ahead in (False, True):
        title = f"speedtorch, {name}{', prefetch' if ahead else ''}"
        loop = skip_gram_loop(model, optimizer, ahead=ahead)
        told = {"optimizer": name, "ahead": ahead}
        yield step_figure("step", title, loop, batches(), kind="ours", **told)


def ids_by_table(model: SkipGram) -> Callable[[Batch], dict[nn.Module, list[Tensor]]]:
    """What names the ids of each table's lookups."""
    return lambda batch: {model.u: [batch.centres], model.v: [batch.positives, batch.negatives]}


def in_blocks(
    u_share: float = 1.0,
    v_share: float = 1.0,
    prepare: Callable[[nn.Module], object] = lambda model: None,
) -> tuple[SkipGram, optim.Optimizer]:
    """The model with blocks for shares of the ids of a step, prepared, and its optimizer."""
    most = iter((int(CENTRES * u_share), int(CENTRES * (POSITIVES + NEGATIVES) * v_share)))
    model = SkipGram(
        lambda: speedtorch.Embedding(SIZES.rows, COLUMNS, device=DEVICE, capacity=next(most))
    )
    prepare(model)
    optimizer = optim.Adam(model.parameters(), fused=True, capturable=True)
    speedtorch.attach(optimizer, model)
    return model, optimizer


def graphed(
    model: SkipGram, optimizer: optim.Optimizer, first: Batch, *, ahead: bool = True
) -> Any:
    """A step in a CUDA graph; with `ahead` the ids of the next batch may be named to it."""

    def step(batch: Batch) -> None:
        model.u.announce(batch.centres)
        model.v.announce(batch.positives, batch.negatives)
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()

    next_ids = ids_by_table(model)(first) if ahead else None
    return speedtorch.graphed(step, first, modules=model, optimizers=optimizer, next_ids=next_ids)


def in_a_graph() -> Measured:
    """Whole steps in a CUDA graph."""
    model, optimizer = in_blocks(v_share=3 / 4)
    for ahead, share in ((False, 0.0), (True, 0.0), (True, 0.2)):
        title = "speedtorch, Adam, fused, the whole step in a CUDA graph"
        if share:
            title += f", {share:.0%} cached"
            cache_share(model, share)
        first, *given = batches()
        graph = graphed(model, optimizer, first, ahead=ahead)
        loop = graph_loop(graph, ids_by_table(model) if ahead else None)
        if share:
            for _ in loop(batches()):
                pass
        told = {"kind": "graph", "optimizer": "Adam, fused", "ahead": ahead, "share": share}
        yield step_figure("step", f"{title}{', next_ids' * ahead}", loop, given, **told)
        del graph, loop


def with_a_capacity() -> Measured:
    """As `ours`, with blocks of a fixed size."""
    loop = skip_gram_loop(*in_blocks())
    title = "speedtorch, Adam, fused, capacity"
    yield step_figure("step", title, loop, batches(), kind="capacity", optimizer="Adam, fused")


def without_an_exchange() -> Measured:
    """The same step of as many rows as a batch names, which stay where they are."""
    given = []
    for batch in batches():
        (centres, first), (others, second) = (
            ids.unique(return_inverse=True) for ids in ids_of(batch).values()
        )
        near, far = second.split([CENTRES * POSITIVES, CENTRES * NEGATIVES])
        places = Batch(first, near.view(CENTRES, -1), far.view(CENTRES, -1))
        given.append((places, len(centres), len(others)))
    sizes = iter(max(counts) for counts in list(zip(*given, strict=True))[1:])
    model = SkipGram(lambda: nn.Embedding(next(sizes), COLUMNS, device=DEVICE))
    loop = skip_gram_loop(model, OPTIMIZERS["Adam, fused"](model.parameters()))
    title = "torch, Adam, fused, a batch's rows without any exchange"
    told = {"kind": "body", "optimizer": "Adam, fused"}
    yield step_figure("step", title, loop, [places for places, *_ in given], **told)


def fbgemm_loops() -> Iterator[tuple[str, Loop]]:
    """FBGEMM with its Adam, its rows in each place; the tables of one go before the next."""
    u, v = (fbgemm.tables_of([SIZES.rows], COLUMNS, "Adam", pooled=False) for _ in range(2))
    others = CENTRES * (POSITIVES + NEGATIVES)
    begins = [torch.arange(count + 1, device=DEVICE) for count in (CENTRES, others)]
    for (title, centres), (_, contexts) in zip(u, v, strict=True):

        def loop(
            batches: Sequence[Batch], u: nn.Module = centres, v: nn.Module = contexts
        ) -> Iterator[None]:
            for batch in batches:
                rows = v(ids_of(batch)["v"], begins[1])
                near, far = rows.split([CENTRES * POSITIVES, CENTRES * NEGATIVES])
                near = near.view(CENTRES, POSITIVES, COLUMNS)
                far = far.view(CENTRES, NEGATIVES, COLUMNS)
                SkipGram.loss(u(batch.centres, begins[0]), near, far).backward()
                yield

        yield title, loop
        del centres, contexts, loop
        forget()


def fbgemms() -> Measured:
    """Each place of FBGEMM's rows."""
    for title, loop in fbgemm_loops():
        yield step_figure("step", title, loop, batches(), kind="FBGEMM", optimizer="Adam")
        del loop


def torchs(name: str, *, sparse: bool) -> Measured:
    """Everything in the memory of the GPU."""
    model = SkipGram(lambda: nn.Embedding(SIZES.rows, COLUMNS, sparse=sparse, device=DEVICE))
    optimizer = OPTIMIZERS[name](model.parameters())
    title = f"torch, {'sparse' if sparse else 'dense'} {name}, all in GPU memory"
    loop = skip_gram_loop(model, optimizer)
    given = batches() if sparse else batches()[:12]
    yield step_figure("step", title, loop, given, kind="torch", optimizer=name)


class Slots(SkipGram):
    """The model as SpeedTorch has it used: holds one batch's rows, and is called with positions."""

    def __init__(self) -> None:
        sizes = iter((CENTRES, CENTRES * (POSITIVES + NEGATIVES)))
        super().__init__(lambda: nn.Embedding(next(sizes), COLUMNS, device=DEVICE))
        centres = torch.arange(CENTRES, device=DEVICE)
        others = torch.arange(self.v.num_embeddings, device=DEVICE)
        near, far = others.split([CENTRES * POSITIVES, CENTRES * NEGATIVES])
        self.positions = Batch(centres, near.view(CENTRES, -1), far.view(CENTRES, -1))


def ids_of(batch: Batch) -> dict[str, Tensor]:
    """The ids of each variable, one for each slot."""
    return {
        "u": batch.centres,
        "v": torch.cat([batch.positives.flatten(), batch.negatives.flatten()]),
    }


def factories() -> Measured:
    """ModelFactory and OptimizerFactory, which the user calls before and after each step."""
    model = Slots()
    optimizer = optim.Adamax(model.parameters())
    switchers: list[tuple[str, Any]] = []
    for name in ("u", "v"):
        table = speedtorch.HostTable(SIZES.rows, COLUMNS, state=("exp_avg", "exp_inf"))
        weights = speedtorch.ModelFactory(
            getattr(model, name), SIZES.rows, COLUMNS, CPUPinn=True, table=table
        )
        states = speedtorch.OptimizerFactory(
            optimizer, SIZES.rows, COLUMNS, model, name, CPUPinn=True, table=table
        )
        states.optInit()
        switchers += [(name, weights), (name, states)]

    def each(method: str, ids: dict[str, Tensor]) -> None:
        for name, switcher in switchers:
            getattr(switcher, method)(ids[name])

    loop = loop_of(
        optimizer,
        lambda _: model(model.positions).backward(),
        loader=lambda given: map(ids_of, given),
        before=partial(each, "beforeForwardPass"),
        after=partial(each, "afterOptimizerStep"),
    )
    title = "speedtorch, ModelFactory and OptimizerFactory, Adamax"
    yield step_figure("step", title, loop, batches(), kind="factories", optimizer="Adamax")


def cupys() -> Measured:
    """A loop as SpeedTorch wrote it with CuPy: zero-copy take before, put after a step.

    Its ids are NumPy arrays, which each take and put brings to the GPU.
    """
    model = Slots()
    optimizer = optim.Adamax(model.parameters())
    model(model.positions).backward()
    optimizer.step()
    memory = "registered" if DEVICE == "cuda" else "plain"
    shape = (SIZES.rows, COLUMNS)
    tables = {
        name: {
            field: cupy_view(speedtorch.empty(shape, memory=memory))
            for field in ("weight", "exp_avg", "exp_inf")
        }
        for name in ("u", "v")
    }

    def held() -> Iterator[tuple[str, Any, Tensor]]:
        for name, fields in tables.items():
            weight = getattr(model, name).weight
            state = optimizer.state[weight]
            for field, table in fields.items():
                yield name, table, weight.data if field == "weight" else state[field]

    def take(ids: dict[str, Any]) -> None:
        for name, table, rows in held():
            rows.copy_(torch.as_tensor(table.take(ids[name], axis=0)))

    def put(ids: dict[str, Any]) -> None:
        for name, table, rows in held():
            table[ids[name]] = cupy_view(rows)

    loop = loop_of(optimizer, lambda _: model(model.positions).backward(), before=take, after=put)
    title = "CuPy zero-copy, as SpeedTorch did, Adamax"
    given = [
        {name: ids.cpu().numpy() for name, ids in ids_of(batch).items()} for batch in batches()
    ]
    yield step_figure("step", title, loop, given, kind="CuPy", optimizer="Adamax")


def measured() -> Measured:
    """Each way's tables go with its call, before the next begins."""
    ways = [torchs("SparseAdam", sparse=True), torchs("Adamax", sparse=False)]
    ways += [without_an_exchange(), *map(ours, OPTIMIZERS), with_a_capacity()]
    ways += [factories(), fbgemms()]
    if DEVICE == "cuda":
        ways.append(in_a_graph())
    if has_cupy():
        ways.append(cupys())
    for way in ways:
        yield from way
        gc.collect()
