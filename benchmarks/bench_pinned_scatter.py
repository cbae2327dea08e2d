"""Rows from the GPU to host memory."""

from __future__ import annotations

from benchmarks.bench_pinned_gather import run
from benchmarks.directions import SCATTER


def main() -> None:
    """Measures and stores all figures in one run."""
    run(SCATTER)


if __name__ == "__main__":
    main()
