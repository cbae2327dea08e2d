"""Transfers: copies between host memory and a device beside the current stream, and their speed."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, TypeAlias

import torch

from speedtorch.memory.side_stream import SharedSideStream

__all__ = ["Memory", "TransferStats", "Transfers"]

_KEPT = 64  # events of so many copies, before anybody looks whether they are done

Begun: TypeAlias = float | torch.cuda.Event


class Memory(Enum):
    """The two memories of a slab; a copy is named by the one that it writes to."""

    HOST = "host"
    DEVICE = "device"


class TransferStats:
    """Bytes copied to each memory, and the seconds that the copies took."""

    def __init__(self) -> None:
        self.copied = dict.fromkeys(Memory, 0)
        self._seconds = dict.fromkeys(Memory, 0.0)
        self._open: list[tuple[Memory, torch.cuda.Event, torch.cuda.Event]] = []
        self._free: list[torch.cuda.Event] = []
        """Events that have been read."""

    def begin(self, stream: torch.cuda.Stream | None) -> Begun:
        """A copy begins on a stream; without a stream it is done when end() is called."""
        if stream is None:
            return time.perf_counter()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def end(self, begun: Begun, end: torch.cuda.Event | None, nbytes: int, to: Memory) -> None:
        """So many bytes have been queued since, up to a timed event."""
        self.copied[to] += nbytes
        if isinstance(begun, float):
            self._seconds[to] += time.perf_counter() - begun
            return
        assert end is not None
        self._open.append((to, begun, end))
        while len(self._open) > _KEPT and self._open[0][2].query():  # type: ignore[no-untyped-call]
            self._close(*self._open.pop(0))

    def figures(self) -> dict[str, Any]:
        """Fields of a TransferReport; waits for the copies."""
        while self._open:
            self._open[0][2].synchronize()
            self._close(*self._open.pop(0))
        found: dict[str, Any] = {}
        for memory, way in ((Memory.DEVICE, "in"), (Memory.HOST, "out")):
            copied, seconds = self.copied[memory], self._seconds[memory]
            found[f"bytes_{way}"] = copied
            found[f"gbps_{way}"] = copied / seconds / 1e9 if copied and seconds else None
        return found

    def _close(self, to: Memory, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._seconds[to] += start.elapsed_time(end) / 1e3
        self._free.append(start)


class Transfers:
    """One side stream for each direction, so that copies in both run at once.

    Attributes:
        to_device: allocates the memory that its copies write; users of that call `join()` before.
        to_host: the host calls `finish()` before it reads.
    """

    def __init__(self, device: torch.device, stats: TransferStats | None = None) -> None:
        self.device, self.stats = device, stats or TransferStats()
        self.to_device = SharedSideStream("layers coming", is_timed=True)
        self.to_host = SharedSideStream("layers leaving", is_timed=True)

    def side(self, to: Memory) -> SharedSideStream:
        """The side stream of a direction."""
        return self.to_device if to is Memory.DEVICE else self.to_host

    def beside(
        self, to: Memory, after: torch.cuda.Event | None = None, *more: torch.cuda.Event | None
    ) -> AbstractContextManager[torch.cuda.Stream | None]:
        """Queues work of a direction behind these events; None: behind the current stream."""
        if after is None:
            return self.side(to).after_current(self.device)
        return self.side(to).after(self.device, after, *more)

    def count(self, begun: Begun, nbytes: int, to: Memory) -> None:
        """Counts the copies of a direction that have been queued since `stats.begin()`."""
        self.stats.end(begun, self.side(to).end, nbytes, to)
