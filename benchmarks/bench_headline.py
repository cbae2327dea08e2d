"""The two cases that SpeedTorch was known for: tables that a GPU of 11.17 GiB cannot train."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn, optim

import speedtorch
from benchmarks.bench_word2vec import SkipGram, batches, skip_gram_loop
from benchmarks.harness import Figure, Measured, forget
from benchmarks.sizes import DEVICE, SIZES
from benchmarks.training import step_figure

CAP_BYTES = int(11.17 * 2**30)
HOST_BYTES = 90 << 30  # that the widest tables of ours may take here
STEPS = 20
TITLE = "tables that a GPU of 11.17 GiB cannot train"


class Case(NamedTuple):
    """Target and context tables of one size."""

    rows: int
    columns: int
    name: str
    make: Callable[[Any], optim.Optimizer]
    states: int
    """Fields of state of the size of the weight."""

    @property
    def section(self) -> str:
        return f"2 tables of {self.rows:,} x {self.columns}, {self.name}"


CASES = (
    Case(SIZES.headline_rows[0], 496, "Adam", lambda p: optim.Adam(p, fused=True), 2),
    Case(SIZES.headline_rows[1], 188, "SGD", lambda p: optim.SGD(p, lr=1e-3), 0),
)


def used_outside_torch() -> int:
    """Bytes of the GPU that torch's allocator does not know of, this process's context included."""
    if DEVICE == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def step_of_torch(case: Case, columns: int) -> None:
    """One step with everything in GPU memory."""
    model = SkipGram(lambda: nn.Embedding(case.rows, columns, device=DEVICE))
    loop = skip_gram_loop(model, case.make(model.parameters()))
    for _ in loop(batches(case.rows, 0)[:1]):
        pass


def plain_torch(case: Case, columns: int) -> str | None:
    """The error if torch's tables do not fit."""
    forget()
    error = None
    try:
        step_of_torch(case, columns)
    except torch.OutOfMemoryError as caught:
        error = str(caught).split(". GPU 0")[0]
    return error


def widest_of_torch(case: Case) -> int:
    """Most columns, a multiple of 4, that plain torch trains; 0 without a GPU."""
    tried = range(1, case.columns // 4 if DEVICE == "cuda" else 1)
    return 4 * bisect(tried, 0, key=lambda columns: plain_torch(case, 4 * columns) is not None)


def ours(case: Case, columns: int, steps: int) -> tuple[Figure, dict[str, Any]]:
    """Trains with tables and state in host memory."""
    forget()
    before = used_outside_torch()
    model = SkipGram(lambda: speedtorch.Embedding(case.rows, columns, device=DEVICE))
    optimizer = case.make(model.parameters())
    if case.states:
        speedtorch.attach(optimizer, model)
    figure = step_figure(
        case.section,
        f"speedtorch, prefetch, GPU capped at {CAP_BYTES / 2**30:.2f} GiB",
        skip_gram_loop(model, optimizer, ahead=True),
        batches(case.rows, steps),
        kind="ours",
        columns=columns,
    )
    return figure, {
        "columns": columns,
        "host_bytes": model.u.table.nbytes + model.v.table.nbytes,
        "gpu_bytes": torch.cuda.max_memory_reserved() if DEVICE == "cuda" else 0,
        "gpu_bytes_outside_torch": used_outside_torch() - before,
    }


def measured() -> Measured:
    """Both cases, where torch's allocator has no more than the GPU of 2019 had."""
    if DEVICE == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(CAP_BYTES / total)
    for case in CASES:
        facts: dict[str, Any] = {"plain torch": plain_torch(case, case.columns)}
        figure, facts["speedtorch"] = ours(case, case.columns, STEPS)
        yield figure
        if SIZES.headline_grows:
            facts["widest of plain torch"] = widest_of_torch(case)
            record = case.rows * 2 * 4 * (1 + case.states)
            widest = min(HOST_BYTES, SIZES.managed_bytes * 2) // record // 4 * 4
            _, facts["widest tried here"] = ours(case, max(4, widest), 3)
        yield case.section, facts
