"""Steps of a model with many tables: in one exchange, one by one, and as FBGEMM does."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import speedtorch
from benchmarks import fbgemm
from benchmarks.harness import Figure, Measured, forget, turns
from benchmarks.sizes import DEVICE, SIZES
from benchmarks.training import Loop, cache_share, graph_loop, prefetched, step_figure

COLUMNS = 64
SHARE = 0.2
"""Of the rows, that a cache has."""
STEPS = 120
# Rows of the categorical features of Criteo's Kaggle data, and the samples of a step.
KAGGLE = (1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27)
KAGGLE += (14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572)
TITLE = f"steps of models with many tables of {COLUMNS} columns, Zipf 1.05, and a small dense part"
# As many ids, rows and numbers in each: samples are fewer where tables are more.
COUNTS = dict(zip(SIZES.many_tables, (16_384, 1_638, 426), strict=False))

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adam": lambda parameters: optim.Adam(parameters, fused=True),
    "SGD": lambda parameters: optim.SGD(parameters, lr=0.01),
}


class Batch(NamedTuple):
    """A keyed jagged tensor: one id for each sample and table."""

    names: list[str]
    ids: Tensor
    """Of all tables, one after another."""
    begins: Tensor
    by_table: list[Tensor]

    def keys(self) -> list[str]:
        """The features."""
        return self.names

    def values(self) -> Tensor:
        """All ids."""
        return self.ids

    def offsets(self) -> Tensor:
        """Where each bag begins."""
        return self.begins


class Work(NamedTuple):
    """The tables of a model."""

    sizes: list[int]
    samples: int

    @classmethod
    def of(cls, tables: int) -> Work:
        """So many tables with the rows of Kaggle's."""
        share = SIZES.many_rows * len(KAGGLE) / tables
        sizes = [max(2, int(KAGGLE[k % len(KAGGLE)] * share)) for k in range(tables)]
        return cls(sizes, max(2, int(COUNTS[tables] * min(1.0, SIZES.many_rows * 10))))

    @property
    def names(self) -> list[str]:
        """Of the tables."""
        return [f"t{k}" for k in range(len(self.sizes))]

    def batches(self) -> list[Batch]:
        """Fresh ids for each step."""
        sizes = torch.tensor(self.sizes, dtype=torch.float64, device=DEVICE)[:, None]
        begins = torch.arange(len(self.sizes) * self.samples + 1, device=DEVICE)
        made = []
        for _ in turns(STEPS):
            uniform = torch.rand(len(self.sizes), self.samples, dtype=torch.float64, device=DEVICE)
            ranks = (uniform * (sizes**-0.05 - 1) + 1) ** -20.0
            ids = (ranks.long() - 1).clamp_(min=0).minimum(sizes.long() - 1)
            made.append(Batch(self.names, ids.view(-1), begins, list(ids.unbind())))
        return made


class Top(nn.Module):
    """What comes after the tables."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        inputs = len(work.sizes) * COLUMNS
        self.net = nn.Sequential(nn.Linear(inputs, 512), nn.ReLU(), nn.Linear(512, 1)).to(DEVICE)
        self.sgd = optim.SGD(self.net.parameters(), lr=0.01)

    def forward(self, looked_up: Tensor) -> Tensor:
        scores = self.net(looked_up).squeeze(1)
        return F.binary_cross_entropy_with_logits(scores, torch.zeros_like(scores))

    def train_on(self, look_up: Callable[[Batch], Tensor], steps: Iterable[Any]) -> Loop:
        """A loop of steps of this and of the other optimizers."""
        others = list(steps)

        def loop(batches: Sequence[Batch]) -> Iterator[None]:
            for batch in batches:
                for each in (self.sgd, *others):
                    each.zero_grad()
                self(look_up(batch)).backward()
                for each in (*others, self.sgd):
                    each.step()
                yield

        return loop


def ours(work: Work, top: Top, model: nn.Module, name: str, kind: str, look_up: Any) -> Measured:
    """With and without prefetch, and with a cache where all tables share one."""
    optimizer = OPTIMIZERS[name](model.parameters())
    if name != "SGD":
        speedtorch.attach(optimizer, model)
    modules = list(model) if isinstance(model, nn.ModuleList) else None

    def ids(batch: Batch) -> Any:
        return batch if modules is None else dict(zip(modules, batch.by_table, strict=True))

    def told(batches: Iterable[Batch]) -> Iterator[Batch]:
        return iter(batches)

    section = f"{len(work.sizes)} tables"
    ways = [(False, 0.0), (True, 0.0), (True, SHARE)]
    for ahead, share in ways if modules is None else ways[:2]:
        loop = top.train_on(look_up, [optimizer])

        def run(batches: Sequence[Batch], ahead: bool = ahead, loop: Loop = loop) -> Any:
            return loop(prefetched(model, ids)(batches) if ahead else told(batches))  # type: ignore[arg-type]

        title = f"speedtorch, {kind}, {name}{', prefetch' if ahead else ''}"
        facts = {"kind": kind, "optimizer": name, "ahead": ahead, "share": share}
        if share:
            title += f", {share:.0%} cached"
            cache_share(model, share)
            for _ in run(work.batches()):
                pass
        yield step_figure(section, title, run, work.batches(), **facts)


def collection(work: Work, capacity: int | None = None) -> speedtorch.EmbeddingBagCollection:
    """All tables in one exchange."""
    config = speedtorch.EmbeddingBagConfig
    tables = [
        config(rows, COLUMNS, name, init_fn=nn.init.zeros_)
        for rows, name in zip(work.sizes, work.names, strict=True)
    ]
    return speedtorch.EmbeddingBagCollection(tables=tables, device=DEVICE, capacity=capacity)


def in_a_graph(work: Work, top: Top, name: str) -> Measured:
    """Whole steps in a CUDA graph, the dense part with them."""
    first, *given = work.batches()
    rows = max(sum(len(ids.unique()) for ids in batch.by_table) for batch in given)
    model = collection(work, rows + len(work.sizes))
    if name == "SGD":
        optimizer: optim.Optimizer = optim.SGD(model.parameters(), lr=0.01, fused=True)
    else:
        optimizer = optim.Adam(model.parameters(), fused=True, capturable=True)
        speedtorch.attach(optimizer, model)
    train = top.train_on(lambda batch: model(batch).values(), [optimizer])
    for ahead in (False, True):
        graph = speedtorch.graphed(
            lambda batch: next(iter(train([batch]))),
            first,
            modules=model,
            optimizers=[optimizer, top.sgd],
            next_ids=first if ahead else None,
        )
        loop = graph_loop(graph, (lambda batch: batch) if ahead else None)
        title = f"speedtorch, collection, {name}, the whole step in a CUDA graph"
        facts = {"kind": "graph", "optimizer": name, "ahead": ahead, "share": 0.0}
        section = f"{len(work.sizes)} tables"
        yield step_figure(section, f"{title}{', next_ids' * ahead}", loop, given, **facts)
        del graph, loop


def separate(work: Work) -> nn.ModuleList:
    """A module for each table."""
    made = (speedtorch.Embedding(rows, COLUMNS, device=DEVICE) for rows in work.sizes)
    return nn.ModuleList(each.init_(nn.init.zeros_) for each in made)


def of_many(work: Work) -> Measured:
    """The dense part alone, then each way to bring rows to it."""
    top, section = Top(work), f"{len(work.sizes)} tables"
    rows = torch.randn(work.samples, len(work.sizes) * COLUMNS, device=DEVICE, requires_grad=True)
    loop = top.train_on(lambda _: rows, [])
    alone = step_figure(section, "the dense part alone", loop, work.batches())
    yield alone
    found: list[Figure] = []
    for name in OPTIMIZERS:
        model: Any = collection(work)

        def look_up(batch: Batch, model: Any = model) -> Tensor:
            return model(batch).values()

        for figure in ours(work, top, model, name, "collection", look_up):
            found.append(figure)
            yield figure
        del model, look_up
        gc.collect()
        if len(work.sizes) == len(KAGGLE):
            for figure in in_a_graph(work, top, name):
                found.append(figure)
                yield figure
            forget()
            for kind, module in fbgemm.tables_of(work.sizes, COLUMNS, name, pooled=True):
                loop = top.train_on(lambda batch, m=module: m(batch.values(), batch.begins), [])
                figure = step_figure(section, kind, loop, work.batches(), kind="FBGEMM")
                found.append(figure)
                yield figure
                del module, loop
                forget()
    if len(work.sizes) == len(KAGGLE):
        model = separate(work)

        def look_up(batch: Batch, model: Any = model) -> Tensor:
            return torch.cat([m(ids) for m, ids in zip(model, batch.by_table, strict=True)], 1)

        for figure in ours(work, top, model, "Adam", "an Embedding each", look_up):
            found.append(figure)
            yield figure
    over = {each.name: round(each.median_ms - alone.median_ms, 3) for each in found}
    yield f"{section}, ms over the dense part", over


def measured() -> Measured:
    """Each number of tables, after the memory of the one before has gone."""
    for tables in COUNTS:
        yield from of_many(Work.of(tables))
        gc.collect()
