"""131,072 records (128 floats of weight and of Adam's two states) each way at once."""

from __future__ import annotations

import torch

import speedtorch
from benchmarks.harness import REPETITIONS, WARM_UPS, Report, measure

ROWS, COLUMNS, COUNT = 10_000_000, 128, 131_072
FIELDS = ("weight", "exp_avg", "exp_avg_sq")
NBYTES = 2 * COUNT * COLUMNS * 4 * len(FIELDS)


def distinct_ids(overlap: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of id lists without repetitions, the share `overlap` of them in both."""
    pairs = []
    common = int(COUNT * overlap)
    for _ in range(REPETITIONS + WARM_UPS):
        ids = torch.randperm(ROWS, device="cuda")[: 2 * COUNT]
        load = torch.cat((ids[:common], ids[COUNT : 2 * COUNT - common]))
        pairs.append((ids[:COUNT].clone(), load[torch.randperm(COUNT, device="cuda")]))
    return pairs


def main() -> None:
    """Measures and stores all figures in one run."""
    report = Report("optimizer_state_swap", f"{COUNT:,} records of {COLUMNS * 12} bytes each way")
    into, out_of = (torch.ones(NBYTES // 8).pin_memory() for _ in range(2))
    arriving_flat, leaving_flat = (torch.empty(NBYTES // 8, device="cuda") for _ in range(2))
    other = torch.cuda.Stream()

    def both_ways(_: object) -> None:
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            into.copy_(leaving_flat, non_blocking=True)
        arriving_flat.copy_(out_of, non_blocking=True)
        torch.cuda.current_stream().wait_stream(other)

    bound = report.add(
        measure(
            "bound: memcpy of the same bytes, both ways at once",
            both_ways,
            range(REPETITIONS + WARM_UPS),
            nbytes=NBYTES,
        )
    )
    for memory in ("managed", "registered"):
        table = speedtorch.HostTable(ROWS, COLUMNS, state=FIELDS[1:], memory=memory)
        host = [table[name] for name in FIELDS]
        leaving, arriving = (
            [torch.rand(COUNT, COLUMNS, device="cuda") for _ in FIELDS] for _ in range(2)
        )
        for overlap in (0.0, 0.5):
            report.add(
                measure(
                    f"speedtorch, {memory} memory, {overlap:.0%} of rows stay, planning included",
                    lambda pair, host=host, leaving=leaving, arriving=arriving: (
                        speedtorch.optimizer_state_swap(host, leaving, pair[0], arriving, pair[1])
                    ),
                    distinct_ids(overlap),
                    nbytes=int(NBYTES * (1 - overlap)),
                    bound=None if overlap else bound,  # the bound moves every row
                )
            )
        table.close()
        del table, host
    report.save()


if __name__ == "__main__":
    main()
