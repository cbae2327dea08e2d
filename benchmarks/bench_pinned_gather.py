"""Rows from host memory to the GPU."""

from __future__ import annotations

from benchmarks.directions import GATHER
from benchmarks.harness import Measured
from benchmarks.sections import sections_of

TITLE = "rows from host memory to the GPU"


def measured() -> Measured:
    """All sections."""
    return sections_of(GATHER)
