"""Arguments of functions that read all rows of a module."""

from __future__ import annotations

import operator

__all__ = ["checked_count"]


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
