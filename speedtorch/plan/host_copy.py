"""HostCopy: an asynchronous copy of a few numbers to the CPU; only a read waits for the copy."""

from __future__ import annotations

import itertools
import time

from torch import Tensor

from speedtorch.ops.functions import drop_numbers, numbers_have_come, numbers_to_host, read_numbers

__all__ = ["HostCopy"]

_SOON = 1e-3  # seconds

_handles = itertools.count()


class HostCopy:
    """A copy of int64 `numbers` `[n]` to the CPU, queued on the current stream of their device."""

    _handle: int | None = None
    """Identifies the copy from a GPU."""
    _read: list[int] | None = None

    def __init__(self, numbers: Tensor) -> None:
        if numbers.is_cpu:
            self._numbers = numbers
        else:
            self._handle = next(_handles)  # set first, because Ctrl-C may follow the copy
            numbers_to_host(numbers, self._handle)

    def __del__(self) -> None:
        if self._handle is not None:
            drop_numbers(self._handle)

    def is_complete(self, seconds: float) -> bool:
        """Waits for the copy for at most `seconds` and returns whether the copy is complete."""
        begin = time.monotonic()
        while self._handle is not None and not numbers_have_come(self._handle):
            if (waited := time.monotonic() - begin) > seconds:
                return False
            if waited > _SOON:
                time.sleep(_SOON)
        return True

    def read(self) -> list[int]:
        """Waits for the copy and returns the numbers."""
        if self._handle is None:
            return self._numbers.tolist()
        if self._read is None:
            self._read = read_numbers(self._handle)
        return self._read
