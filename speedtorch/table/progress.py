"""A progress bar of work on all rows of a table."""

from __future__ import annotations

import os
import threading
from typing import Any

from tqdm import tqdm

__all__ = ["progress_bar"]

_BAR_AFTER_SECONDS = 2.0


class _Bar(tqdm):  # type: ignore[misc]
    """A bar that a forked child can make while another thread of its parent had tqdm's lock.

    tqdm's monitor, a thread that takes the lock every few seconds, is such a thread.
    """

    monitor_interval = 0


_Bar.set_lock(threading.RLock())
os.register_at_fork(after_in_child=lambda: _Bar.set_lock(threading.RLock()))


def progress_bar(count: int, progress: bool | None, unit: str = "row") -> Any:
    """A bar on stderr that counts rows, or another unit: always (True) or never (False).

    With None it is shown when the work takes longer than a moment and stderr is a terminal.
    """
    return _Bar(
        total=count,
        unit=unit,
        unit_scale=True,
        leave=False,
        disable=None if progress is None else not progress,  # tqdm: None asks for a terminal
        delay=0.0 if progress else _BAR_AFTER_SECONDS,
    )
