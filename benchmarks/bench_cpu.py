"""Without a GPU: rows of a table in ordinary memory to other memory and back, by CPU threads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import speedtorch
from benchmarks.harness import Measured, measure, turns
from benchmarks.sizes import SIZES

TITLE = f"{SIZES.batch:,} x 128 float32 rows of {SIZES.rows:,}, on the CPU"


def measured() -> Measured:
    """Each way on one thread and on all."""
    table = speedtorch.empty((SIZES.rows, 128), memory="plain").fill_(1)
    rows = torch.ones(SIZES.batch, 128)
    ways: dict[str, dict[str, Callable[[Tensor], object]]] = {
        "gather": {
            "speedtorch.pinned_gather": lambda ids: speedtorch.pinned_gather(table, ids, out=rows),
            "torch.index_select": lambda ids: torch.index_select(table, 0, ids, out=rows),
        },
        "scatter": {
            "speedtorch.pinned_scatter": lambda ids: speedtorch.pinned_scatter(table, ids, rows),
            "torch index_copy_": lambda ids: table.index_copy_(0, ids, rows),
        },
        "accumulate": {
            "speedtorch.pinned_scatter(accumulate=True)": lambda ids: speedtorch.pinned_scatter(
                table, ids, rows, accumulate=True
            ),
            "torch index_add_": lambda ids: table.index_add_(0, ids, rows),
        },
    }
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        for section, pair in ways.items():
            for name, run in pair.items():
                yield measure(
                    section,
                    f"{name}, {threads} threads",
                    run,
                    [torch.randint(SIZES.rows, (SIZES.batch,)) for _ in turns()],
                    on_host_clock=True,
                    nbytes=rows.nbytes,
                    kind="ours" if "speedtorch" in name else "torch",
                    threads=threads,
                )
