"""Loops of steps with caches of several sizes, rows of 16 bits and one number of state a row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

import speedtorch
from benchmarks import fbgemm
from benchmarks.bench_embedding import COLUMNS, EXPONENTS
from benchmarks.harness import (
    Figure,
    Measured,
    figure_of,
    forget,
    fresh_ids,
    synchronize,
    take_turn,
)
from benchmarks.sections import zipf_ids
from benchmarks.sizes import DEVICE, SIZES
from benchmarks.training import prefetched

STEPS = 8
SHARES = (0.0, 0.05, 0.1, 0.2, 0.4)
FBGEMM_SHARES = (0.05, 0.1, 0.2, 0.4)
TITLE = (
    f"a step of {SIZES.large_batch:,} ids in loops of {STEPS} with prefetch, {SIZES.rows:,} x"
    f" {COLUMNS}, the loop's first and last exchange included"
)

_LOOPS, _SETTLES = SIZES.loops
"""Loops that are measured, and those of twice as many steps before, in which a cache fills."""
_BF16 = torch.bfloat16
_STORED: dict[str, Any] = {
    "float32": None,
    "bfloat16 rows": _BF16,
    "all bfloat16": {"weight": _BF16, "exp_avg": _BF16, "exp_avg_sq": _BF16},
}
_OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], optim.Optimizer]] = {
    "Adam": lambda parameters: optim.Adam(parameters, lr=1e-3, fused=True),
    "SGD": lambda parameters: optim.SGD(parameters, lr=1e-3),
    "row-wise Adagrad": lambda parameters: speedtorch.optim.RowWiseAdagrad(parameters, lr=1e-3),
}


def ids_of(exponent: float, steps: int) -> list[Tensor]:
    """Batches of one law: the frequent ids are the same ones in each."""
    if exponent == 0:
        return fresh_ids(SIZES.rows, SIZES.large_batch, steps)[:steps]
    return [zipf_ids(SIZES.rows, SIZES.large_batch, exponent) for _ in range(steps)]


def loop_figure(
    exponent: float, name: str, loop: Callable[[Sequence[Tensor]], object], **told: Any
) -> Figure:
    """The time of a step, by that of whole loops."""
    for _ in range(_SETTLES):
        loop(ids_of(exponent, 2 * STEPS))
    times = []
    for _ in range(_LOOPS):
        batches = ids_of(exponent, STEPS)
        take_turn()
        begin = time.perf_counter()
        loop(batches)
        synchronize()
        times.append((time.perf_counter() - begin) * 1e3 / STEPS)
    return figure_of(f"Zipf {exponent}", name, times, exponent=exponent, **told)


def peak() -> float:
    """GiB of the GPU."""
    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if DEVICE == "cuda" else 0.0


def ours(
    name: str, stored: str, shares: Iterable[float], exponents: Iterable[float], gradient: Tensor
) -> Measured:
    """One optimizer and kind of rows; its table goes with this call."""
    module = speedtorch.Embedding(SIZES.rows, COLUMNS, device=DEVICE, stored=_STORED[stored])
    module.init_(nn.init.zeros_)
    optimizer = _OPTIMIZERS[name](module.parameters())
    speedtorch.attach(optimizer, module)
    loader = prefetched(module)

    def loop(batches: Sequence[Tensor]) -> None:
        for ids in loader(batches):
            optimizer.zero_grad()
            module(ids).backward(gradient)
            optimizer.step()

    peaks = {}
    loop(ids_of(1.2, 2))  # the table has all fields then
    for share in shares:
        for exponent in exponents:
            speedtorch.cache(module, None)
            forget()
            cached = f"{100 * share:.0f} % cached" if share > 0 else "no cache"
            if share > 0:
                slots = int(share * SIZES.rows)
                speedtorch.cache(module, slots * (module.table.record_bytes + 8))
            title = f"speedtorch, {name}, {stored}, {cached}"
            told = {"kind": "ours", "optimizer": name, "stored": stored, "share": share}
            yield loop_figure(exponent, title, loop, **told)
            report = module.report()._asdict() if share > 0 else {}
            peaks[f"{title}, Zipf {exponent}"] = {"peak GPU, GiB": peak(), **report}
    yield f"{name}, {stored}", peaks


def fbgemms(
    name: str, shares: Iterable[float], exponents: Iterable[float], gradient: Tensor
) -> Measured:
    """FBGEMM, in managed memory with a cache of each share of the rows, and all on the GPU."""
    begins = torch.arange(SIZES.large_batch + 1, device=DEVICE)
    peaks = {}
    for place, share, module in fbgemm.places_of(
        [SIZES.rows], COLUMNS, name, pooled=False, shares=shares
    ):

        def loop(batches: Sequence[Tensor], module: nn.Module = module) -> None:
            for ids in batches:
                module(ids, begins).backward(gradient)

        for exponent in exponents:
            torch.cuda.reset_peak_memory_stats()
            title = f"FBGEMM, {name}, {place}"
            told = {"kind": "FBGEMM", "optimizer": name, "share": share}
            yield loop_figure(exponent, title, loop, **told)
            peaks[f"{title}, Zipf {exponent}"] = {"peak GPU, GiB": peak()}
        del module, loop
        forget()
    yield f"{name}, FBGEMM", peaks


def measured() -> Iterator[Any]:
    """Ours without and with a cache, and FBGEMM's, which caches weights."""
    gradient = torch.randn(SIZES.large_batch, COLUMNS, device=DEVICE)
    word = (1.05,)
    yield from ours("Adam", "float32", SHARES, EXPONENTS, gradient)
    forget()
    yield from fbgemms("Adam", FBGEMM_SHARES, EXPONENTS, gradient)
    for name in ("SGD", "row-wise Adagrad"):
        yield from ours(name, "float32", (0.0, 0.2), word, gradient)
        forget()
        yield from fbgemms(name, (0.2,), word, gradient)
    for name, stored in (
        ("Adam", "bfloat16 rows"),
        ("Adam", "all bfloat16"),
        ("row-wise Adagrad", "bfloat16 rows"),
    ):
        yield from ours(name, stored, (0.0, 0.2), word, gradient)
        forget()
