"""Work on a GPU beside that of the current stream; on the CPU it is done at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache

import torch
from torch import Tensor

__all__ = ["SideStream"]


@cache
def _stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    # One for all who have the same purpose: torch caches memory for each stream by itself.
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class SideStream:
    """A stream beside the current one, one for each purpose, and where its last work ends."""

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose
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

    @contextmanager
    def _after(
        self, device: torch.device, ends: Sequence[torch.cuda.Event | None] | None
    ) -> Iterator[torch.cuda.Stream | None]:
        if device.type != "cuda":
            yield None
            return
        stream = _stream(device, self._purpose)
        current, current_device = torch.cuda.current_stream(device), torch.cuda.current_device()
        if ends is None:
            stream.wait_stream(current)
        for end in ends or ():
            if end is not None:
                stream.wait_event(end)
        # torch.cuda.stream() asks for the device three times, which takes longer than a launch.
        try:
            torch.cuda.set_stream(stream)
            yield stream
        finally:
            self.end = stream.record_event()
            torch.cuda.set_stream(current)
            if current_device != device.index:
                torch.cuda.set_device(current_device)

    def uses(self, tensors: Sequence[Tensor]) -> None:
        """Memory of the current stream that the side stream reads is not given away meanwhile."""
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(_stream(tensor.device, self._purpose))

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
            torch.cuda.current_stream(self.end.device).wait_event(self.end)
            self.end = None
