"""A progress bar for work on all rows of a table."""

from __future__ import annotations

import os
import threading
from typing import Any

from tqdm import tqdm

__all__ = ["progress_bar"]

_BAR_AFTER_SECONDS = 2.0


class _Bar(tqdm):  # type: ignore[misc]
    """A bar with its own lock, which a forked child renews.

    A fork can copy tqdm's lock while another thread holds the lock, such as tqdm's monitor.
    """

    monitor_interval = 0


_Bar.set_lock(threading.RLock())
os.register_at_fork(after_in_child=lambda: _Bar.set_lock(threading.RLock()))


def progress_bar(count: int, progress: bool | None, unit: str = "row") -> Any:
    """Returns a bar on stderr that counts rows, or another unit.

    `progress` shows the bar always (True), never (False), or on a terminal after 2 s (None).
    """
    return _Bar(
        total=count,
        unit=unit,
        unit_scale=True,
        leave=False,
        disable=None if progress is None else not progress,  # None: only on a terminal
        delay=0.0 if progress else _BAR_AFTER_SECONDS,
    )
