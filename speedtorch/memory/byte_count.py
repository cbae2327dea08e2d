"""Converts between numbers of bytes and texts such as "12GiB"."""

from __future__ import annotations

import re
from operator import index
from typing import SupportsIndex

__all__ = ["bytes_of", "text_of"]

_UNITS = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}


def bytes_of(name: str, given: SupportsIndex | str) -> int:
    """Parses a positive number of bytes; raises TypeError or ValueError for anything else."""
    if isinstance(given, bool) or not isinstance(given, SupportsIndex | str):
        kind = type(given).__name__
        raise TypeError(f"{name}: expected bytes or a text such as '12GiB', got {kind}")
    if isinstance(given, str):
        parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b)\s*", given.lower())
        if parts is None or parts[2] not in _UNITS:
            raise ValueError(f"{name}: expected a text such as '12GiB' or '500MB', got {given!r}")
        given = int(float(parts[1]) * _UNITS[parts[2]])
    if (count := index(given)) <= 0:
        raise ValueError(f"{name}: expected more than 0 bytes, got {count}")
    return count


def text_of(count: int) -> str:
    """Formats a number of bytes with a suitable binary unit."""
    power = max(0, min(4, (count.bit_length() - 1) // 10))
    return f"{count / 1024**power:,.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
