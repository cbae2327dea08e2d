"""Work on a GPU beside that of the current stream; on the CPU it is done at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

from speedtorch.torch_internals import current_stream

__all__ = ["SideStream", "end_of_current"]


def end_of_current(device: torch.device) -> torch.cuda.Event | None:
    """Where the work ends that the current stream has by now; None: it is done."""
    return current_stream(device).record_event() if device.type == "cuda" else None


@cache
def _stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    # One for all who have the same purpose: torch caches memory for each stream by itself.
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Turn:
    """A side stream's turn to be the current one.

    No generator, and not torch.cuda.stream(), which asks for the device three times: either takes
    longer than a launch.
    """

    __slots__ = ("_current", "_current_device", "_device", "_ends", "_side")

    def __init__(
        self,
        side: SideStream,
        device: torch.device,
        ends: Sequence[torch.cuda.Event | None] | None,
    ) -> None:
        self._side, self._device, self._ends = side, device, ends

    def __enter__(self) -> torch.cuda.Stream:
        stream = self._side.stream(self._device)
        self._current_device = torch.cuda.current_device()
        self._current = current_stream(self._device)
        if self._ends is None:
            stream.wait_stream(self._current)
        for end in self._ends or ():
            if end is not None:
                stream.wait_event(end)
        try:
            torch.cuda.set_stream(stream)
            return stream
        except BaseException:  # as Ctrl-C right after it, for which nobody calls __exit__
            self._go_back()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._side.note_end(self._device)
        finally:
            self._go_back()

    def _go_back(self) -> None:
        torch.cuda.set_stream(self._current)
        if self._current_device != self._device.index:
            torch.cuda.set_device(self._current_device)


class SideStream:
    """A stream beside the current one, one for each purpose, and where its last work ends.

    Args:
        purpose: its name.
        is_timed: whether somebody wants to know when that was.
    """

    def __init__(self, purpose: str, *, is_timed: bool = False) -> None:
        self._purpose, self._is_timed = purpose, is_timed
        self.end: torch.cuda.Event | None = None

    def after_current(
        self, device: torch.device
    ) -> AbstractContextManager[torch.cuda.Stream | None]:
        """What is queued within begins when the current stream has done what it has by now."""
        return self._after(device, None)

    def after(
        self, device: torch.device, *ends: torch.cuda.Event | None
    ) -> AbstractContextManager[torch.cuda.Stream | None]:
        """What is queued within begins after these events, whatever the current stream does."""
        return self._after(device, ends)

    def _after(
        self, device: torch.device, ends: Sequence[torch.cuda.Event | None] | None
    ) -> AbstractContextManager[torch.cuda.Stream | None]:
        return nullcontext() if device.type != "cuda" else _Turn(self, device, ends)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """That of its purpose."""
        return _stream(device, self._purpose)

    def note_end(self, device: torch.device) -> None:
        """Its last work is what it has by now."""
        end = torch.cuda.Event(enable_timing=self._is_timed)  # type: ignore[no-untyped-call]
        end.record(self.stream(device))
        self.end = end

    def uses(self, tensors: Sequence[Tensor]) -> None:
        """Memory of the current stream that the side stream reads is not given away meanwhile."""
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

    def join(self) -> None:
        """What the current stream gets from now on begins when the side stream is done."""
        if self.end is not None:
            current_stream(self.end.device).wait_event(self.end)
            self.end = None
