"""Reports: where tensors are, and what has been copied between host and device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from speedtorch.layers.state_tensors import StatePart
from speedtorch.memory.byte_count import text_of

__all__ = ["Freed", "SleepReport", "StateReport", "SwapReport"]


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


class _Report:
    """A report that prints as a table of two columns."""

    def _rows(self) -> Iterable[tuple[str, str]]:
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(f"{name:<11}{text}" for name, text in self._rows())


@dataclass(frozen=True)
class _TransferReport(_Report):
    """The host memory of what moves, and what has been copied since it was made."""

    host_bytes: int
    """Of host memory, which is pinned if the device is a GPU."""
    bytes_in: int
    """Copied to the device."""
    bytes_out: int
    gbps_in: float | None
    """10^9 bytes per second while copies were under way; None: there were none."""
    gbps_out: float | None

    def _copies(self) -> Iterable[tuple[str, str]]:
        ways = ("device", self.bytes_in, self.gbps_in), ("host", self.bytes_out, self.gbps_out)
        for to, count, gbps in ways:
            yield f"to {to}", text_of(count) + ("" if gbps is None else f" at {gbps:.1f} GB/s")


@dataclass(frozen=True)
class SwapReport(_TransferReport):
    """Where a Swapper's units are, and what has been copied since it was made."""

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

    def _rows(self) -> Iterable[tuple[str, str]]:
        budget = "" if self.budget_bytes is None else f" of {text_of(self.budget_bytes)}"
        yield "units", f"{len(self.resident)} of {self.units} there, {len(self.in_use)} in use"
        yield "device", f"{text_of(self.resident_bytes)}{budget}, {text_of(self.new_bytes)} new"
        yield "host", text_of(self.host_bytes)
        yield "uses", f"{self.hits} found their unit there, {self.misses} did not"
        yield "waited", f"{self.seconds_waited:.3f} s"
        yield from self._copies()
        yield from (("held by", each) for each in self.held_by)


@dataclass(frozen=True)
class StateReport(_TransferReport):
    """Where a StateSwapper's state is, and what has been copied since it was made."""

    pieces: int
    """In which it is brought."""
    device_bytes: int
    """Of the device that state takes now."""
    budget_bytes: int

    def _rows(self) -> Iterable[tuple[str, str]]:
        yield "host", f"{text_of(self.host_bytes)} in {self.pieces} pieces"
        yield "device", f"{text_of(self.device_bytes)} of {text_of(self.budget_bytes)}"
        yield from self._copies()


@dataclass(frozen=True)
class SleepReport(_Report):
    """What a call of a TrainingState has moved, and what is where."""

    asleep: dict[StatePart, int]
    """Bytes that sleep, by part."""
    bytes_copied: int
    """By this call."""
    seconds: float
    """That it took."""
    device_bytes: int
    """By how much the device's free memory has grown, as the driver counts it; below 0: shrunk."""
    host_bytes: int
    """Of host memory, which is kept for the next time and is pinned if the device is a GPU."""
    reserved_bytes: int
    """Of the device, which torch's allocator has by now: of tensors that are awake, and of memory
    pools, as CUDA graphs have them."""
    left: tuple[str, ...]
    """Tensors of the parts that stay on the device: their memory is shared with what stays, or is
    not of torch's allocator."""

    def _rows(self) -> Iterable[tuple[str, str]]:
        asleep = ", ".join(f"{part} {text_of(count)}" for part, count in self.asleep.items())
        speed = self.bytes_copied / self.seconds / 1e9 if self.seconds else 0.0
        yield "asleep", asleep or "nothing"
        yield "copied", f"{text_of(self.bytes_copied)} in {self.seconds:.3f} s, {speed:.1f} GB/s"
        way = "taken" if self.device_bytes < 0 else "freed"
        yield "device", f"{text_of(abs(self.device_bytes))} {way}"
        yield "host", text_of(self.host_bytes)
        yield "reserved", text_of(self.reserved_bytes)
        yield from (("left", each) for each in self.left)
