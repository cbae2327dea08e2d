"""Counts and times copies between host and device, and defines the reports."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import torch

from speedtorch.memory.byte_count import text_of

__all__ = ["Freed", "Memory", "StateReport", "SwapReport", "TransferStats"]

_KEPT = 64  # copies whose events stay pending before end() queries whether they have finished

Begun: TypeAlias = float | torch.cuda.Event


class Memory(Enum):
    """Host or device memory of a flat buffer; a copy is named by its destination."""

    HOST = "host"
    DEVICE = "device"


class TransferStats:
    """Counts bytes copied to each memory, and the seconds of those copies."""

    def __init__(self) -> None:
        self.copied = dict.fromkeys(Memory, 0)
        self._seconds = dict.fromkeys(Memory, 0.0)
        self._open: list[tuple[Memory, torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self, stream: torch.cuda.Stream | None) -> Begun:
        """Marks the start of a copy on a stream; None: the copy is synchronous."""
        if stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def end(self, begun: Begun, end: torch.cuda.Event | None, nbytes: int, to: Memory) -> None:
        """Records `nbytes` copied since `begun`; `end` is a timed event behind the copy."""
        self.copied[to] += nbytes
        if isinstance(begun, float):
            self._seconds[to] += time.perf_counter() - begun
            return
        assert end is not None
        self._open.append((to, begun, end))
        while len(self._open) > _KEPT and self._open[0][2].query():  # type: ignore[no-untyped-call]
            self._close()

    def figures(self) -> dict[str, Any]:
        """Returns the copy fields of a TransferReport; waits for pending copies."""
        while self._open:
            self._open[0][2].synchronize()
            self._close()
        found: dict[str, Any] = {}
        for memory, way in ((Memory.DEVICE, "in"), (Memory.HOST, "out")):
            copied, seconds = self.copied[memory], self._seconds[memory]
            found[f"bytes_{way}"] = copied
            found[f"gbps_{way}"] = copied / seconds / 1e9 if copied and seconds else None
        return found

    def _close(self) -> None:
        to, start, end = self._open.pop(0)
        self._seconds[to] += start.elapsed_time(end) / 1e3


class Freed(int):
    """Bytes of device memory that an eviction has freed.

    Attributes:
        held_by: views of evicted tensors that the program still holds, each with the module's name.
            Such views keep the module's device memory allocated.
    """

    held_by: tuple[str, ...]

    def __new__(cls, count: int, held_by: Iterable[str] = ()) -> Freed:
        """Creates the count with the names of its views."""
        made = super().__new__(cls, count)
        vars(made)["held_by"] = tuple(held_by)
        return made

    def __repr__(self) -> str:
        held = f", held by {'; '.join(self.held_by)}" if self.held_by else ""
        return f"{text_of(self)} freed{held}"


@dataclass(frozen=True)
class TransferReport:
    """Host memory of a swapper, and all copies since its creation."""

    host_bytes: int
    """Bytes of host memory, which is pinned if the device is a GPU."""
    bytes_in: int
    """Bytes copied to the device."""
    bytes_out: int
    """Bytes copied to the host."""
    gbps_in: float | None
    """10^9 bytes per second during copies to the device; None without copies."""
    gbps_out: float | None
    """10^9 bytes per second during copies to the host; None without copies."""

    def _copies(self) -> Iterable[str]:
        ways = (
            ("device  ", self.bytes_in, self.gbps_in),
            ("host    ", self.bytes_out, self.gbps_out),
        )
        for to, count, gbps in ways:
            yield f"to {to}{text_of(count)}" + ("" if gbps is None else f" at {gbps:.1f} GB/s")


@dataclass(frozen=True)
class SwapReport(TransferReport):
    """Locations of a Swapper's offloaded modules, and all copies since its creation."""

    num_modules: int
    """Number of offloaded modules."""
    resident: tuple[str, ...]
    """Names of modules on the device, least recently used first."""
    in_use: tuple[str, ...]
    """Names of modules on the device that are in use."""
    resident_bytes: int
    """Bytes of device memory, including gradients and new optimizer state."""
    budget_bytes: int | None
    new_bytes: int
    """Device bytes that an eviction of all modules would copy to the host now."""
    hits: int
    """Uses whose module was loaded or prefetched."""
    misses: int
    """Uses whose module had to be loaded first."""
    seconds_waited: float
    """Duration of evictions whose copies to the host were not complete yet."""
    held_by: tuple[str, ...]
    """Views of modules' device tensors that the program holds."""

    def __str__(self) -> str:
        budget = "" if self.budget_bytes is None else f" of {text_of(self.budget_bytes)}"
        lines = [
            f"modules    {len(self.resident)} of {self.num_modules} loaded,"
            f" {len(self.in_use)} in use",
            f"device     {text_of(self.resident_bytes)}{budget}, {text_of(self.new_bytes)} changed",
            f"host       {text_of(self.host_bytes)}",
            f"uses       {self.hits} found their module loaded, {self.misses} did not",
            f"waited     {self.seconds_waited:.3f} s",
            *self._copies(),
            *(f"held by    {view}" for view in self.held_by),
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class StateReport(TransferReport):
    """Location of a StateSwapper's state, and all copies since its creation."""

    num_buckets: int
    """Number of buckets in which state is copied."""
    device_bytes: int
    """Device bytes that state uses now."""
    budget_bytes: int

    def __str__(self) -> str:
        lines = [
            f"host       {text_of(self.host_bytes)} in {self.num_buckets} buckets",
            f"device     {text_of(self.device_bytes)} of {text_of(self.budget_bytes)}",
            *self._copies(),
        ]
        return "\n".join(lines)
