"""HostCopy: an asynchronous copy of a few numbers to the CPU; only a read waits for the copy."""

from __future__ import annotations

import time

from torch import Tensor

from speedtorch._C import NumbersHandle
from speedtorch.ops.functions import numbers_to_host

__all__ = ["HostCopy"]

_SOON = 1e-3  # seconds


class HostCopy:
    """A copy of int64 `numbers` `[n]` to the CPU, queued on the current stream of their device.

    With a `handle` an op has already queued the copy of numbers on a GPU.
    """

    def __init__(self, numbers: Tensor, handle: NumbersHandle | None = None) -> None:
        self._numbers: Tensor | NumbersHandle = numbers
        if numbers.is_cpu:
            return
        self._numbers = handle or NumbersHandle()  # set first, because Ctrl-C may follow the copy
        if handle is None:
            numbers_to_host(numbers, self._numbers.number())

    def is_complete(self, seconds: float) -> bool:
        """Waits for the copy for at most `seconds` and returns whether the copy is complete."""
        if isinstance(self._numbers, Tensor):
            return True
        begin = time.monotonic()
        while not self._numbers.is_complete():
            if (waited := time.monotonic() - begin) > seconds:
                return False
            if waited > _SOON:
                time.sleep(_SOON)
        return True

    def read(self) -> list[int]:
        """Waits for the copy and returns the numbers."""
        numbers = self._numbers
        return numbers.tolist() if isinstance(numbers, Tensor) else numbers.read()
