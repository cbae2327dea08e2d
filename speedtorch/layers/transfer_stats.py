"""How much is copied between host and device, how fast, and reports that say so."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from speedtorch.memory.byte_count import text_of

__all__ = ["Begun", "Freed", "StateReport", "SwapReport", "TransferStats"]

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
class SwapReport:
    """Where a Swapper's units are, and what has travelled since it was made."""

    units: int
    """How many there are."""
    resident: tuple[str, ...]
    """Those on the device, the one that was used longest ago first."""
    in_use: tuple[str, ...]
    resident_bytes: int
    """Of device memory, gradients and new state included."""
    budget_bytes: int | None
    host_bytes: int
    """Of the units' host memory, which is pinned if the device is a GPU."""
    new_bytes: int
    """On the device that would be copied to the host if all left now."""
    hits: int
    """Uses that found their unit on the device."""
    misses: int
    seconds_waited: float
    """By the host, for units to leave."""
    bytes_in: int
    """Copied to the device."""
    bytes_out: int
    gbps_in: float | None
    """10^9 bytes per second while copies were under way; None: there were none."""
    gbps_out: float | None
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
            f"to device  {_moved(self.bytes_in, self.gbps_in)}",
            f"to host    {_moved(self.bytes_out, self.gbps_out)}",
            *(f"held by    {each}" for each in self.held_by),
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class StateReport:
    """Where a StateSwapper's state is, and what has travelled since it was made."""

    pieces: int
    """In which it is brought."""
    host_bytes: int
    """Of host memory, which is pinned if the device is a GPU."""
    device_bytes: int
    """Of the device that state takes now."""
    budget_bytes: int
    bytes_in: int
    """Copied to the device."""
    bytes_out: int
    gbps_in: float | None
    """10^9 bytes per second while copies were under way; None: there were none."""
    gbps_out: float | None

    def __str__(self) -> str:
        lines = [
            f"host       {text_of(self.host_bytes)} in {self.pieces} pieces",
            f"device     {text_of(self.device_bytes)} of {text_of(self.budget_bytes)}",
            f"to device  {_moved(self.bytes_in, self.gbps_in)}",
            f"to host    {_moved(self.bytes_out, self.gbps_out)}",
        ]
        return "\n".join(lines)


def _moved(count: int, gbps: float | None) -> str:
    return text_of(count) + ("" if gbps is None else f" at {gbps:.1f} GB/s")
