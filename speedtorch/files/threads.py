"""Threads that copy and hash for files.

They take work until the process ends: those of concurrent.futures take none once the interpreter
has begun to shut down, when a thread that saves may still have some.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool

__all__ = ["ThreadPool", "threads"]


@contextmanager
def threads(count: int) -> Iterator[ThreadPool]:
    """So many threads; at the end all their work is done, also after an error."""
    pool = ThreadPool(count)
    try:
        yield pool
    finally:
        pool.close()
        pool.join()
