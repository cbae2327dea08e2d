"""Work on a GPU beside that of the current stream; on the CPU it is done at once."""

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
    """Where the work ends that the current stream has by now; None: it is done."""
    return current_stream(device).record_event() if device.type == "cuda" else None


@cache
def _stream(device: int, purpose: str, beside: int | None) -> torch.cuda.Stream:
    # Not one of torch's pool: torch gives these to callers too, and caches memory for each stream.
    made = _ops.make_stream(device)
    return torch.cuda.ExternalStream(made, device)  # type: ignore[no-untyped-call]


class _Turn:
    """A side stream's turn to be the current one.

    No generator, and not torch.cuda.stream(), which asks for the device three times: either takes
    longer than a launch.
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
            # What the current stream has queued may write what this reads, or read its memory.
            stream.wait_stream(self._current)
        for end in self._ends or ():
            if end is not None:
                stream.wait_event(end)
        try:
            torch.cuda.set_stream(stream)
            return stream
        except BaseException:  # as Ctrl-C right after it, for which __exit__ is not called
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

    Each stream of the caller has side streams of its own. Memory that is allocated on a side stream
    is used there and on the caller's stream only, and each turn waits for that stream: torch may
    allocate the memory again as soon as it is freed. Work of two callers' streams never meets.
    `is_timed` says whether `end` records the time.
    """

    def __init__(self, purpose: str, *, is_timed: bool = False) -> None:
        self._purpose, self._is_timed = purpose, is_timed
        self._last: torch.cuda.Stream | None = None  # the stream of the last work
        self.end: torch.cuda.Event | None = None

    def after_current(
        self, device: torch.device
    ) -> AbstractContextManager[torch.cuda.Stream | None]:
        """What is queued within begins when the current stream has done what it has by now."""
        return nullcontext() if device.type != "cuda" else _Turn(self, device, None)

    def after(
        self, device: torch.device, *ends: torch.cuda.Event | None
    ) -> AbstractContextManager[torch.cuda.Stream | None]:
        """What is queued within begins after these events, whatever the current stream does."""
        return nullcontext() if device.type != "cuda" else _Turn(self, device, ends)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The side stream of the current stream."""
        current = current_stream(device)
        return _stream(current.device_index, self._purpose, current.stream_id)

    def continue_on(self, stream: torch.cuda.Stream) -> None:
        """Orders work on a stream behind the last work, where that is on another one."""
        if self.end is not None and self._last is not stream:
            # The caller has changed its stream: the same rows may still be moving.
            stream.wait_event(self.end)

    def note_end(self, stream: torch.cuda.Stream) -> None:
        """The last work is what a stream has by now."""
        end = torch.cuda.Event(enable_timing=self._is_timed)  # type: ignore[no-untyped-call]
        end.record(stream)
        self.end, self._last = end, stream

    def uses(self, tensors: Sequence[Tensor]) -> None:
        """Memory of the current stream that the side stream reads is freed behind that."""
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self.stream(tensor.device))

    @property
    def is_done(self) -> bool:
        """Whether its last work is done."""
        return self.end is None or bool(self.end.query())  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Waits for its last work."""
        if self.end is not None:
            self.end.synchronize()
            self.end = None

    def forget(self) -> None:
        """Says that nothing is to wait for its last work."""
        self.end = None

    def join(self) -> None:
        """What the current stream gets from now on begins when the side stream is done."""
        if self.end is not None:
            # What the side stream writes is read next, and its memory may be freed from now on.
            current_stream(self.end.device).wait_event(self.end)
            self.end = None


class SharedSideStream(SideStream):
    """As SideStream, but one for all streams of the caller, which orders the memory by events."""

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream of its purpose."""
        return _stream(current_stream(device).device_index, self._purpose, None)


class MemoryStream:
    """The stream on which an object was used last; a change of the current stream is ordered.

    An object calls follow() before each use. If the caller's stream has changed, the new stream
    waits for the last one, whose kernels may still write the object's memory. Torch gives freed
    memory to the next allocation on its own stream at once; so the new stream is recorded, too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._stream: torch.cuda.Stream | None = None
        self.has_changed = False  # whether there has been more than one stream

    def follow(self, held: Callable[[], Iterable[Tensor]]) -> None:
        """Orders the current stream behind the last, and records it for all that is held."""
        if self._device is None:
            return
        stream = current_stream(self._device)
        if stream is self._stream:
            return
        if self._stream is not None:
            self.has_changed = True
            if not torch.cuda.is_current_stream_capturing():  # a capture begins with a wait for all
                stream.wait_stream(self._stream)
            self.record(held())
        self._stream = stream

    def record(self, tensors: Iterable[Tensor]) -> None:
        """Memory of these tensors is freed behind the current stream."""
        assert self._device is not None
        stream = current_stream(self._device)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)
