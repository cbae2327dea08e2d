"""How much is copied between host and device, how fast, and reports that say so."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import torch

from speedtorch.memory.byte_count import text_of

__all__ = ["Begun", "Freed", "Memory", "StateReport", "SwapReport", "TransferStats"]

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
        """Marks that have been read."""

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
        """What a TransferReport says of the copies; waits for those that have not come yet."""
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


class Freed(int):
    """Bytes of device memory that an eviction has freed.

    Attributes:
        held_by: views of units' tensors that are kept, each with the unit's name: they keep
            its device memory.
    """

    held_by: tuple[str, ...]

    def __new__(cls, count: int, held_by: Iterable[str] = ()) -> Freed:
        """An int with names."""
        made = super().__new__(cls, count)
        vars(made)["held_by"] = tuple(held_by)
        return made

    def __repr__(self) -> str:
        held = f", held by {'; '.join(self.held_by)}" if self.held_by else ""
        return f"{text_of(self)} freed{held}"


@dataclass(frozen=True)
class TransferReport:
    """The host memory of what moves, and what has travelled since it was made."""

    host_bytes: int
    """Of host memory, which is pinned if the device is a GPU."""
    bytes_in: int
    """Copied to the device."""
    bytes_out: int
    gbps_in: float | None
    """10^9 bytes per second while copies were under way; None: there were none."""
    gbps_out: float | None

    def _copies(self) -> Iterable[str]:
        ways = (
            ("device  ", self.bytes_in, self.gbps_in),
            ("host    ", self.bytes_out, self.gbps_out),
        )
        for to, count, gbps in ways:
            yield f"to {to}{text_of(count)}" + ("" if gbps is None else f" at {gbps:.1f} GB/s")


@dataclass(frozen=True)
class SwapReport(TransferReport):
    """Where a Swapper's units are, and what has travelled since it was made."""

    units: int
    """How many there are."""
    resident: tuple[str, ...]
    """Those on the device, the one that was used longest ago first."""
    in_use: tuple[str, ...]
    resident_bytes: int
    """Of device memory, gradients and new state included."""
    budget_bytes: int | None
    new_bytes: int
    """On the device that would be copied to the host if all left now."""
    hits: int
    """Uses that found their unit on the device."""
    misses: int
    seconds_waited: float
    """By the host, for units to leave."""
    held_by: tuple[str, ...]
    """Views that the program keeps of units' tensors on the device."""

    def __str__(self) -> str:
        budget = "" if self.budget_bytes is None else f" of {text_of(self.budget_bytes)}"
        lines = [
            f"units      {len(self.resident)} of {self.units} there, {len(self.in_use)} in use",
            f"device     {text_of(self.resident_bytes)}{budget}, {text_of(self.new_bytes)} new",
            f"host       {text_of(self.host_bytes)}",
            f"uses       {self.hits} found their unit there, {self.misses} did not",
            f"waited     {self.seconds_waited:.3f} s",
            *self._copies(),
            *(f"held by    {each}" for each in self.held_by),
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class StateReport(TransferReport):
    """Where a StateSwapper's state is, and what has travelled since it was made."""

    pieces: int
    """In which it is brought."""
    device_bytes: int
    """Of the device that state takes now."""
    budget_bytes: int

    def __str__(self) -> str:
        lines = [
            f"host       {text_of(self.host_bytes)} in {self.pieces} pieces",
            f"device     {text_of(self.device_bytes)} of {text_of(self.budget_bytes)}",
            *self._copies(),
        ]
        return "\n".join(lines)
