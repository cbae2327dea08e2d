"""HostNumbers: a few numbers on their way from a GPU to the host."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

__all__ = ["HostNumbers"]

# Pinned memory and events of numbers that were read, by device and length: making new ones takes
# longer than the copy.
_unused: defaultdict[tuple[torch.device, int], list[tuple[Tensor, torch.cuda.Event]]]
_unused = defaultdict(list)


class HostNumbers:
    """Numbers of a tensor, as they are when the current stream has done what it has by now.

    Args:
        numbers: `[n]`, on either device.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._on_host, self._event = numbers, None
        if numbers.is_cpu:
            return
        self._key = (numbers.device, numbers.shape[0])
        try:
            self._on_host, self._event = _unused[self._key].pop()
        except IndexError:
            with torch.inference_mode(False):  # or it could be used there only
                self._on_host = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._on_host.copy_(numbers, non_blocking=True)
        self._event.record(torch.cuda.current_stream(numbers.device))

    def read(self) -> list[int]:
        """Waits for the numbers; once only."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._on_host.tolist()
        event, self._event = self._event, None
        if event is not None:
            _unused[self._key].append((self._on_host, event))
        return numbers
