"""131,072 random rows of a 10,000,000 x 128 float32 host table to the GPU."""

from __future__ import annotations

import torch

import speedtorch
from benchmarks.harness import REPETITIONS, WARM_UPS, Figure, Report, fresh_ids, measure
from benchmarks.peers import cupy_view

ROWS, COLUMNS, COUNT = 10_000_000, 128, 131_072
NBYTES = COUNT * COLUMNS * 4


def memcpy_bound(report: Report) -> Figure:
    """One contiguous copy of as many bytes from pinned memory."""
    source, target = (
        torch.ones(COUNT, COLUMNS).pin_memory(),
        torch.empty(COUNT, COLUMNS, device="cuda"),
    )
    turns = range(REPETITIONS + WARM_UPS)
    return report.add(
        measure(
            "bound: memcpy of the same bytes from pinned memory",
            lambda _: target.copy_(source, non_blocking=True),
            turns,
            nbytes=NBYTES,
        )
    )


def main() -> None:
    """Measures and stores all figures in one run."""
    report = Report("pinned_gather", f"{COUNT:,} x {COLUMNS} float32 rows of {ROWS:,}, host to GPU")
    bound = memcpy_bound(report)
    out = torch.empty(COUNT, COLUMNS, device="cuda")
    for memory in ("managed", "registered"):
        table = speedtorch.empty((ROWS, COLUMNS), memory=memory)
        figure = measure(
            f"speedtorch, {memory} memory, planning included",
            lambda ids, table=table: speedtorch.pinned_gather(table, ids, out=out),
            fresh_ids(ROWS, COUNT),
            nbytes=NBYTES,
            bound=bound,
        )
        report.add(figure)
        if memory == "registered":
            view = cupy_view(table)
            report.add(
                measure(
                    "CuPy zero-copy take, as SpeedTorch did",
                    lambda ids, view=view: torch.from_dlpack(view.take(cupy_view(ids), axis=0)),
                    fresh_ids(ROWS, COUNT),
                    nbytes=NBYTES,
                    bound=bound,
                )
            )
            staging = torch.empty(COUNT, COLUMNS).pin_memory()

            def staged(
                ids: torch.Tensor, table: torch.Tensor = table, staging: torch.Tensor = staging
            ) -> None:
                torch.index_select(table, 0, ids, out=staging)
                out.copy_(staging, non_blocking=True)

            report.add(
                measure(
                    "torch: index_select into pinned staging, copy",
                    staged,
                    [ids.cpu() for ids in fresh_ids(ROWS, COUNT)],
                    nbytes=NBYTES,
                    bound=bound,
                    on_host_clock=True,
                )
            )
            report.add(
                measure(
                    "torch: table[ids].to('cuda'), as SpeedTorch timed it",
                    lambda ids, table=table: table[ids].to("cuda"),
                    [ids.cpu() for ids in fresh_ids(ROWS, COUNT)],
                    nbytes=NBYTES,
                    bound=bound,
                    on_host_clock=True,
                )
            )
        del table
    on_gpu = torch.ones(ROWS, COLUMNS, device="cuda")
    for name, gather in (
        (
            "speedtorch, table on the GPU",
            lambda ids: speedtorch.pinned_gather(on_gpu, ids, out=out),
        ),
        (
            "torch.index_select, table on the GPU",
            lambda ids: torch.index_select(on_gpu, 0, ids, out=out),
        ),
    ):
        report.add(measure(name, gather, fresh_ids(ROWS, COUNT), nbytes=NBYTES))
    report.save()


if __name__ == "__main__":
    main()
