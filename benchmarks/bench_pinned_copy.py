"""Contiguous ranges and slices of a field, either way."""

from __future__ import annotations

import torch

import speedtorch
from benchmarks.directions import GATHER, SCATTER
from benchmarks.harness import Measured, measure, turns
from benchmarks.sizes import DEVICE, SIZES
from benchmarks.tables import host_table

TITLE = f"{SIZES.run_bytes >> 20} MiB of consecutive rows"


def measured() -> Measured:
    """Ours of both kinds of memory, beside torch's copy of the same."""
    rows = SIZES.run_bytes // 512
    on_gpu = torch.ones(rows, 128, device=DEVICE)
    for way in (GATHER, SCATTER):
        section = "to the GPU" if way.inward else "from the GPU"
        yield (bound := way.bound(section, rows, 512))
        for kind in ("managed", "registered"):
            run = host_table(kind, rows, 128)
            field = host_table(kind, rows, 384)[:, 128:256]
            for name, host, copy in (
                (f"speedtorch, {kind} memory", run, speedtorch.pinned_copy),
                (f"speedtorch, {kind} memory, a field of records", field, speedtorch.pinned_copy),
                (f"torch copy_, {kind} memory", run, _torch_copy),
            ):
                target, source = (on_gpu, host) if way.inward else (host, on_gpu)
                yield measure(
                    section,
                    name,
                    lambda _, copy=copy, target=target, source=source: copy(target, source),
                    turns(7),
                    nbytes=SIZES.run_bytes,
                    bound=bound,
                    on_host_clock=copy is _torch_copy,
                    kind=name,
                )


def _torch_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
