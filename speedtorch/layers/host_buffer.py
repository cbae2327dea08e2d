"""Allocation of a flat buffer's host memory, and copies between this memory and a device.

If CUDA cannot pin the host memory, copies go through two small pinned buffers. The CPU fills or
empties one buffer while the other is copied. If CUDA cannot pin these buffers either, torch copies
the pageable memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from speedtorch.layers.transfer_stats import Memory
from speedtorch.memory import host_memory
from speedtorch.memory.side_stream import end_of_current

__all__ = ["aligned", "copy_spans", "elements", "host_bytes", "is_pinned"]

STAGE_BYTES = 32 << 20  # size of each buffer: a copy takes 0.6 ms


def host_bytes(count: int, device: torch.device) -> Tensor:
    """Allocates bytes `[count]`, pinned for a GPU; warns once per reason if CUDA cannot pin them.

    Raises MemoryError if the host has too little memory.
    """
    if device.type == "cuda":
        try:
            return host_memory.empty(count, dtype=torch.uint8, memory="registered")
        except RuntimeError as error:
            _warn_once(str(error))
    return host_memory.empty(count, dtype=torch.uint8, memory="plain")


def aligned(count: int, to: int) -> int:
    """Rounds `count` up to a multiple of `to`."""
    return -(-count // to) * to


def elements(
    storage: torch.UntypedStorage,
    begin: int,
    size: Sequence[int],
    stride: Sequence[int] = (1,),
    dtype: torch.dtype = torch.uint8,
) -> Tensor:
    """A tensor over a storage that begins at byte `begin`."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, begin // dtype.itemsize, size, stride)


def is_pinned(host: Tensor) -> bool:
    """Whether a device can access host memory directly."""
    return host_memory.memory_kind(host) != "plain"


@cache
def _warn_once(why: str) -> None:
    warnings.warn(
        f"Offloaded tensors are in pageable host memory, whose copies are slower: {why}",
        stacklevel=2,
    )


def copy_spans(
    host: Tensor, on_device: Tensor, spans: Sequence[tuple[int, int]], *, to: Memory
) -> None:
    """Copies byte ranges between uint8 tensors `[bytes]` on the current stream.

    `to` is the memory that is written. If `host` is pinned, the call does not wait for the GPU.
    """
    is_direct = on_device.is_cpu or is_pinned(host)
    stage = None if is_direct else _stage(on_device.device)
    if is_direct and (boundaries := host_memory.registration_boundaries(host)):
        # A CUDA copy across the boundary of two registrations fails.
        cuts = [[begin, *(e for e in boundaries if begin < e < end), end] for begin, end in spans]
        spans = [part for cut in cuts for part in pairwise(cut)]
    for begin, end in spans:
        host_span, device_span = host, on_device
        if end - begin < host.numel():
            host_span, device_span = host[begin:end], on_device[begin:end]
        if stage is not None:
            (stage.fill if to is Memory.DEVICE else stage.drain)(host_span, device_span)
        elif to is Memory.DEVICE:
            device_span.copy_(host_span, non_blocking=True)
        else:
            host_span.copy_(device_span, non_blocking=is_direct)


class Stage:
    """Two small pinned buffers for copies between pageable host memory and a device."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.buffers = [host_bytes(nbytes, device) for _ in range(2)]
        self._ends: list[torch.cuda.Event | None] = [None, None]
        self._device, self._size = device, nbytes

    def fill(self, host: Tensor, on_device: Tensor) -> None:
        """Copies bytes to the device on the current stream."""
        for index, part, to in self._parts(host, on_device):
            buffer = self._free(index)[: len(part)]
            buffer.copy_(part)
            to.copy_(buffer, non_blocking=True)
            self._mark(index)

    def drain(self, host: Tensor, on_device: Tensor) -> None:
        """Copies bytes to the host, and waits for the copy."""
        parts = list(self._parts(host, on_device))
        # The CPU empties one buffer while the next part is copied to the other buffer.
        for late, part in zip([None, *parts], [*parts, None], strict=True):
            if part is not None:
                index, to, source = part
                self._free(index)[: len(source)].copy_(source, non_blocking=True)
                self._mark(index)
            if late is not None:
                index, to, _ = late
                to.copy_(self._free(index)[: len(to)])

    def _parts(self, host: Tensor, on_device: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields parts of a buffer's size: the buffer's index, the host part, the device part."""
        for number, begin in enumerate(range(0, len(host), self._size)):
            end = begin + self._size
            yield number % 2, host[begin:end], on_device[begin:end]

    def _free(self, index: int) -> Tensor:
        """Returns a buffer after its last copy has finished."""
        if (end := self._ends[index]) is not None:
            end.synchronize()
            self._ends[index] = None
        return self.buffers[index]

    def _mark(self, index: int) -> None:
        self._ends[index] = end_of_current(self._device)


@cache
def _stage(device: torch.device) -> Stage | None:
    stage = Stage(device, STAGE_BYTES)
    return stage if all(map(is_pinned, stage.buffers)) else None
