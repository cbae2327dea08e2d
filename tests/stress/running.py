"""The name of the program that runs, in a file that outlives a crash and a hang."""

from __future__ import annotations

import signal
from pathlib import Path

__all__ = ["Running"]

PATIENCE = 600.0
"""Seconds after which a program hangs: a signal ends the process."""


class Running:
    """Keeps the name of a program in a file while the program runs.

    Args:
        path: The file; it is removed at the end of a run, also of one that an exception ends.

    Attributes:
        left: The program within which a process has ended; "" if there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.left = path.read_text() if path.exists() else ""

    def begin(self, name: str) -> None:
        self.path.write_text(name)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.path.unlink(missing_ok=True)
