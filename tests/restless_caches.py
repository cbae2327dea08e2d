"""Caches whose rows change places as often as they can."""

from __future__ import annotations

import pytest

from speedtorch.step import hot_rows

__all__ = ["make_restless"]


def make_restless(patches: pytest.MonkeyPatch) -> None:
    """Lets rows of a cache change places before every exchange, for the smallest gain."""
    patches.setattr(hot_rows, "FIRST", range(1 << 20))
    patches.setattr(hot_rows, "EVERY", 16)
    patches.setattr(hot_rows, "_SURE", 0.0)
    patches.setattr(hot_rows, "CHUNK_BYTES", 100)  # a row or two at once
