"""Whether a run gave the same numbers as the same one in plain torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from speedtorch.demo.report import peak_gpu_bytes, size_text

__all__ = ["compared"]

# How far a figure may be from plain torch's on a GPU, where sums are formed in any order.
_GPU_TOLERANCE = 0.01


def compared(
    device: torch.device,
    rows: Iterable[tuple[Tensor, Tensor]],
    figures: Mapping[str, tuple[float, float]],
    seconds: float,
) -> dict[str, Any]:
    """Compares a run with the same one in plain torch, and prints what came out.

    Args:
        device: what trained.
        rows: the float32 numbers that were learnt, on the CPU, each beside plain torch's.
        figures: what is told of both runs, the last loss for one; plain torch's comes second.
        seconds: that plain torch took.

    Returns:
        `same`: on the CPU, whether all numbers learnt are equal bit for bit; on a GPU, whether the
        figures are within 1 %. `farthest` is the largest difference of two numbers; the other
        entries are plain torch's.
    """
    identical, farthest = True, 0.0
    for one, other in rows:
        identical &= torch.equal(one.view(torch.int32), other.view(torch.int32))
        farthest = max(farthest, (one - other).abs().max().item())
    near = all(abs(one - other) <= _GPU_TOLERANCE * abs(other) for one, other in figures.values())
    same = identical if device.type == "cpu" else near
    told = ", ".join(
        f"{name.replace('_', '-')} {other:.4f}" for name, (_, other) in figures.items()
    )
    print(
        f"plain      torch on full-size tensors: {seconds:.1f} s, {told}"
        + ("" if device.type == "cpu" else f", peak {size_text(peak_gpu_bytes(device))} on the GPU")
        + "\nagreement  "
        + ("bit for bit" if identical else f"numbers differ by {farthest:.2g} at most")
        + ("" if same else ": MORE THAN THEY SHOULD"),
        flush=True,
    )
    return {
        "same": same,
        "identical": identical,
        "farthest": farthest,
        "seconds": seconds,
        "peak_gpu_bytes": peak_gpu_bytes(device),
        **{name: other for name, (_, other) in figures.items()},
    }
