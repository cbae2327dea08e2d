"""Compares a training run with the same run in plain torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from demos.report import peak_gpu_bytes, size_text

__all__ = ["compare_with_plain"]

# The relative difference allowed on a GPU, because a GPU adds in no fixed order.
_GPU_TOLERANCE = 0.01


def compare_with_plain(
    device: torch.device,
    rows: Iterable[tuple[Tensor, Tensor]],
    figures: Mapping[str, tuple[float, float]],
    seconds: float,
) -> dict[str, Any]:
    """Compares a run with the same run in plain torch, and prints the result.

    Args:
        device: The device that trained.
        rows: Pairs of trained float32 tensors on the CPU: of the run, and of plain torch.
        figures: Figures by name, such as the last loss: of the run, and of plain torch.
        seconds: Duration of the training in plain torch.

    Returns:
        `same`: on the CPU, whether all tensors are bitwise identical; on a GPU, whether the figures
        are within 1 %. `farthest` is the largest difference of two numbers. The other entries
        describe the run in plain torch.
    """
    identical, farthest = True, 0.0
    for ours, plain in rows:
        identical &= torch.equal(ours.view(torch.int32), plain.view(torch.int32))
        farthest = max(farthest, (ours - plain).abs().max().item())
    near = all(abs(ours - plain) <= _GPU_TOLERANCE * abs(plain) for ours, plain in figures.values())
    same = identical if device.type == "cpu" else near
    texts = [f"{name.replace('_', '-')} {plain:.4f}" for name, (_, plain) in figures.items()]
    print(
        f"plain      torch on full-size tensors: {seconds:.1f} s, {', '.join(texts)}"
        + ("" if device.type == "cpu" else f", peak {size_text(peak_gpu_bytes(device))} on the GPU")
        + "\ncomparison "
        + ("bitwise identical" if identical else f"numbers differ by at most {farthest:.2g}")
        + ("" if same else ": DIFFERENT RESULTS"),
        flush=True,
    )
    return {
        "same": same,
        "identical": identical,
        "farthest": farthest,
        "seconds": seconds,
        "peak_gpu_bytes": peak_gpu_bytes(device),
        **{name: plain for name, (_, plain) in figures.items()},
    }
