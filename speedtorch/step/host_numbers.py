"""HostNumbers: a few numbers on their way from a GPU to the host."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

__all__ = ["HostNumbers"]

_Landing = tuple[Tensor, torch.cuda.Event]

# Pinned memory and events of numbers that were read, by device and length: making new ones takes
# longer than the copy.
_unused: defaultdict[tuple[torch.device, int], list[_Landing]] = defaultdict(list)


class HostNumbers:
    """Numbers of a tensor, as they are when the current stream has done what it has by now.

    Args:
        numbers: `[n]`, on either device.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._read: list[int] | None = None
        self._landing: _Landing | None = None
        if numbers.is_cpu:
            self._read = numbers.tolist()
            return
        self._key = (numbers.device, numbers.shape[0])
        try:
            self._landing = _unused[self._key].pop()
        except IndexError:
            with torch.inference_mode(False):  # or it could be used there only
                memory = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._landing = (memory, torch.cuda.Event())  # type: ignore[no-untyped-call]
        memory, event = self._landing
        memory.copy_(numbers, non_blocking=True)
        event.record(torch.cuda.current_stream(numbers.device))

    def read(self) -> list[int]:
        """Waits for the numbers."""
        if self._read is None:
            assert self._landing is not None
            memory, event = self._landing
            event.synchronize()
            self._read = memory.tolist()
        # Only what has been read is given to others.
        landing, self._landing = self._landing, None
        if landing is not None:
            _unused[self._key].append(landing)
        return self._read
