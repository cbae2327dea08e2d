"""Threads that copy and hash for files.

They take work until the process ends: those of concurrent.futures take none once the interpreter
has begun to shut down, when a thread that saves may still have some.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool

__all__ = ["ThreadPool", "threads"]


@contextmanager
def threads(count: int | None = None) -> Iterator[ThreadPool]:
    """So many threads, or one for each core, 16 at most; at the end all their work is done."""
    pool = ThreadPool(min(16, os.cpu_count() or 1) if count is None else count)
    try:
        yield pool
    finally:
        pool.close()
        pool.join()
