"""The host memory of a slab, and how its bytes reach a device: at once, or in small steps.

Where CUDA does not pin so much, bytes go through two small pinned buffers, one of which the CPU
fills or empties while the other travels; and without these as torch copies pageable memory.
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

STAGE_BYTES = 32 << 20  # of each buffer: 0.6 ms of the link


def host_bytes(count: int, device: torch.device) -> Tensor:
    """Bytes `[count]` that a device reaches at the link's speed; warns once if CUDA pins no more.

    Raises MemoryError if the host has too little.
    """
    if device.type == "cuda":
        try:
            return host_memory.empty(count, dtype=torch.uint8, memory="registered")
        except RuntimeError as error:
            _warn_once(str(error))
    return host_memory.empty(count, dtype=torch.uint8, memory="plain")


def aligned(count: int, to: int) -> int:
    """The least multiple that is as much."""
    return -(-count // to) * to


def elements(
    storage: torch.UntypedStorage,
    begin: int,
    size: Sequence[int],
    stride: Sequence[int] = (1,),
    dtype: torch.dtype = torch.uint8,
) -> Tensor:
    """Elements of a storage, from a byte on."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, begin // dtype.itemsize, size, stride)


def is_pinned(host: Tensor) -> bool:
    """Whether a device reaches host memory by itself."""
    return host_memory.memory_kind(host) != "plain"


@cache
def _warn_once(why: str) -> None:
    warnings.warn(
        f"units are in host memory that is not pinned, and come and go more slowly: {why}",
        stacklevel=2,
    )


def copy_spans(
    host: Tensor, other: Tensor, spans: Sequence[tuple[int, int]], *, to: Memory
) -> None:
    """Copies ranges of bytes between tensors `[bytes]` of uint8 on the current stream.

    The host does not wait if `host` is pinned.
    """
    is_direct = other.is_cpu or is_pinned(host)
    stage = None if is_direct else _stage(other.device)
    if is_direct and (seams := host_memory.registration_seams(host)):
        # CUDA refuses a copy across the seam of two registrations.
        cuts = [[begin, *(e for e in seams if begin < e < end), end] for begin, end in spans]
        spans = [part for each in cuts for part in pairwise(each)]
    for begin, end in spans:
        of_host, of_other = host, other
        if end - begin < host.numel():
            of_host, of_other = host[begin:end], other[begin:end]
        if stage is not None:
            (stage.fill if to is Memory.DEVICE else stage.drain)(of_host, of_other)
        elif to is Memory.DEVICE:
            of_other.copy_(of_host, non_blocking=True)
        else:
            of_host.copy_(of_other, non_blocking=is_direct)


class Stage:
    """Two small pinned buffers between host memory that is not pinned and a device."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.buffers = [host_bytes(nbytes, device) for _ in range(2)]
        self._ends: list[torch.cuda.Event | None] = [None, None]
        self._device, self._size = device, nbytes

    def fill(self, host: Tensor, other: Tensor) -> None:
        """Copies bytes to the device, in the order of the current stream."""
        for at, part, to in self._parts(host, other):
            buffer = self._free(at)[: len(part)]
            buffer.copy_(part)
            to.copy_(buffer, non_blocking=True)
            self._mark(at)

    def drain(self, host: Tensor, other: Tensor) -> None:
        """Copies bytes to the host, and waits until they are there."""
        parts = list(self._parts(host, other))
        # Each part leaves its buffer while the next one travels.
        for late, part in zip([None, *parts], [*parts, None], strict=True):
            if part is not None:
                at, to, source = part
                self._free(at)[: len(source)].copy_(source, non_blocking=True)
                self._mark(at)
            if late is not None:
                at, to, _ = late
                to.copy_(self._free(at)[: len(to)])

    def _parts(self, host: Tensor, other: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Pieces as large as a buffer, each with the number of its own."""
        for number, at in enumerate(range(0, len(host), self._size)):
            yield number % 2, host[at : at + self._size], other[at : at + self._size]

    def _free(self, at: int) -> Tensor:
        """A buffer, once nothing is under way from it or to it."""
        if (end := self._ends[at]) is not None:
            end.synchronize()
            self._ends[at] = None
        return self.buffers[at]

    def _mark(self, at: int) -> None:
        self._ends[at] = end_of_current(self._device)


@cache
def _stage(device: torch.device) -> Stage | None:
    stage = Stage(device, STAGE_BYTES)
    return stage if all(map(is_pinned, stage.buffers)) else None
