"""Rows from the GPU to host memory."""

from __future__ import annotations

from benchmarks.directions import SCATTER
from benchmarks.harness import Measured
from benchmarks.sections import sections_of

TITLE = "rows from the GPU to host memory"


def measured() -> Measured:
    """All sections."""
    return sections_of(SCATTER)
