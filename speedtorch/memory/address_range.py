"""Ranges of a GPU's addresses that stay while the memory behind them comes and goes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from speedtorch import _C
from speedtorch.ops.functions import _ops

__all__ = ["AddressRange"]


@cache
def _allocator() -> Any:
    """Torch's way to the range that a thread has opened; it must live as long as the process."""
    names = "speedtorch_range_allocate", "speedtorch_range_free"
    made: Any = torch.cuda.memory.CUDAPluggableAllocator(_C.__file__, *names)
    return made.allocator()


class AddressRange:
    """Addresses of a GPU, rounded up to 2 MiB, which begin without memory behind them.

    The addresses are freed once the object and all tensors there are freed. RuntimeError if CUDA
    refuses, or torch's allocator is one that has no pools.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._device = device
        self.base = int(_ops.reserve_range(nbytes, device.index))  # the first address
        self.end = self.base + nbytes
        self.is_mapped = False  # whether there is memory behind them
        weakref.finalize(self, _ops.leave_range, self.base).atexit = False

    @property
    def nbytes(self) -> int:
        """Bytes that torch's allocator has of it."""
        return int(_ops.range_bytes(self.base))

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Within it what torch allocates for this thread has addresses of the range.

        There is no memory yet: nothing may be written or read.
        """
        with torch.cuda.device(self._device):  # a pool is one of the current GPU
            pool = torch.cuda.MemPool(_allocator())
        _ops.open_range(self.base)
        try:
            with torch.cuda.use_mem_pool(pool, self._device):
                yield
        finally:
            _ops.open_range(0)

    def map(self) -> None:
        """Puts memory, with undefined values, behind all that torch has of it.

        If the GPU has too little, torch.OutOfMemoryError is raised and nothing has changed.
        """
        try:
            _ops.map_range(self.base)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            _ops.map_range(self.base)
        self.is_mapped = True

    def unmap(self) -> None:
        """Takes the memory away; the caller has waited for all that uses it."""
        self.is_mapped = False  # after an error, too: what is there counts no more
        _ops.unmap_range(self.base)
