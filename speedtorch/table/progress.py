"""A progress bar of work on all rows of a table."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

__all__ = ["progress_bar"]

_BAR_AFTER_SECONDS = 2.0


def progress_bar(count: int, progress: bool | None, unit: str = "row") -> Any:
    """A bar on stderr that counts rows, or another unit: always (True) or never (False).

    With None it is shown when the work takes longer than a moment and stderr is a terminal.
    """
    return tqdm(
        total=count,
        unit=unit,
        unit_scale=True,
        leave=False,
        disable=None if progress is None else not progress,  # tqdm: None asks for a terminal
        delay=0.0 if progress else _BAR_AFTER_SECONDS,
    )
