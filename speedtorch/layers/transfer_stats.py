"""TransferStats: how much is copied between host and device, and how fast."""

from __future__ import annotations

import time
from typing import TypeAlias

import torch

__all__ = ["Begun", "TransferStats"]

_KEPT = 64  # events of so many copies, before anybody looks whether they are done

Begun: TypeAlias = float | torch.cuda.Event


class TransferStats:
    """Bytes copied to the device (in) and to the host, and the seconds that the copies took."""

    def __init__(self) -> None:
        self.bytes_in = self.bytes_out = 0
        self._seconds = [0.0, 0.0]
        self._open: list[tuple[bool, torch.cuda.Event, torch.cuda.Event]] = []
        self._free: list[torch.cuda.Event] = []
        """Marks that have been read."""

    def begin(self, stream: torch.cuda.Stream | None) -> Begun:
        """A copy begins on a stream; without a stream it is done when end() is called."""
        if stream is None:
            return time.perf_counter()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def end(self, begun: Begun, end: torch.cuda.Event | None, nbytes: int, *, comes: bool) -> None:
        """So many bytes have been queued since, up to a timed event; `comes`: to the device."""
        self.bytes_in += nbytes if comes else 0
        self.bytes_out += 0 if comes else nbytes
        if isinstance(begun, float):
            self._seconds[comes] += time.perf_counter() - begun
            return
        assert end is not None
        self._open.append((comes, begun, end))
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
        self._free.append(start)
