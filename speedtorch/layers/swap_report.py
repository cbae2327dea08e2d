"""Reports of a Swapper and a StateSwapper: what is where, and what has been copied so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from speedtorch.memory.byte_count import text_of

__all__ = ["Freed", "StateReport", "SwapReport"]


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
