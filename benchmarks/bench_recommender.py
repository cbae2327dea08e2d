"""A recommender of Criteo's shape, trained end to end with its tables in several places."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import speedtorch
from benchmarks import fbgemm
from benchmarks.bench_headline import used_outside_torch
from benchmarks.bench_many_tables import KAGGLE
from benchmarks.harness import Measured, figure_of, forget, synchronize
from benchmarks.sizes import DEVICE, SIZES
from demos.auc import auc
from demos.criteo import CATEGORIES, NUMBERS
from speedtorch.nn.row_module import RowModule

COLUMNS = 32
RATE = 0.001
ROWS = [max(2, int(rows * SIZES.recommender_rows)) for rows in KAGGLE]
SCORED = 16
"""Batches on which a trained model is scored."""
TITLE = (
    f"training steps of a DLRM: {len(ROWS)} tables, {sum(ROWS):,} rows of {COLUMNS} float32, Adam,"
    f" {SIZES.recommender_samples:,} samples"
)
uniform_ = partial(nn.init.uniform_, a=-0.05, b=0.05)


class Batch(NamedTuple):
    """Samples: an id for each table, numbers, and labels.

    Attributes:
        ids: `[B]` int64 for each categorical feature.
        numbers: `[B, 13]` float32.
        clicked: `[B]` float32, 0 or 1.
    """

    ids: dict[str, Tensor]
    numbers: Tensor
    clicked: Tensor


def batch_of(number: int) -> Batch:
    """Samples that the number decides.

    Ids follow Zipf's law with exponent 1.05. A hash of each id decides how likely a click is,
    alone and together with the next table's id, so that all rows have something to learn.
    """
    random = torch.Generator(DEVICE).manual_seed(number)
    shape = (len(ROWS), SIZES.recommender_samples)
    rows = torch.tensor(ROWS, device=DEVICE)[:, None]
    uniform = torch.rand(shape, dtype=torch.float64, device=DEVICE, generator=random)
    rank = ((uniform * (rows.double() ** -0.05 - 1) + 1) ** -20.0).long() - 1
    ids = rank.clamp_(min=0).minimum(rows - 1) * 7_654_321 % rows
    numbers = torch.randn(shape[1], NUMBERS, device=DEVICE, generator=random)
    table = torch.arange(len(ROWS), device=DEVICE)[:, None]

    def hashed(factor: int) -> Tensor:
        return ((ids * factor + table * 40_503) % 65_521).float() / 18_914 - 1.732

    near = hashed(69_621)
    logit = 0.25 * hashed(48_271).sum(0) + 0.2 * (near[1:] * near[:-1]).sum(0)
    logit += 0.1 * numbers.sum(1) - 1.5
    clicked = torch.rand(shape[1], device=DEVICE, generator=random) < torch.sigmoid(logit)
    return Batch(dict(zip(CATEGORIES, ids.unbind(), strict=True)), numbers, clicked.float())


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers = [(nn.Linear(wide, narrow), nn.ReLU()) for wide, narrow in itertools.pairwise(widths)]
    return nn.Sequential(*itertools.chain(*layers))[:-1]


class Dense(nn.Module):
    """The rest of the DLRM: two perceptrons, and the dot products of all pairs between them."""

    pairs: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        vectors = 1 + len(ROWS)
        self.bottom = perceptron(NUMBERS, 128, 64, COLUMNS)
        self.top = perceptron(COLUMNS + vectors * (vectors - 1) // 2, 256, 128, 1)
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1))
        self.to(DEVICE)

    def forward(self, numbers: Tensor, rows: Tensor) -> Tensor:
        """The logits `[B]` of numbers `[B, 13]` and rows `[B, 26 * D]`."""
        bottom = self.bottom(numbers)
        vectors = torch.cat([bottom, rows], 1).view(len(rows), -1, COLUMNS)
        products = vectors @ vectors.transpose(1, 2)
        pairs = products[:, self.pairs[0], self.pairs[1]]
        logits: Tensor = self.top(torch.cat([bottom, pairs], 1)).squeeze(1)
        return logits


@dataclass
class Way:
    """A way to keep and train the tables.

    Attributes:
        name: of the figures.
        look_up: the rows `[B, 26 * D]` of a batch.
        optimizers: of the rows, none if the backward pass steps them.
        host_bytes: of weights and optimizer state in host memory.
        loader: wraps the batches.
        chunks: of `SIZES.recommender_chunk` steps, at most.
    """

    name: str
    look_up: Callable[[Batch], Tensor]
    optimizers: list[optim.Optimizer]
    host_bytes: int
    loader: Callable[[Iterable[Batch]], Iterable[Batch]] = iter
    chunks: int = SIZES.recommender_chunks


def ours() -> Iterator[Way]:
    """All tables in one collection, in host memory."""
    tables = [
        speedtorch.EmbeddingBagConfig(rows, COLUMNS, name, init_fn=uniform_)
        for rows, name in zip(ROWS, CATEGORIES, strict=True)
    ]
    bags = speedtorch.EmbeddingBagCollection(tables=tables, device=DEVICE)
    adam = optim.Adam(bags.parameters(), lr=RATE, fused=True)
    speedtorch.attach(adam, bags)
    yield Way(
        "speedtorch, host memory, prefetch",
        lambda batch: bags(batch.ids).values(),
        [adam],
        sum(module.table.nbytes for module in bags.modules() if isinstance(module, RowModule)),
        lambda batches: speedtorch.prefetch(batches, bags, ids=lambda batch: batch.ids),
    )


def of_fbgemm() -> Iterator[Way]:
    """FBGEMM's tables in each place; none if it cannot be imported."""
    places = fbgemm.places_of(ROWS, COLUMNS, "Adam", pooled=True, shares=(0.2,))
    offsets = torch.arange(len(ROWS) * SIZES.recommender_samples + 1, device=DEVICE)
    for name, share, bags in places:
        bags.init_embedding_weights_uniform(-0.05, 0.05)
        yield Way(
            f"FBGEMM, {name}",
            lambda batch, bags=bags: bags(torch.cat([*batch.ids.values()]), offsets),
            [],
            0 if share == 1 else sum(ROWS) * COLUMNS * 4 * 3,
        )
        del bags


def of_torch(device: str) -> Iterator[Way]:
    """An Embedding for each table, and SparseAdam."""
    bags = nn.ModuleList(
        nn.utils.skip_init(nn.Embedding, rows, COLUMNS, sparse=True, device=device) for rows in ROWS
    )
    for weight in bags.parameters():
        uniform_(weight)
    adam = optim.SparseAdam([*bags.parameters()], lr=RATE)

    def look_up(batch: Batch) -> Tensor:
        ids = torch.stack([*batch.ids.values()]).to(device)
        found = [bag(part) for bag, part in zip(bags, ids, strict=True)]
        return torch.cat(found, 1).to(DEVICE)

    on_host = device == "cpu"
    yield Way(
        f"torch, SparseAdam, {'on the CPU' if on_host else 'all in GPU memory'}",
        look_up,
        [adam],
        3 * sum(weight.nbytes for weight in bags.parameters()) if on_host else 0,
        chunks=2 if on_host else SIZES.recommender_chunks,
    )


def trained(way: Way) -> Measured:
    """Milliseconds of a step, the loss of each chunk of steps, and the score at the end.

    Batches are made between chunks. The first chunk warms up.
    """
    forget()  # of the way before, whose tables are freed by now
    dense = Dense()
    optimizers = [*way.optimizers, optim.Adam(dense.parameters(), lr=RATE, fused=True)]
    times, losses, chunk = [], [], SIZES.recommender_chunk

    def loss_of(batch: Batch) -> Tensor:
        logits = dense(batch.numbers, way.look_up(batch))
        return F.binary_cross_entropy_with_logits(logits, batch.clicked)

    for begin in range(0, way.chunks * chunk, chunk):
        batches = [batch_of(number) for number in range(begin, begin + chunk)]
        total = torch.zeros((), device=DEVICE)
        synchronize()
        start = time.perf_counter()
        for batch in way.loader(batches):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = loss_of(batch)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            total += loss.detach()
        synchronize()
        times.append((time.perf_counter() - start) * 1e3 / chunk)
        losses.append(total.item() / chunk)
    yield figure_of("training", way.name, times[1:], chunk=chunk, samples=SIZES.recommender_samples)
    scores, clicked = [], []
    with torch.no_grad():
        for number in range(SCORED):
            batch = batch_of(1_000_000 + number)
            scores.append(dense(batch.numbers, way.look_up(batch)))
            clicked.append(batch.clicked > 0)
    values, true = torch.cat(scores).cpu().numpy(), torch.cat(clicked).cpu().numpy()
    yield (
        way.name,
        {
            "steps": way.chunks * chunk,
            "losses": losses,
            "AUC": auc(values[true], values[~true]),
            "host bytes": way.host_bytes,
            "GPU bytes": torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0,
            "GPU bytes outside torch": used_outside_torch(),
        },
    )


def measured() -> Measured:
    """Trains the same model on the same batches, one way after another."""
    ways = [ours(), of_fbgemm(), of_torch("cpu")]
    if DEVICE == "cuda":
        ways.append(of_torch(DEVICE))
    for made in ways:
        torch.manual_seed(0)  # the first values of its rows
        for way in made:
            yield from trained(way)
            del way
