"""131,072 random rows from the GPU into a 10,000,000 x 128 float32 host table."""

from __future__ import annotations

import torch

import speedtorch
from benchmarks.harness import REPETITIONS, WARM_UPS, Report, fresh_ids, measure
from benchmarks.peers import cupy_view

ROWS, COLUMNS, COUNT = 10_000_000, 128, 131_072
NBYTES = COUNT * COLUMNS * 4


def main() -> None:
    """Measures and stores all figures in one run."""
    report = Report(
        "pinned_scatter", f"{COUNT:,} x {COLUMNS} float32 rows of {ROWS:,}, GPU to host"
    )
    src = torch.rand(COUNT, COLUMNS, device="cuda")
    target = torch.empty(COUNT, COLUMNS).pin_memory()
    bound = report.add(
        measure(
            "bound: memcpy of the same bytes into pinned memory",
            lambda _: target.copy_(src, non_blocking=True),
            range(REPETITIONS + WARM_UPS),
            nbytes=NBYTES,
        )
    )
    for memory in ("managed", "registered"):
        table = speedtorch.empty((ROWS, COLUMNS), memory=memory)
        for accumulate in (False, True):
            report.add(
                measure(
                    f"speedtorch, {memory} memory, planning included{', accumulate' * accumulate}",
                    lambda ids, table=table, accumulate=accumulate: speedtorch.pinned_scatter(
                        table, ids, src, accumulate=accumulate
                    ),
                    fresh_ids(ROWS, COUNT),
                    nbytes=NBYTES * (1 + accumulate),
                    bound=None if accumulate else bound,
                )
            )
        if memory == "registered":
            view = cupy_view(table)

            def put(ids: torch.Tensor, view: object = view) -> None:
                view[cupy_view(ids)] = cupy_view(src)  # type: ignore[index]

            report.add(
                measure(
                    "CuPy zero-copy put, as SpeedTorch did",
                    put,
                    fresh_ids(ROWS, COUNT),
                    nbytes=NBYTES,
                    bound=bound,
                )
            )

            def staged(ids: torch.Tensor, table: torch.Tensor = table) -> None:
                target.copy_(src)
                table.index_copy_(0, ids, target)

            report.add(
                measure(
                    "torch: copy into pinned staging, index_copy_",
                    staged,
                    [ids.cpu() for ids in fresh_ids(ROWS, COUNT)],
                    nbytes=NBYTES,
                    bound=bound,
                    on_host_clock=True,
                )
            )

            def as_timed(ids: torch.Tensor, table: torch.Tensor = table) -> None:
                table[ids] = src.cpu()

            report.add(
                measure(
                    "torch: table[ids] = src.cpu(), as SpeedTorch timed it",
                    as_timed,
                    [ids.cpu() for ids in fresh_ids(ROWS, COUNT)],
                    nbytes=NBYTES,
                    bound=bound,
                    on_host_clock=True,
                )
            )
        del table
    report.save()


if __name__ == "__main__":
    main()
