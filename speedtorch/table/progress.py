"""A progress bar of work on all rows of a table."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

__all__ = ["progress_bar"]

_BAR_AFTER_SECONDS = 2.0


def progress_bar(rows: int, progress: bool | None) -> Any:
    """A bar on stderr that counts rows: always (True), never (False), or as needed (None).

    With None it is shown when the work takes longer than a moment and stderr is a terminal.
    """
    return tqdm(
        total=rows,
        unit="row",
        unit_scale=True,
        leave=False,
        disable=None if progress is None else not progress,  # tqdm: None asks for a terminal
        delay=0.0 if progress else _BAR_AFTER_SECONDS,
    )
