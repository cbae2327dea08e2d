"""How much of the exchange is hidden behind the compute, from a profiler's trace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.sizes import DEVICE
from benchmarks.training import Loop

__all__ = ["covered_ms", "measure_overlap"]

_EXCHANGE = "swap_kernel"
Span = tuple[float, float]


def covered_ms(spans: Iterable[Span], by: Iterable[Span]) -> float:
    """For how long something of `spans` and something of `by` run at once; each apart within."""
    total = 0.0
    others = sorted(by)
    for begin, end in sorted(spans):
        for low, high in others:
            if low >= end:
                break
            total += max(0.0, min(end, high) - max(begin, low))
    return total


def _joined(spans: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def measure_overlap(loop: Loop, batches: Any) -> dict[str, Any]:
    """Traces a loop.

    Args:
        loop: trains the batches.
        batches: the first third warms up.

    Returns:
        Milliseconds of exchange and of other kernels, the share of the exchange that ran beside
        others, and the spans of both over a few steps for a picture; empty without a GPU.
    """
    if DEVICE == "cpu":
        for _ in loop(batches):
            pass
        return {}
    warm = len(batches) // 3
    for _ in loop(batches[:warm]):
        pass
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
    total = sum(end - begin for begin, end in exchange)
    middle = exchange[len(exchange) // 2][0]
    window = (middle, middle + 4 * total / len(exchange))

    def within(spans: list[Span]) -> list[Span]:
        return [(b - middle, e - middle) for b, e in spans if b < window[1] and e > window[0]]

    return {
        "exchange_ms": total / len(exchange),
        "compute_ms": sum(end - begin for begin, end in others) / (len(exchange) + 1),
        "share_hidden": covered_ms(exchange, others) / total,
        "exchange_spans": within(exchange),
        "compute_spans": within(others),
    }
