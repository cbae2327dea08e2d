"""The benchmarks by name, and each in a process of its own.

What one of them held (tables of tens of GiB, pinned memory, translations of addresses, a CUDA
context) is gone before the next begins: none of them makes another slower or short of memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
STEMS = (
    "pinned_gather",
    "pinned_scatter",
    "optimizer_state_swap",
    "pinned_copy",
    "plan_rows",
    "host_memory",
    "cpu",
    "embedding",
    "word2vec",
    "overlap",
    "headline",
)


def run_stem(
    stem: str,
    folder: Path = ROOT,
    *,
    timeout: float | None = None,
    quiet: bool = False,
    **environment: str,
) -> str | None:
    """Runs one benchmark, which leaves its figures in $OUT.

    Args:
        stem: of STEMS.
        folder: where `benchmarks` and `speedtorch` are found.
        timeout: seconds, after which it is killed.
        quiet: keep what it prints.
        **environment: variables beside those of this process.

    Returns:
        None, or the end of what it said when it failed.

    Raises:
        subprocess.TimeoutExpired: it took too long.
    """
    done = subprocess.run(
        [sys.executable, "-c", f"from benchmarks.harness import run; run({stem!r})"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=subprocess.PIPE,
        text=True,
        timeout=timeout,
    )
    return done.stderr[-2000:] or f"exit status {done.returncode}" if done.returncode else None
