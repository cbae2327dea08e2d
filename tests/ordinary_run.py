"""What the ordinary run takes of large grids, and how many processes share its tests.

The ordinary run (`make test`) has every fact of a grid under some circumstance, and every
circumstance with some fact; `make nightly` has each fact under each circumstance. Which ones the
ordinary run takes depends on the grid alone, so it is the same at every run.
"""

from __future__ import annotations

import os
import random
from collections.abc import Hashable, Sequence

__all__ = ["dealt", "process_count", "programs", "soaked"]

# Of one process: torch, CUDA's context, small tables, and processes that it starts: 32 of them on
# an H100 of 78 GiB ran out of its memory.
HOST_BYTES, GPU_BYTES = 2 << 30, 3 << 30
# The largest table of the tests and its result, which one process at a time has.
LARGEST_BYTES = 6 << 30


def dealt(cases: Sequence[tuple[Hashable, Hashable]]) -> list[int]:
    """Numbers of the cases that the ordinary run takes.

    Args:
        cases: the fact and the circumstance of each.

    Returns:
        As few as have each fact and each circumstance, or nearly so, in order.
    """
    order = list(range(len(cases)))
    random.Random(0).shuffle(order)  # neighbours of a grid have most values in common
    seen: tuple[set[Hashable], set[Hashable]] = set(), set()
    taken = []
    for number in order:
        if any(each not in known for each, known in zip(cases[number], seen, strict=True)):
            taken.append(number)
            for each, known in zip(cases[number], seen, strict=True):
                known.add(each)
    return sorted(taken)


def programs(ordinary: int) -> int:
    """How many random programs a test runs: many times as many in `make nightly`."""
    return ordinary * (125 if "SPEEDTORCH_PROGRAMS" in os.environ else 1)


def soaked(ordinary: int, full: int) -> int:
    """How many of something a test with the mark `soak` runs.

    SPEEDTORCH_SOAK is the share of `full` to run: `make soak` sets 1, and a shorter soak sets less.
    """
    return max(ordinary, round(full * float(os.environ.get("SPEEDTORCH_SOAK", "0"))))


def process_count(cores: int, host_bytes: int, gpu_bytes: int | None = None) -> int:
    """How many processes run the tests: one for each core, as far as free memory goes.

    All processes share one GPU, if there is one.
    """
    most = [cores, host_bytes // HOST_BYTES]
    if gpu_bytes is not None:
        most.append((gpu_bytes - LARGEST_BYTES) // GPU_BYTES)
    return max(1, min(most))
