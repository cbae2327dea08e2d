"""Rows from the GPU to host memory."""

from __future__ import annotations

from functools import partial

from benchmarks.directions import SCATTER
from benchmarks.sections import sections_of

TITLE = "rows from the GPU to host memory"
measured = partial(sections_of, SCATTER)
