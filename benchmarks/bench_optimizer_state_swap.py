"""Records leave while others arrive: both directions of the link at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor

import speedtorch
from benchmarks.harness import Figure, Measured, measure, turns
from benchmarks.sizes import DEVICE, SIZES
from benchmarks.tables import host_table

FIELDS, COLUMNS = 3, 128
RECORD_BYTES = FIELDS * COLUMNS * 4
NBYTES = 2 * SIZES.batch * RECORD_BYTES
TITLE = f"{SIZES.batch:,} records of {RECORD_BYTES} B each way"
Plan: TypeAlias = list[Tensor] | None


def two_way_bound() -> Figure:
    """memcpy of as many bytes, both ways at once."""
    on_host = [
        torch.empty(NBYTES // 2, dtype=torch.uint8, pin_memory=DEVICE == "cuda") for _ in range(2)
    ]
    on_gpu = [torch.empty(NBYTES // 2, dtype=torch.uint8, device=DEVICE) for _ in range(2)]

    def both_ways(_: object) -> None:
        if DEVICE == "cpu":
            on_gpu[0].copy_(on_host[0])
            on_host[1].copy_(on_gpu[1])
            return
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(here)
        on_gpu[0].copy_(on_host[0], non_blocking=True)
        with torch.cuda.stream(side):
            on_host[1].copy_(on_gpu[1], non_blocking=True)
        here.wait_stream(side)

    name = "bound: memcpy of the same bytes, both ways at once"
    return measure("records", name, both_ways, turns(), nbytes=NBYTES, kind="bound")


def pairs(rows: int, overlap: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Two lists of distinct ids that share a part."""
    count = SIZES.batch
    for _ in turns(9):
        drawn = torch.randint(rows, (4 * count,), device=DEVICE).unique()
        ids = drawn[torch.randperm(len(drawn), device=DEVICE)]
        moved = int(count * (1 - overlap))
        yield ids[:count], ids[moved : moved + count][torch.randperm(count, device=DEVICE)]


def measured() -> Measured:
    """From tables of several sizes, with and without rows that stay where they are."""
    yield (bound := two_way_bound())
    leaving, arriving = (
        [torch.rand(SIZES.batch, COLUMNS, device=DEVICE) for _ in range(FIELDS)] for _ in range(2)
    )
    for kind, gibibytes in (("managed", 16), ("managed", 48), ("registered", 16)):
        rows = SIZES.managed_bytes // 48 * gibibytes // RECORD_BYTES
        host = list(host_table(kind, rows, FIELDS * COLUMNS).split(COLUMNS, dim=1))

        def swap(given: tuple[Tensor, Tensor, Plan, Plan], host: list[Tensor] = host) -> None:
            evict, load, evict_plan, load_plan = given
            speedtorch.optimizer_state_swap(
                host, leaving, evict, arriving, load, evict_plan=evict_plan, load_plan=load_plan
            )

        for overlap in (0.0, 0.5):
            batches = list(pairs(rows, overlap))
            plans = [[speedtorch.plan_rows(ids, rows) for ids in pair] for pair in batches]
            for planning, given in (
                ("included", [(*pair, None, None) for pair in batches]),
                ("excluded", [(*pair, *two) for pair, two in zip(batches, plans, strict=True)]),
            ):
                yield measure(
                    "records",
                    f"speedtorch, {kind} memory, {gibibytes} GiB, {overlap:.0%} of rows stay, "
                    f"planning {planning}",
                    swap,
                    given,
                    nbytes=NBYTES * (1 - overlap),
                    bound=None if overlap else bound,  # the bound moves every row
                    kind=kind,
                    gibibytes=gibibytes,
                    overlap=overlap,
                    planning=planning,
                )
