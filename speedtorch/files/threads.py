"""Threads that copy and hash for files.

They take work until the process ends: those of concurrent.futures take none once the interpreter
has begun to shut down, when a thread that saves may still have some.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool

__all__ = ["MOST_THREADS", "threads"]

MOST_THREADS = 16


@contextmanager
def threads(most: int) -> Iterator[ThreadPool]:
    """One for each core, `most` and 16 at most; at the end all their work is done."""
    pool = ThreadPool(min(most, MOST_THREADS, os.cpu_count() or 1))
    try:
        yield pool
    finally:
        pool.close()
        pool.join()
