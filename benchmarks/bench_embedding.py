"""A training step of one embedding whose rows and Adam state are in host memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

import speedtorch
from benchmarks import fbgemm
from benchmarks.harness import Measured, forget, fresh_ids, turns
from benchmarks.sections import zipf_ids
from benchmarks.sizes import DEVICE, SIZES
from benchmarks.training import loop_of, prefetched, step_figure

COLUMNS = 128
EXPONENTS = (0.0, 0.9, 1.05, 1.2)
STEPS = 12
TITLE = f"a step of {SIZES.large_batch:,} ids, {SIZES.rows:,} x {COLUMNS} float32"

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], optim.Optimizer]] = {
    "Adam, fused": lambda parameters: optim.Adam(parameters, lr=1e-3, fused=True),
    "Adam": lambda parameters: optim.Adam(parameters, lr=1e-3),
    "SparseAdam": lambda parameters: optim.SparseAdam(list(parameters), lr=1e-3),
    "SGD": lambda parameters: optim.SGD(parameters, lr=1e-3),
}


def batches_of(exponent: float, steps: int = STEPS) -> list[Tensor]:
    """Ids of which few are frequent; with exponent 0 none is."""
    if exponent == 0:
        return fresh_ids(SIZES.rows, SIZES.large_batch, steps)
    return [zipf_ids(SIZES.rows, SIZES.large_batch, exponent) for _ in turns(steps)]


def distinct_rows() -> Measured:
    """How many rows a step of each kind has, and how many of them the step before had."""
    for exponent in EXPONENTS:
        first, second = (ids.unique() for ids in batches_of(exponent)[:2])
        shared = int(torch.isin(second, first).sum())
        yield str(exponent), {"distinct": len(second), "of the step before": shared}


def steps_of(kind: str, name: str, exponents: Iterable[float], gradient: Tensor) -> Measured:
    """One optimizer, with the same gradient of the looked-up rows in each step.

    Its table goes with this call.
    """
    if kind == "torch":
        module = nn.Embedding(SIZES.rows, COLUMNS, sparse=True, device=DEVICE)
        ways: list[Any] = [(f"torch, {name}, all in GPU memory", iter, {})]
    else:
        module = speedtorch.Embedding(SIZES.rows, COLUMNS, device=DEVICE)
        title = f"speedtorch, {name}"
        ways = [(title, iter, {"ahead": False})]
        ways.append((f"{title}, prefetch", prefetched(module), {"ahead": True}))
    optimizer = OPTIMIZERS[name](module.parameters())
    if kind == "ours" and name != "SGD":
        speedtorch.attach(optimizer, module)
    peaks = {}
    for exponent in exponents:
        for title, loader, parameters in ways:
            forget()
            told = {"kind": kind, "optimizer": name, "exponent": exponent, **parameters}
            loop = loop_of(optimizer, lambda ids: module(ids).backward(gradient), loader=loader)
            yield step_figure(f"Zipf {exponent}", title, loop, batches_of(exponent), **told)
            if DEVICE == "cuda":
                peak = torch.cuda.max_memory_allocated() / 2**30
                peaks[f"{title}, Zipf {exponent}"] = round(peak, 2)
    yield f"peak GPU memory of {name}, {kind}, GiB", peaks


def fbgemms(name: str, exponents: Iterable[float], gradient: Tensor) -> Measured:
    """FBGEMM with its optimizer, which steps within the backward, its rows in each place."""
    begins = torch.arange(SIZES.large_batch + 1, device=DEVICE)
    for title, module in fbgemm.tables_of([SIZES.rows], COLUMNS, name, pooled=False):

        def loop(batches: Sequence[Tensor], module: nn.Module = module) -> Iterator[None]:
            for ids in batches:
                module(ids, begins).backward(gradient)
                yield

        for exponent in exponents:
            told = {"kind": "FBGEMM", "optimizer": name, "exponent": exponent}
            yield step_figure(f"Zipf {exponent}", title, loop, batches_of(exponent), **told)
        del module, loop
        forget()


def measured() -> Measured:
    """torch's with everything in the memory of the GPU, ours with rows and state in the host's."""
    gradient = torch.randn(SIZES.large_batch, COLUMNS, device=DEVICE)
    yield from distinct_rows()
    for kind, name, exponents in (
        ("torch", "SparseAdam", EXPONENTS),
        ("ours", "Adam, fused", EXPONENTS),
        ("ours", "Adam", (1.05,)),
        ("ours", "SparseAdam", (1.05,)),
        ("ours", "SGD", (1.05,)),
    ):
        yield from steps_of(kind, name, exponents, gradient)
        gc.collect()
    yield from fbgemms("Adam", EXPONENTS, gradient)
    yield from fbgemms("SGD", (1.05,), gradient)
