"""Putting the ids of a batch in address order."""

from __future__ import annotations

import torch

import speedtorch
from benchmarks.harness import Measured, fresh_ids, measure
from benchmarks.sizes import SIZES

TITLE = f"ids of a table of {SIZES.rows:,} rows"


def measured() -> Measured:
    """Ours beside torch's sorts."""
    for count in (SIZES.batch, SIZES.large_batch):
        for name, run in (
            ("speedtorch.plan_rows", lambda ids: speedtorch.plan_rows(ids, SIZES.rows)),
            ("torch.sort", torch.sort),
            ("torch.unique, inverse too", lambda ids: torch.unique(ids, return_inverse=True)),
        ):
            ids = fresh_ids(SIZES.rows, count, 9)
            section = f"{count:,} ids"
            yield measure(section, name, run, ids, nbytes=count * 8, kind=name, batch=count)
