"""A GPT that adds rows of hashed bigrams and trigrams, with the tables in host memory.

Every token's input is the sum of its embedding, its position's, and one row of 128 columns of each
of two tables, projected to the width of the model. Tokens are independent draws by Zipf's law. They
repeat fewer n-grams than text does, so that a step has more distinct rows than one of text.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import speedtorch
from benchmarks.bench_hot_rows import peak
from benchmarks.harness import (
    Figure,
    Measured,
    event,
    figure_of,
    forget,
    synchronize,
    take_turn,
)
from benchmarks.sizes import DEVICE, SIZES


@dataclass(frozen=True)
class Size:
    """Of a model and its batches."""

    width: int
    heads: int
    layers: int
    words: int
    context: int
    samples: int
    """Of a micro-batch."""
    parts: int
    """Micro-batches of a step."""
    rounds: int
    steps: int
    """That are timed in a round."""

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.parts * self.samples * self.context


GPT_2 = Size(768, 12, 12, 50_304, 1024, samples=16, parts=2, rounds=5, steps=8)
TINY = Size(32, 2, 2, 200, 16, samples=2, parts=2, rounds=3, steps=2)
SIZE = GPT_2 if SIZES.is_large else TINY
COLUMNS = 128
ORDERS = (2, 3)
"""How many tokens an n-gram has, for each table."""
SMALL_ROWS = 1 << 16
"""Of tables in GPU memory."""
BEFORE, AFTER = 3, 2
"""Steps of a round that are not timed: prefetch fills its queue, and finds no more batches."""
TITLE = (
    f"a step of a GPT ({SIZE.layers} layers, {SIZE.width} wide, {SIZE.tokens:,} tokens a step in"
    f" {SIZE.parts} micro-batches) with tables of hashed bigrams and trigrams"
)
_BF16 = torch.bfloat16
# A multiplier for Fibonacci hashing, 2**64 / golden ratio, as a signed number.
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)


class Case(NamedTuple):
    """Tables and the optimizer of their rows."""

    optimizer: str
    rows: int
    """Of both tables."""
    state: dict[str, tuple[int, torch.dtype]]
    """What a record has beside the weight."""
    host: Callable[[Iterable[nn.Parameter]], optim.Optimizer]
    small: Callable[[list[nn.Parameter]], optim.Optimizer]
    """The same rule for sparse gradients, of tables in GPU memory."""

    @property
    def section(self) -> str:
        return f"{self.rows:,} rows x {COLUMNS} bfloat16, {self.optimizer}"


def row_wise(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    """One number of state a row, for both kinds of gradients."""
    return speedtorch.optim.RowWiseAdagrad(parameters, lr=1e-2)


CASES = (
    Case(
        "row-wise Adagrad",
        SIZES.ngram_rows[0],
        {"sum": (1, torch.float32)},
        row_wise,
        row_wise,
    ),
    Case(
        "Adam",
        SIZES.ngram_rows[1],
        {"exp_avg": (COLUMNS, _BF16), "exp_avg_sq": (COLUMNS, _BF16)},
        lambda parameters: optim.Adam(parameters, lr=1e-3, fused=True),
        lambda parameters: optim.SparseAdam(parameters, lr=1e-3),
    ),
)


class Part(NamedTuple):
    """A micro-batch."""

    tokens: Tensor
    """`[samples, context + 1]`."""
    ids: list[Tensor]
    """For each table: ids of the n-grams that end at each token, `[samples, context]`."""


def hashed(tokens: Tensor, order: int, rows: int) -> Tensor:
    """Ids of the n-grams that end at each token; tokens before a sample are zeros."""
    padded, count = F.pad(tokens, (order - 1, 0)), tokens.shape[1]
    keys = torch.zeros_like(tokens)
    for first in range(order):
        keys = keys * SIZE.words + padded[:, first : first + count]
    # The high bits of the product depend on all bits of the key; int64 wraps.
    return ((keys * _MIX >> 33) & 0x7FFFFFFF) * rows >> 31


def batches(steps: int, rows: int) -> list[list[Part]]:
    """Fresh tokens for each step, Zipf 1.0, with ids of tables of so many rows each."""
    weights = 1 / torch.arange(1, SIZE.words + 1, dtype=torch.float64, device=DEVICE)
    upto = weights.cumsum(0) / weights.sum()
    shape = (SIZE.parts, SIZE.samples, SIZE.context + 1)
    made = []
    for _ in range(steps):
        drawn = torch.rand(shape, dtype=torch.float64, device=DEVICE)
        tokens = torch.searchsorted(upto, drawn).clamp_(max=SIZE.words - 1)
        made.append(
            [Part(each, [hashed(each[:, :-1], n, rows) for n in ORDERS]) for each in tokens]
        )
    return made


def distinct_rows(rows: int) -> float:
    """Distinct rows of a step, of both tables: the mean of several steps."""
    counts = [
        sum(torch.cat([part.ids[k].flatten() for part in parts]).unique().numel() for k in (0, 1))
        for parts in batches(4, rows)
    ]
    return statistics.mean(counts)


class Block(nn.Module):
    """Attention to earlier tokens, then a perceptron, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        width = SIZE.width
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.before_attention(x)).unflatten(2, (3, SIZE.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.before_mlp(x)), approximate="tanh"))


class Projected(nn.Module):
    """A sum of the input and of rows of each table, brought to the width of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(COLUMNS, SIZE.width, bias=False) for _ in ORDERS)

    def forward(self, x: Tensor, rows: list[Tensor]) -> Tensor:
        for layer, each in zip(self.layers, rows, strict=True):
            x = x + layer(each)
        return x


class Head(nn.Module):
    """The mean loss; scores use the weight of the token embedding, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE.width)

    def forward(self, x: Tensor, targets: Tensor, words: Tensor) -> Tensor:
        scores = F.linear(self.norm(x), words)
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


class GPT(nn.Module):
    """The dense part, which is trained with tables and without."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(SIZE.words, SIZE.width)
        self.places = nn.Embedding(SIZE.context, SIZE.width)
        self.projected = Projected()
        self.blocks = nn.ModuleList(Block() for _ in range(SIZE.layers))
        self.head = Head()
        for each in self.parameters():
            if each.dim() == 2:
                nn.init.normal_(each, std=0.02)

    def embedded(self, part: Part, tables: Iterable[nn.Module]) -> Tensor:
        """The first block's input. Lookups are not compiled."""
        x = self.words(part.tokens[:, :-1]) + self.places.weight
        rows = [table(ids) for table, ids in zip(tables, part.ids, strict=False)]
        return self.projected(x, rows) if rows else x

    def forward(self, part: Part, tables: Iterable[nn.Module], recompute: bool) -> Tensor:
        def run(layer: Callable[..., Tensor], *inputs: Any) -> Tensor:
            if not recompute:
                return layer(*inputs)
            return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)

        x = run(self.embedded, part, tables)
        for block in self.blocks:
            x = run(block, x)
        return run(self.head, x, part.tokens[:, 1:], self.words.weight)


def compiles() -> bool:
    """Whether torch.compile finds its compilers on this GPU's machine; a rehearsal needs none."""
    if DEVICE == "cpu":
        return False
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(64, device=DEVICE))
    except Exception as error:
        print(f"torch.compile: {error}", flush=True)
        return False
    return True


class Dense:
    """The GPT and its optimizer."""

    def __init__(self, *, compiled: bool) -> None:
        torch.manual_seed(0)
        self.model = GPT().to(DEVICE)
        self.optimizer = optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        if compiled:
            for each in (self.model.projected, self.model.head, *self.model.blocks):
                each.compile()

    @property
    def parameters(self) -> int:
        """Numbers of the dense part, without the projections of rows."""
        own = sum(each.numel() for each in self.model.parameters())
        return own - sum(each.numel() for each in self.model.projected.parameters())


class Tables:
    """Two tables and the optimizer of their rows; none at all without modules."""

    def __init__(self, modules: list[Any], optimizer: optim.Optimizer | None, rows: int) -> None:
        self.modules = nn.ModuleList(modules)
        self.optimizer = optimizer
        self.rows = rows
        """Of each table."""

    def prefetched(self, steps: list[list[Part]]) -> Iterable[list[Part]]:
        """Batches whose rows come before them; one batch is all micro-batches of a step."""

        def ids(parts: list[Part]) -> dict[nn.Module, list[Tensor]]:
            return {table: [part.ids[k] for part in parts] for k, table in enumerate(self.modules)}

        return speedtorch.prefetch(steps, self.modules, ids=ids)


NO_TABLES = Tables([], None, SMALL_ROWS)


def host_tables(case: Case) -> Tables:
    """Rows and state in host memory.

    A HostTable that has the state already is taken as it is: its zeros are those of fresh memory.
    """
    rows = case.rows // len(ORDERS)
    stored = {"weight": _BF16, **{k: kind for k, (_, kind) in case.state.items() if kind == _BF16}}
    modules = [
        speedtorch.Embedding(
            rows,
            COLUMNS,
            _weight=speedtorch.HostTable(rows, COLUMNS, _BF16, state=case.state),
            stored=stored,
            device=DEVICE,
        )
        for _ in ORDERS
    ]
    optimizer = case.host([each.weight for each in modules])
    speedtorch.attach(optimizer, nn.ModuleList(modules))
    return Tables(modules, optimizer, rows)


def small_tables(case: Case) -> Tables:
    """Few rows in GPU memory: the arithmetic of lookups and updates, with no exchange."""
    modules = [nn.Embedding(SMALL_ROWS, COLUMNS, sparse=True, device=DEVICE) for _ in ORDERS]
    return Tables(modules, case.small([each.weight for each in modules]), SMALL_ROWS)


class Way(NamedTuple):
    """How a step is done."""

    name: str
    tables: Tables
    ahead: bool = False
    recompute: bool = False


def step_ms(dense: Dense, way: Way) -> float:
    """The time of a step, by that of several which follow each other."""
    tables = way.tables
    steps = batches(BEFORE + SIZE.steps + AFTER, tables.rows)
    take_turn()
    ends = []
    for parts in tables.prefetched(steps) if way.ahead else steps:
        for part in parts:
            with torch.autocast(DEVICE, _BF16):
                loss = dense.model(part, tables.modules, way.recompute) / len(parts)
            loss.backward()
        for optimizer in (dense.optimizer, tables.optimizer):
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        ends.append(event())
        ends[-1].record()
    synchronize()
    return float(ends[BEFORE - 1].elapsed_time(ends[-1 - AFTER])) / SIZE.steps


def peak_of(dense: Dense, way: Way) -> float:
    """GiB of the GPU within steps, which warm up as well."""
    step_ms(dense, way)  # compilers take memory, too
    forget()
    step_ms(dense, way)
    return peak()


WITHOUT, WITH = "without tables", "tables in host memory, prefetch"
AT_ONCE, SMALL = "tables in host memory, no prefetch", f"tables of {SMALL_ROWS:,} rows on the GPU"
AGAIN_WITHOUT, AGAIN_WITH = f"recomputed, {WITHOUT}", f"recomputed, {WITH}"


def exposed(times: dict[str, list[float]], more: str, less: str) -> dict[str, float]:
    """What tables add to a step, by the median of the differences within a round."""
    added = statistics.median(a - b for a, b in zip(times[more], times[less], strict=True))
    return {"ms": added, "percent": 100 * added / statistics.median(times[less])}


def of_case(case: Case, dense: Dense) -> Iterator[Figure | tuple[str, Any]]:
    """All ways of a step, round after round; the tables go with this call."""
    peaks = {}
    for again, name in ((False, WITHOUT), (True, AGAIN_WITHOUT)):
        peaks[name] = peak_of(dense, Way(name, NO_TABLES, recompute=again))
    begin = time.perf_counter()
    host = host_tables(case)
    seconds = time.perf_counter() - begin
    for again, name in ((False, WITH), (True, AGAIN_WITH)):
        peaks[name] = peak_of(dense, Way(name, host, True, again))
    small = small_tables(case)
    ways = (
        Way(WITHOUT, NO_TABLES),
        Way(WITH, host, ahead=True),
        Way(AT_ONCE, host),
        Way(SMALL, small),
        Way(AGAIN_WITHOUT, NO_TABLES, recompute=True),
        Way(AGAIN_WITH, host, ahead=True, recompute=True),
    )
    for way in (ways[2], ways[3]):
        step_ms(dense, way)
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    for _ in range(SIZE.rounds):
        for way in ways:
            times[way.name].append(step_ms(dense, way))
    for way in ways:
        yield figure_of(case.section, way.name, times[way.name], optimizer=case.optimizer)
    tables = [each.table for each in host.modules]
    yield (
        case.section,
        {
            "rows": case.rows,
            "record_bytes": tables[0].record_bytes,
            "host_bytes": sum(each.nbytes for each in tables),
            "seconds_to_make": seconds,
            "distinct_rows": distinct_rows(host.rows),
            "peak_gib": peaks,
            "exposed": exposed(times, WITH, WITHOUT),
            "exposed, no prefetch": exposed(times, AT_ONCE, WITHOUT),
            "arithmetic": exposed(times, SMALL, WITHOUT),
            "exposed, recomputed": exposed(times, AGAIN_WITH, AGAIN_WITHOUT),
        },
    )


def measured() -> Measured:
    """A step of the dense part alone, and with tables of both kinds of state."""
    compiled = compiles()
    dense = Dense(compiled=compiled)
    yield (
        "model",
        {
            "compiled": compiled,
            "dense parameters": dense.parameters,
            "tokens a step": SIZE.tokens,
            "lookups a step": SIZE.tokens * len(ORDERS),
        },
    )
    for case in CASES:
        yield from of_case(case, dense)
        forget()
