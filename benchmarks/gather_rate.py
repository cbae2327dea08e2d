"""Rows per second that a GPU gathers from host memory: one GPU alone, and all GPUs at once."""

from __future__ import annotations

from threading import Barrier

import torch
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.directions import GATHER
from benchmarks.sizes import DEVICE, SIZES
from benchmarks.tables import host_table

COLUMNS = 128


def rates(gpus: int) -> list[float]:
    """Rows per second of each of the first `gpus` GPUs, all of which gather at once."""
    found = torch.zeros(gpus, dtype=torch.float64).share_memory_()
    barrier = mp.get_context("spawn").Barrier(gpus)
    mp.spawn(_gather, (barrier, found), gpus)  # type: ignore[no-untyped-call]
    return found.tolist()


def _gather(rank: int, barrier: Barrier, found: Tensor) -> None:
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    table = host_table("registered", SIZES.rows, COLUMNS)
    ids = [torch.randint(SIZES.rows, (SIZES.batch,), device=DEVICE) for _ in range(SIZES.calls)]
    barrier.wait()
    figure = GATHER.move("", "", table, kind="registered", ids=ids)
    found[rank] = SIZES.batch / figure.median_ms * 1e3


def line_of(found: list[float]) -> str:
    """A line with the rates of all GPUs, which `benchmarks.gpu_report` copies to its report."""
    millions = ", ".join(f"{rate / 1e6:.1f}" for rate in found)
    return f"rows: {millions} million a second on {len(found)} GPU{'s' * (len(found) > 1)}"


def main() -> None:
    """Prints the rate of one GPU, and those of all GPUs at once."""
    if DEVICE == "cpu":
        raise SystemExit("gather_rate: no GPU here; run it on a machine with one")
    print(f"rows of {COLUMNS} float32, {SIZES.batch:,} random rows of {SIZES.rows:,} at a time")
    for gpus in dict.fromkeys((1, torch.cuda.device_count())):
        print(line_of(rates(gpus)), flush=True)


if __name__ == "__main__":
    main()
