"""What a step costs the host: small steps on one CPU thread, beside torch's own modules."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn, optim

import speedtorch
from benchmarks.harness import Figure, Measured, figure_of, take_turn
from benchmarks.sizes import SIZES

ROWS, COLUMNS, IDS = 10_000, 8, 64
FEATURES, FEATURE_ROWS = 26, 1000
PADDING = 3
LOOKUPS, LOOKUP_ROWS = (25, 300, 400), 1_000_000
"""Numbers of lookups of new ids in a step, and the rows of their table."""
TITLE = (
    f"a step of {IDS} ids of {ROWS:,} x {COLUMNS} rows on one CPU thread; of {FEATURES} features"
    f" of {FEATURE_ROWS:,} rows each"
)
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda parameters: optim.SGD(parameters, lr=0.1),
    "Adam": lambda parameters: optim.Adam(parameters, lr=0.1),
}
Step: TypeAlias = Callable[[Any], None]


def step_of(model: nn.Module, name: str, look_up: Callable[[Any], Tensor]) -> Step:
    """A whole step: zero_grad(), forward, backward, step()."""
    optimizer = OPTIMIZERS[name](model.parameters())
    if name == "Adam" and isinstance(model, speedtorch.Embedding):
        speedtorch.attach(optimizer, model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        look_up(batch).sum().backward()
        optimizer.step()

    return step


def in_turns(section: str, steps: dict[str, Step], batches: Sequence[Any]) -> Iterator[Figure]:
    """Times each step of either kind after one of the other; the first third warms up."""
    take_turn()
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for batch in batches:
        for kind, step in steps.items():
            begin = time.perf_counter()
            step(batch)
            times[kind].append((time.perf_counter() - begin) * 1e3)
    for kind, each in times.items():
        name = "speedtorch" if kind == "ours" else "torch"
        yield figure_of(section, name, each[len(each) // 3 :], kind=kind)


def tables(name: str, padding: int | None) -> dict[str, Step]:
    """One table, with dense gradients in torch's module."""
    ours = speedtorch.Embedding(ROWS, COLUMNS, padding_idx=padding, device="cpu")
    theirs = nn.Embedding(ROWS, COLUMNS, padding_idx=padding)
    return {"ours": step_of(ours, name, ours), "torch": step_of(theirs, name, theirs)}


def lookups() -> dict[str, Step]:
    """One table and many lookups a step, with sparse gradients in torch's module."""
    ours = speedtorch.Embedding(LOOKUP_ROWS, COLUMNS, device="cpu")
    theirs = nn.Embedding(LOOKUP_ROWS, COLUMNS, sparse=True)

    def all_of(module: Any) -> Callable[[Any], Tensor]:
        return lambda batch: torch.stack([module(ids) for ids in batch])

    return {
        "ours": step_of(ours, "SGD", all_of(ours)),
        "torch": step_of(theirs, "SGD", all_of(theirs)),
    }


def features() -> dict[str, Step]:
    """A dict of features, one id for each of the samples."""
    config, names = speedtorch.EmbeddingBagConfig, [f"t{number}" for number in range(FEATURES)]
    made = [config(FEATURE_ROWS, COLUMNS, name) for name in names]
    ours = speedtorch.EmbeddingBagCollection(tables=made, device="cpu")
    theirs = nn.ModuleDict({name: nn.EmbeddingBag(FEATURE_ROWS, COLUMNS) for name in names})
    begins = torch.arange(IDS)

    def all_of(batch: dict[str, Tensor]) -> Tensor:
        return torch.cat([theirs[name](batch[name], begins) for name in names], 1)

    def ours_of(batch: dict[str, Tensor]) -> Tensor:
        return ours(batch).values()

    return {"ours": step_of(ours, "SGD", ours_of), "torch": step_of(theirs, "SGD", all_of)}


def measured() -> Measured:
    """Ours and torch's step by step in turns, whatever else the machine does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        batches = [torch.randint(ROWS, (IDS,)) for _ in range(3 * SIZES.calls)]
        for section, name, padding in (
            ("SGD", "SGD", None),
            ("Adam", "Adam", None),
            ("SGD, padding_idx", "SGD", PADDING),
        ):
            yield from in_turns(section, tables(name, padding), batches)
        steps = lookups()
        for count in LOOKUPS:
            many = [torch.randint(LOOKUP_ROWS, (count, IDS)) for _ in range(15)]
            yield from in_turns(f"SGD, {count} lookups", steps, many)
        named = [
            {f"t{k}": torch.randint(FEATURE_ROWS, (IDS,)) for k in range(FEATURES)}
            for _ in range(SIZES.calls)
        ]
        yield from in_turns(f"SGD, a dict of {FEATURES} features", features(), named)
    finally:
        torch.set_num_threads(threads)
