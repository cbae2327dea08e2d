"""Reads the rows of a table block by block, and checks counts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

from torch import Tensor

from speedtorch.step.trained_rows import TrainedRows

__all__ = ["blocks_of", "checked_count"]


def blocks_of(
    trained_rows: TrainedRows, rows: slice, size: object, check: Callable[[], object]
) -> Iterator[tuple[int, Tensor]]:
    """Returns an iterator over blocks of some rows of a table, as Embedding.blocks() does.

    `check` raises if the rows cannot be read: at once, and again before each block.
    """
    most = checked_count("rows", size, "the maximum of rows in a block")
    check()

    def blocks() -> Iterator[tuple[int, Tensor]]:
        """Copies one block at each next()."""
        for first in range(rows.start, rows.stop, most):
            check()
            block = slice(first, min(first + most, rows.stop))
            yield first - rows.start, trained_rows.copied(block)

    return blocks()


def checked_count(argument: str, value: object, meaning: str, most: int | None = None) -> int:
    """Returns an int from 1 to `most`; raises TypeError or ValueError for anything else."""
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
