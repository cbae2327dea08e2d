"""Traffic: how much is copied between host and device, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["Traffic"]

_KEPT = 64  # events of so many copies, before anybody looks whether they are done


class Traffic:
    """Bytes copied each way, and the seconds that the copies have taken.

    Attributes:
        bytes_in: to the device.
        bytes_out: to the host.
    """

    def __init__(self) -> None:
        self.bytes_in = self.bytes_out = 0
        self._seconds = [0.0, 0.0]
        self._open: list[tuple[bool, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timed(
        self, stream: torch.cuda.Stream | None, *, comes: bool
    ) -> Iterator[Callable[[int], None]]:
        """What is queued within on a stream is a copy; gives what counts its bytes.

        Without a stream it is done at once.
        """

        def count(copied: int) -> None:
            self.bytes_in += copied if comes else 0
            self.bytes_out += 0 if comes else copied

        if stream is None:
            begin = time.perf_counter()
            yield count
            self._seconds[comes] += time.perf_counter() - begin
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record(stream)
        yield count
        end.record(stream)
        self._open.append((comes, start, end))
        while len(self._open) > _KEPT and self._open[0][2].query():  # type: ignore[no-untyped-call]
            self._close(*self._open.pop(0))

    def gbps(self, *, comes: bool) -> float | None:
        """10^9 bytes per second of copies to the device, or from it; None: there were none.

        Waits for copies that have not come yet.
        """
        while self._open:
            self._open[0][2].synchronize()
            self._close(*self._open.pop(0))
        copied = self.bytes_in if comes else self.bytes_out
        seconds = self._seconds[comes]
        return copied / seconds / 1e9 if copied and seconds else None

    def _close(self, comes: bool, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._seconds[comes] += start.elapsed_time(end) / 1e3
