"""Rows that change places as often as they can, in caches and in steps of several lookups."""

from __future__ import annotations

import pytest

from speedtorch.step import counted_memory, hot_rows

__all__ = ["make_restless"]


def make_restless(patches: pytest.MonkeyPatch) -> None:
    """Lets rows of a cache change places before every exchange, for the smallest gain.

    On the CPU the third lookup of a step appends its rows.
    """
    patches.setattr(counted_memory, "_MANY", 2)
    patches.setattr(hot_rows, "FIRST", range(1 << 20))
    patches.setattr(hot_rows, "EVERY", 16)
    patches.setattr(hot_rows, "_SURE", 0.0)
    patches.setattr(hot_rows, "CHUNK_BYTES", 100)  # a row or two at once
