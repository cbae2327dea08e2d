"""How much each benchmark moves: as on a large GPU, less of it, or so little that any CPU can."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

__all__ = ["DEVICE", "SIZES", "Sizes"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Sizes:
    """Counts of rows and bytes; tables are parts of one buffer for each kind of memory."""

    rows: int
    """Of the table that most sections use, 128 float32 each."""
    batch: int
    large_batch: int
    managed_bytes: int
    """Of the largest table."""
    registered_bytes: int
    repetitions: int
    most_repetitions: int
    """Where a benchmark asks for its own number of them."""
    run_bytes: int
    """Of a contiguous range."""
    product: int
    """Rows of the square matrices that are multiplied beside an exchange."""
    calls: int
    """Of small calls for one figure."""
    centres: int
    """Of a word2vec step."""
    headline_rows: tuple[int, int]
    headline_grows: bool
    """Whether the headline's tables are widened to what fits."""


_FULL = Sizes(
    rows=10_000_000,
    batch=131_072,
    large_batch=1 << 20,
    managed_bytes=48 << 30,
    registered_bytes=16 << 30,
    repetitions=15,
    most_repetitions=61,
    run_bytes=1 << 30,
    product=8192,
    calls=300,
    centres=512,
    headline_rows=(2_829_853, 14_886_544),
    headline_grows=True,
)
# Most of a full run makes tables ready; these are enough to compare two libraries.
_QUICK = replace(
    _FULL,
    rows=3_000_000,
    managed_bytes=12 << 30,
    registered_bytes=6 << 30,
    calls=100,
    headline_rows=(700_000, 3_700_000),
    headline_grows=False,
)
_SMALL = Sizes(
    rows=20_000,
    batch=256,
    large_batch=2048,
    managed_bytes=48 << 20,
    registered_bytes=16 << 20,
    repetitions=3,
    most_repetitions=3,
    run_bytes=1 << 20,
    product=64,
    calls=5,
    centres=16,
    headline_rows=(2_829, 14_886),
    headline_grows=True,
)
_CHOSEN = "small" if DEVICE == "cpu" else os.environ.get("SPEEDTORCH_BENCH_SIZES", "full")
SIZES = {"full": _FULL, "quick": _QUICK, "small": _SMALL}[_CHOSEN]
