"""GPU address ranges that remain reserved while their physical memory is unmapped and remapped."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from speedtorch import _C
from speedtorch.ops.functions import _ops
from speedtorch.torch_internals import outside_modes

__all__ = ["AddressRange"]


@cache
def _allocator() -> Any:
    """Torch's allocator for the range that a thread has opened; lives as long as the process."""
    names = "speedtorch_range_allocate", "speedtorch_range_free"
    made: Any = torch.cuda.memory.CUDAPluggableAllocator(_C.__file__, *names)
    return made.allocator()


def _release(base: int) -> None:
    with outside_modes():
        _ops.leave_range(base)


class AddressRange:
    """A reserved range of GPU addresses, rounded up to 2 MiB, at first without physical memory.

    The addresses are freed after the object and all tensors in the range are freed. Raises
    RuntimeError if CUDA fails or torch's current allocator has no pools.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._device = device
        self.base = int(_ops.reserve_range(nbytes, device.index))  # the first address
        self.end = self.base + nbytes
        self.is_mapped = False  # whether physical memory is mapped
        weakref.finalize(self, _release, self.base).atexit = False

    @property
    def nbytes(self) -> int:
        """Bytes of the range that torch's allocator has allocated as segments."""
        return int(_ops.range_bytes(self.base))

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Context manager in which torch allocates this thread's GPU tensors in the range.

        Their memory is not mapped, so nothing may read or write these tensors before map().
        """
        with torch.cuda.device(self._device):  # a pool belongs to the current GPU
            pool = torch.cuda.MemPool(_allocator())
        _ops.open_range(self.base)
        try:
            with torch.cuda.use_mem_pool(pool, self._device):
                yield
        finally:
            _ops.open_range(0)

    def map(self) -> None:
        """Maps physical memory, with undefined values, behind all allocations in the range.

        If the GPU has too little memory, frees torch's cached memory and tries again. If that
        fails, raises torch.OutOfMemoryError and maps nothing.
        """
        try:
            _ops.map_range(self.base)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            _ops.map_range(self.base)
        self.is_mapped = True

    def unmap(self) -> None:
        """Unmaps the physical memory. The caller must first wait for all work that uses it."""
        self.is_mapped = False  # also after an error, because the contents are no longer valid
        _ops.unmap_range(self.base)
