"""The benchmarks by name, and each in a process of its own.

What one of them held (tables of tens of GiB, pinned memory, translations of addresses, a CUDA
context) is gone before the next begins: none of them makes another slower or short of memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
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
    "host_time",
    "embedding",
    "hot_rows",
    "word2vec",
    "small_steps",
    "many_tables",
    "recommender",
    "ngram_tables",
    "ranks",
    "layers",
    "training_state",
    "state_swapper",
    "checkpoints",
    "file_tables",
    "transformer",
    "sharded_transformer",
    "overlap",
    "headline",
)


def commit_of(checkout: Path = ROOT) -> str:
    """What git calls it, if git knows it."""
    ask = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(ask, capture_output=True, text=True).stdout.strip() or "unknown"


def run_stem(
    stem: str,
    folder: Path = ROOT,
    *,
    quiet: bool = False,
    sockets: Sequence[int] = (),
    **environment: str,
) -> str | None:
    """Runs one benchmark, which leaves its figures in $OUT; the end of what it said if it failed.

    `benchmarks` and `speedtorch` are those of the folder. It may use the sockets of these numbers.
    """
    path = [str(folder), str(folder / "docs" / "examples")]
    path += filter(None, [os.environ.get("PYTHONPATH")])
    done = subprocess.run(
        [sys.executable, "-c", f"from benchmarks.harness import run; run({stem!r})"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment},
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=sockets,
    )
    return done.stderr[-2000:] or f"exit status {done.returncode}" if done.returncode else None
