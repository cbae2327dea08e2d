"""Putting the ids of a batch in address order."""

from __future__ import annotations

import torch

import speedtorch
from benchmarks.harness import Report, fresh_ids, measure
from benchmarks.sizes import SIZES


def main() -> None:
    """Measures and stores all figures in one run."""
    report = Report("plan_rows", f"ids of a table of {SIZES.rows:,} rows")
    for count in (SIZES.batch, SIZES.large_batch):
        for name, run in (
            ("speedtorch.plan_rows", lambda ids: speedtorch.plan_rows(ids, SIZES.rows)),
            ("torch.sort", torch.sort),
            ("torch.unique, inverse too", lambda ids: torch.unique(ids, return_inverse=True)),
        ):
            ids = fresh_ids(SIZES.rows, count, 9)
            section = f"{count:,} ids"
            report.add(measure(section, name, run, ids, nbytes=count * 8, kind=name, batch=count))
    report.save()


if __name__ == "__main__":
    main()
