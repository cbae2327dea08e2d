"""Training where the compute takes as long as the exchange: how much of the latter still shows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn, optim
from torch.profiler import ProfilerActivity, profile

import speedtorch
from benchmarks.bench_embedding import COLUMNS, batches_of
from benchmarks.harness import Measured
from benchmarks.sizes import DEVICE, SIZES
from benchmarks.training import Loop, loop_of, prefetched, step_figure

EXPONENT = 1.05
LAYERS = 2
TITLE = f"{LAYERS} dense layers behind an embedding, {SIZES.large_batch:,} ids, Zipf {EXPONENT}"
_EXCHANGE = "swap_kernel"
Span: TypeAlias = tuple[float, float]


class Tower(nn.Module):
    """An embedding and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = speedtorch.Embedding(SIZES.rows, COLUMNS, device=DEVICE)
        layers = [nn.Linear(COLUMNS, COLUMNS, device=DEVICE) for _ in range(LAYERS)]
        self.layers = nn.Sequential(*(part for each in layers for part in (each, nn.ReLU())))

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers(self.rows(ids)).square().mean()


def _joined(spans: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def _total(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def overlap_of(loop: Loop, batches: Any) -> dict[str, Any]:
    """How much of the exchange is hidden behind the compute, from a profiler's trace.

    Milliseconds of exchange and of other kernels, the share of the exchange that ran beside
    others, and the spans of both over a few steps for a picture; empty without a GPU.
    """
    warm = len(batches) // 3
    for _ in loop(batches[:warm]):
        pass
    if DEVICE == "cpu":
        return {}
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        for _ in loop(batches[warm:]):
            pass
        torch.cuda.synchronize()
    kernels = [
        (event.name, event.time_range.start / 1e3, event.time_range.end / 1e3)
        for event in traced.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    first = min(begin for _, begin, _ in kernels)
    exchange = _joined((b - first, e - first) for name, b, e in kernels if _EXCHANGE in name)
    others = _joined((b - first, e - first) for name, b, e in kernels if _EXCHANGE not in name)
    exchange = exchange[1:]  # that of the first step has nothing to hide behind
    total = _total(exchange)
    middle = exchange[len(exchange) // 2][0]
    window = (middle, middle + 4 * total / len(exchange))

    def within(spans: list[Span]) -> list[Span]:
        return [(b - middle, e - middle) for b, e in spans if b < window[1] and e > window[0]]

    return {
        "exchange_ms": total / len(exchange),
        "compute_ms": _total(others) / (len(exchange) + 1),
        "share_hidden": (total + _total(others) - _total(_joined(exchange + others))) / total,
        "exchange_spans": within(exchange),
        "compute_spans": within(others),
    }


def measured() -> Measured:
    """A step with and without prefetch, and a trace of the former."""
    tower = Tower()
    optimizer = optim.Adam(tower.parameters(), fused=True)
    speedtorch.attach(optimizer, tower)
    for name, loader in (("speedtorch", iter), ("speedtorch, prefetch", prefetched(tower))):
        loop = loop_of(optimizer, lambda ids: tower(ids).backward(), loader=loader)
        told = {"kind": "ours", "ahead": loader is not iter}
        yield step_figure("step", name, loop, batches_of(EXPONENT), **told)
    yield from overlap_of(loop, batches_of(EXPONENT, 9)).items()
