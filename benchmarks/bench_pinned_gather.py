"""Rows from host memory to the GPU."""

from __future__ import annotations

from functools import partial

from benchmarks.directions import GATHER
from benchmarks.sections import sections_of

TITLE = "rows from host memory to the GPU"
measured = partial(sections_of, GATHER)
