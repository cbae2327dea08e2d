"""A training step of one embedding whose rows and Adam state are in host memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

import speedtorch
from benchmarks.harness import Report, turns
from benchmarks.sections import zipf_ids
from benchmarks.sizes import DEVICE, SIZES
from benchmarks.training import Loop, step_figure

COLUMNS = 128
EXPONENTS = (0.0, 0.9, 1.05, 1.2)
STEPS = 12
Optimizer = Callable[[Iterable[nn.Parameter]], optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "Adam, fused": lambda parameters: optim.Adam(parameters, lr=1e-3, fused=True),
    "Adam": lambda parameters: optim.Adam(parameters, lr=1e-3),
    "SparseAdam": lambda parameters: optim.SparseAdam(list(parameters), lr=1e-3),
    "SGD": lambda parameters: optim.SGD(parameters, lr=1e-3),
}


def batches_of(exponent: float, steps: int = STEPS) -> list[Tensor]:
    """Ids of which few are frequent; with exponent 0 none is."""
    count = SIZES.large_batch
    if exponent == 0:
        return [torch.randint(SIZES.rows, (count,), device=DEVICE) for _ in turns(steps)]
    return [zipf_ids(SIZES.rows, count, exponent) for _ in turns(steps)]


def loop_of(
    module: nn.Module, optimizer: optim.Optimizer, gradient: Tensor, *, ahead: bool = False
) -> Loop:
    """Trains on batch after batch with the same gradient of the looked-up rows."""

    def loop(batches: Sequence[Tensor]) -> Iterator[None]:
        loader: Any = batches
        if ahead:
            loader = speedtorch.prefetch(batches, module, ids=lambda ids: ids)
        for ids in loader:
            optimizer.zero_grad()
            module(ids).backward(gradient)
            optimizer.step()
            yield

    return loop


def distinct_rows(report: Report) -> None:
    """Notes how many rows a step of each kind has, and how many of them the step before had."""
    for exponent in EXPONENTS:
        first, second = (ids.unique() for ids in batches_of(exponent)[:2])
        shared = int(torch.isin(second, first).sum())
        report.extra[str(exponent)] = {"distinct": len(second), "of the step before": shared}


def ours(report: Report, gradient: Tensor) -> None:
    """Rows and state in host memory."""
    for name, make in OPTIMIZERS.items():
        embedding = speedtorch.Embedding(SIZES.rows, COLUMNS, device=DEVICE)
        optimizer = make(embedding.parameters())
        if name != "SGD":
            speedtorch.attach(optimizer, embedding)
        for exponent in EXPONENTS:
            if name in ("SGD", "Adam", "SparseAdam") and exponent != 1.05:
                continue
            for ahead in (False, True):
                figure = step_figure(
                    f"Zipf {exponent}",
                    f"speedtorch, {name}{', prefetch' if ahead else ''}",
                    loop_of(embedding, optimizer, gradient, ahead=ahead),
                    batches_of(exponent),
                    kind="ours",
                    optimizer=name,
                    exponent=exponent,
                    ahead=ahead,
                )
                report.add(figure)
        del embedding, optimizer
        gc.collect()


def torchs(report: Report, gradient: Tensor) -> None:
    """Everything in the memory of the GPU."""
    embedding = nn.Embedding(SIZES.rows, COLUMNS, sparse=True, device=DEVICE)
    optimizer = OPTIMIZERS["SparseAdam"](embedding.parameters())
    for exponent in EXPONENTS:
        figure = step_figure(
            f"Zipf {exponent}",
            "torch, SparseAdam, all in GPU memory",
            loop_of(embedding, optimizer, gradient),
            batches_of(exponent),
            kind="torch",
            optimizer="SparseAdam",
            exponent=exponent,
        )
        report.add(figure)


def main() -> None:
    """Measures and stores all figures in one run."""
    title = f"a step of {SIZES.large_batch:,} ids, {SIZES.rows:,} x {COLUMNS} float32"
    report = Report("embedding", title)
    gradient = torch.randn(SIZES.large_batch, COLUMNS, device=DEVICE)
    distinct_rows(report)
    torchs(report, gradient)
    gc.collect()
    ours(report, gradient)
    report.save()


if __name__ == "__main__":
    main()
