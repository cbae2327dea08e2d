"""Side streams of a GPU, whose work overlaps with the current stream.

For a CPU device no stream exists: the context managers do nothing, and the work runs at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

from speedtorch.ops.functions import _ops
from speedtorch.torch_internals import current_stream

__all__ = ["MemoryStream", "SharedSideStream", "SideStream", "end_of_current"]


def end_of_current(device: torch.device) -> torch.cuda.Event | None:
    """Records an event at the current end of the current stream; None on the CPU."""
    return current_stream(device).record_event() if device.type == "cuda" else None


@cache
def _stream(device: int, purpose: str, beside: int | None) -> torch.cuda.Stream:
    # Torch would return the same stream of its pool to callers too. Their work would then delay
    # this work, and both would share the freed memory that torch caches for a stream.
    made = _ops.make_stream(device)
    return torch.cuda.ExternalStream(made, device)  # type: ignore[no-untyped-call]


class _StreamContext:
    """A context manager that makes a side stream the current stream.

    A generator or torch.cuda.stream(), which queries the device three times, would take longer than
    a kernel launch.
    """

    __slots__ = ("_current", "_current_device", "_device", "_ends", "_side", "_stream")

    def __init__(
        self,
        side: SideStream,
        device: torch.device,
        ends: Sequence[torch.cuda.Event | None] | None,
    ) -> None:
        self._side, self._device, self._ends = side, device, ends

    def __enter__(self) -> torch.cuda.Stream:
        stream = self._stream = self._side.stream(self._device)
        self._current_device = torch.cuda.current_device()
        self._current = current_stream(self._device)
        self._side.continue_on(stream)
        if self._ends is None:
            # Work that is queued there may write tensors that the side stream reads, or may still
            # read memory that the side stream reuses.
            stream.wait_stream(self._current)
        for end in self._ends or ():
            if end is not None:
                stream.wait_event(end)
        try:
            torch.cuda.set_stream(stream)
            return stream
        except BaseException:  # such as Ctrl-C after the call, when __exit__ does not run
            self._go_back()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._side.note_end(self._stream)
        finally:
            self._go_back()

    def _go_back(self) -> None:
        torch.cuda.set_stream(self._current)
        if self._current_device != self._device.index:
            torch.cuda.set_device(self._current_device)


class SideStream:
    """A stream beside the current one, for one purpose, and the end of its last work.

    Each stream of the caller has its own side stream. Memory that is allocated on a side stream
    must be used only on the side stream and on the caller's stream. After such memory was freed,
    torch may reuse it on the side stream although the caller's stream has not finished with it.
    after_current() excludes this, because the side stream waits for the caller's stream. after()
    waits only for the given events, so one of these events must follow the last use of the memory.

    `is_timed` enables timing for the event `end`.
    """

    def __init__(self, purpose: str, *, is_timed: bool = False) -> None:
        self._purpose, self._is_timed = purpose, is_timed
        self._last: torch.cuda.Stream | None = None  # the stream of the last work
        self.end: torch.cuda.Event | None = None

    def after_current(
        self, device: torch.device
    ) -> AbstractContextManager[torch.cuda.Stream | None]:
        """Makes the side stream current for work that follows the current stream's queued work."""
        return nullcontext() if device.type != "cuda" else _StreamContext(self, device, None)

    def after(
        self, device: torch.device, *ends: torch.cuda.Event | None
    ) -> AbstractContextManager[torch.cuda.Stream | None]:
        """Makes the side stream current for work that follows these events and its last work."""
        return nullcontext() if device.type != "cuda" else _StreamContext(self, device, ends)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The side stream of the current stream."""
        current = current_stream(device)
        return _stream(current.device_index, self._purpose, current.stream_id)

    def continue_on(self, stream: torch.cuda.Stream) -> None:
        """Orders `stream` behind the last work if that was queued on a different stream."""
        if self.end is not None and self._last is not stream:  # stream() returns cached objects
            # The caller has changed its stream, and copies of the same rows may still run.
            stream.wait_event(self.end)

    def note_end(self, stream: torch.cuda.Stream) -> None:
        """Records the work that is queued on `stream` so far as the last work."""
        end = torch.cuda.Event(enable_timing=self._is_timed)  # type: ignore[no-untyped-call]
        end.record(stream)
        self.end, self._last = end, stream

    def uses(self, tensors: Sequence[Tensor]) -> None:
        """Defers reuse of the tensors' memory until the side stream has finished reading it."""
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self.stream(tensor.device))

    @property
    def is_done(self) -> bool:
        """Whether the last work is complete."""
        return self.end is None or bool(self.end.query())  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Makes the host wait for the last work."""
        if self.end is not None:
            self.end.synchronize()
            self.end = None

    def forget(self) -> None:
        """Discards the event of the last work, for an event that belongs to a captured graph."""
        self.end = None

    def join(self) -> None:
        """Makes the current stream, but not the host, wait for the side stream's last work.

        A second call without new work does nothing.
        """
        if self.end is not None:
            # The current stream reads the results next, and may free their memory afterwards.
            current_stream(self.end.device).wait_event(self.end)
            self.end = None


class SharedSideStream(SideStream):
    """A SideStream that all streams of the caller share; its users order the memory with events."""

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The side stream of this purpose."""
        return _stream(current_stream(device).device_index, self._purpose, None)


class MemoryStream:
    """The stream that last used an object; orders the work if the current stream changes.

    The object's owner calls follow() before each use. If the caller's stream has changed, the new
    stream waits for the last one, whose kernels may still write the object's memory. The tensors
    also record the new stream. Otherwise torch could reuse their freed memory on the stream that
    allocated it while the new stream still uses it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._stream: torch.cuda.Stream | None = None
        self.has_changed = False  # whether more than one stream has been used

    def follow(self, held: Callable[[], Iterable[Tensor]]) -> None:
        """Orders the current stream behind the last one and records it for the tensors."""
        if self._device is None:
            return
        stream = current_stream(self._device)
        if stream is self._stream:  # current_stream() returns cached objects
            return
        if self._stream is not None:
            self.has_changed = True
            # torch.cuda.graph() has synchronized the device before a capture.
            if not torch.cuda.is_current_stream_capturing():
                stream.wait_stream(self._stream)
            self.record(held())
        self._stream = stream

    def record(self, tensors: Iterable[Tensor]) -> None:
        """Defers reuse of the tensors' memory until the current stream has finished with it."""
        assert self._device is not None
        stream = current_stream(self._device)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)
