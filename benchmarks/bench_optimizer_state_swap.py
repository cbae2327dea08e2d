"""Records leave while others arrive: both directions of the link at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import speedtorch
from benchmarks.harness import Figure, Report, measure, turns
from benchmarks.sizes import DEVICE, SIZES
from benchmarks.tables import host_table

FIELDS, COLUMNS = 3, 128
RECORD_BYTES = FIELDS * COLUMNS * 4
NBYTES = 2 * SIZES.batch * RECORD_BYTES


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


def main() -> None:
    """Measures and stores all figures in one run."""
    report = Report("optimizer_state_swap", f"{SIZES.batch:,} records of {RECORD_BYTES} B each way")
    bound = report.add(two_way_bound())
    leaving, arriving = (
        [torch.rand(SIZES.batch, COLUMNS, device=DEVICE) for _ in range(FIELDS)] for _ in range(2)
    )
    unit = SIZES.managed_bytes // 48
    for kind, gibibytes in (("managed", 16), ("managed", 48), ("registered", 16)):
        rows = unit * gibibytes // RECORD_BYTES
        record = host_table(kind, rows, FIELDS * COLUMNS)
        host = list(record.split(COLUMNS, dim=1))

        def plain(pair: tuple[Tensor, Tensor], host: list[Tensor] = host) -> None:
            speedtorch.optimizer_state_swap(host, leaving, pair[0], arriving, pair[1])

        def planned(
            given: tuple[Tensor, Tensor, list[Tensor], list[Tensor]], host: list[Tensor] = host
        ) -> None:
            evict, load, evict_plan, load_plan = given
            speedtorch.optimizer_state_swap(
                host, leaving, evict, arriving, load, evict_plan=evict_plan, load_plan=load_plan
            )

        for overlap in (0.0, 0.5):
            batches = list(pairs(rows, overlap))
            plans = [
                (a, b, speedtorch.plan_rows(a, rows), speedtorch.plan_rows(b, rows))
                for a, b in batches
            ]
            for planning, run, given in (
                ("included", plain, batches),
                ("excluded", planned, plans),
            ):
                report.add(
                    measure(
                        "records",
                        f"speedtorch, {kind} memory, {gibibytes} GiB, {overlap:.0%} of rows stay, "
                        f"planning {planning}",
                        run,
                        given,
                        nbytes=NBYTES * (1 - overlap),
                        bound=None if overlap else bound,  # the bound moves every row
                        kind=kind,
                        gibibytes=gibibytes,
                        overlap=overlap,
                        planning=planning,
                    )
                )
    report.save()


if __name__ == "__main__":
    main()
