"""What functions that read all rows of a module have in common: arguments and a progress bar."""

from __future__ import annotations

import operator
from typing import Any

from tqdm import tqdm

__all__ = ["checked_count", "progress_bar"]

_BAR_AFTER_SECONDS = 2.0


def checked_count(argument: str, value: object, meaning: str, most: int | None = None) -> int:
    """A count of 1 or more, and at most `most`; TypeError or ValueError for anything else."""
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{argument}: expected an int, {meaning}, got {value!r}") from None
    if count < 1 or (most is not None and count > most):
        allowed = "1 or more" if most is None else f"1 to {most:,}"
        raise ValueError(f"{argument}: expected {allowed}, {meaning}, got {count:,}")
    return count


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
