"""How much each benchmark moves: as on a large GPU, less of it, or so little that any CPU can."""

from __future__ import annotations

import os
from typing import TypeVar

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Most of a full run makes tables ready; quick sizes are enough to compare two libraries.
_CHOSEN = "small" if DEVICE == "cpu" else os.environ.get("SPEEDTORCH_BENCH_SIZES", "full")
_PLACE = {"full": 0, "quick": 1, "small": 2}[_CHOSEN]
T = TypeVar("T")


def _of(*sizes: T) -> T:
    return sizes[_PLACE]


class Sizes:
    """Counts of rows and bytes; tables are parts of one buffer for each kind of memory."""

    rows = _of(10_000_000, 3_000_000, 20_000)
    """Of the table that most sections use, 128 float32 each."""
    batch = _of(131_072, 131_072, 256)
    large_batch = _of(1 << 20, 1 << 20, 2048)
    managed_bytes = _of(48 << 30, 12 << 30, 48 << 20)
    """Of the largest table."""
    registered_bytes = _of(16 << 30, 6 << 30, 16 << 20)
    warm_ups = _of(3, 3, 1)
    repetitions = _of(15, 15, 2)
    most_repetitions = _of(61, 61, 3)
    """Where a benchmark asks for its own number of them."""
    run_bytes = _of(1 << 30, 1 << 30, 1 << 20)
    """Of a contiguous range."""
    product = _of(8192, 8192, 64)
    """Rows of the square matrices that are multiplied beside an exchange."""
    calls = _of(300, 100, 5)
    """Of small calls for one figure."""
    loops = _of((5, 6), (5, 3), (1, 1))
    """Loops of steps that are measured, and those before."""
    long_loops = _of((100, 4), (100, 3), (4, 1))
    """Steps of a loop in which the device's queue is full, and how many loops are measured."""
    prefetched_ids = _of(
        (256, 4096, 16_384, 65_536, 262_144, 1 << 20), (256, 16_384, 262_144), (16,)
    )
    prefetched_samples = _of((512, 2048, 16_384), (512, 16_384), (8,))
    centres = _of(512, 512, 16)
    """Of a word2vec step."""
    many_tables = _of((26, 260, 1000), (26, 260, 1000), (26, 30))
    """Tables of the models that are compared."""
    many_rows = _of(1.0, 0.3, 0.0002)
    """The share of Kaggle's rows that a model with many tables has."""
    recommender_rows = _of(3.0, 0.3, 0.0002)
    """The share of Kaggle's rows that the recommender has."""
    recommender_samples = _of(16_384, 16_384, 64)
    recommender_chunk = _of(50, 50, 2)
    """Steps that are timed together."""
    recommender_chunks = _of(40, 10, 3)
    headline_rows = _of((2_829_853, 14_886_544), (700_000, 3_700_000), (2_829, 14_886))
    headline_grows = _of(True, False, True)
    """Whether the headline's tables are widened to what fits."""
    state_side = _of(1556, 800, 8)
    """Of the square matrices of a whole training state."""
    sleeps = _of(7, 5, 2)
    """How often it sleeps and wakes."""
    small_side = _of(256, 256, 8)
    """Of such matrices where they are small."""
    small_tensors = _of(4096, 4096, 64)
    """How many there are of these."""
    swapped_parameters = _of(2_000_000_000, 200_000_000, 20_000)
    """Of a model whose optimizer's state is in host memory, at least."""
    swapped_width = _of(2560, 1024, 16)
    swapped_steps = _of(5, 5, 2)
    swapped_budgets = _of((512 << 20, 1 << 30, 2 << 30), (256 << 20,), (64 << 10,))
    """Bytes of the GPU for that state."""
    ngram_rows = _of((300_000_000, 100_000_000), (30_000_000, 10_000_000), (2_000, 1_000))
    """Of a language model's tables, with one number of state a row and with Adam."""
    is_large = _of(True, True, False)
    """Whether models are as large as on a real GPU: a transformer has 8 billion parameters."""
    saved_rows = _of(2_600_000, 600_000, 2_000)
    """Of a table that is saved: 4 GB with its state."""
    saves = _of(3, 3, 2)
    noted_loops = _of(12, 8, 2)
    file_rows = _of(4_000_000, 1_000_000, 4_000)
    """Of a table in a file: 6 GB with its state."""
    file_ids = _of(131_072, 131_072, 256)
    """Of a cold read; a step has half of them."""
    file_steps = _of(20, 20, 3)
    file_loops = _of(6, 3, 1)
    file_seconds = _of(2.0, 1.0, 0.05)
    """Of measurements of a disk."""


SIZES = Sizes()
