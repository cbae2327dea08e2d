"""StorageOffloader: moves the values of storages to host memory and back to the device.

A storage loses its memory and receives memory again, at new or at the same addresses (see
DeviceMemory), but remains the same object. All its views therefore have the same values again: tied
weights, non-contiguous tensors, and flat buffers of DistributedDataParallel and FSDP.

While offloaded, known tensors still report their device, but are in mapped host memory, or have no
elements if their values were discarded. The device's kernels access this memory over the link (PCIe
or NVLink-C2C), so the tensors can be read, saved and loaded. Tensor objects remain the same for
autograd and its hooks.

**Exceptions at any line.** First all bytes are copied, then the tensors are pointed to the copy one
by one, and only then is the device memory freed. Each tensor is complete at any time. An exception
in offload() loads all storages. The next call completes a load that an exception interrupted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from speedtorch.layers.discarded import BLANK
from speedtorch.layers.host_buffer import copy_spans
from speedtorch.layers.offloaded_storage import (
    DeviceMemory,
    OffloadedStorage,
    bytes_at,
    planned_loads,
    point_to_device,
    point_to_host,
)
from speedtorch.layers.transfer_stats import Memory
from speedtorch.memory import host_memory
from speedtorch.memory.host_memory import HostMemoryKind
from speedtorch.memory.side_stream import SharedSideStream
from speedtorch.torch_internals import storage_at, storage_uses

__all__ = ["StorageOffloader", "fingerprint", "times_moved"]

# Bytes of storages that are fingerprinted together. Separate fingerprints of small storages would
# take longer than the copies of these storages.
_GROUP = 1 << 25
# The Weyl constant of splitmix64 as a signed 64-bit number.
_GOLDEN = -0x61C8864680B583EB
# Words that are mixed in one operation.
_CHUNK = 1 << 22

_moved = 0


def times_moved() -> int:
    """Counts moves of storages; code that caches addresses compares it to check their validity."""
    return _moved


def _count_move() -> None:
    global _moved
    _moved += 1


def _groups(storages: Iterable[OffloadedStorage]) -> Iterator[list[OffloadedStorage]]:
    """Groups consecutive storages, up to _GROUP bytes if there are several."""
    group: list[OffloadedStorage] = []
    nbytes = 0
    for storage in storages:
        if group and nbytes + storage.nbytes > _GROUP:
            yield group
            group, nbytes = [], 0
        group.append(storage)
        nbytes += storage.nbytes
    if group:
        yield group


def _sizes(group: Sequence[OffloadedStorage]) -> list[int]:
    return [storage.nbytes for storage in group]


class StorageOffloader:
    """The storages of one part of a training state on one device.

    Host memory is allocated once and reused. With device "cpu", a second host memory is the device.
    """

    def __init__(self, device: torch.device, *, keep_addresses: bool) -> None:
        self._device = device
        self.memory = DeviceMemory(device, keep_addresses=keep_addresses)
        self._host = self._host_bytes(0)
        self._copies = SharedSideStream("training state")
        self._storages: list[OffloadedStorage] = []
        """Offloaded storages, and partly offloaded ones after an exception."""
        self._filling: list[OffloadedStorage] = []
        """Storages that have device memory again, but not yet their values."""
        self._host_copies: dict[int, tuple[list[int], Tensor]] = {}
        """By host offset, the byte counts of a group of storages, and their fingerprint."""
        self._host_views: dict[int, tuple[tuple[object, ...], Sequence[Tensor]]] = {}
        """By host offset, the layout of tensors, and their aliases in host memory."""

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory, in use or kept for reuse."""
        return self._host.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of offloaded storages."""
        return sum(storage.nbytes for storage in self._storages)

    @property
    def is_offloaded(self) -> bool:
        """Whether any storage must be loaded."""
        return bool(self._storages)

    @property
    def tensors(self) -> list[Tensor]:
        """The offloaded tensors."""
        return [tensor for storage in self._storages for _, tensor in storage.live_members()]

    @property
    def is_interrupted(self) -> bool:
        """Whether an exception has left some storages on the device."""
        return any(map(self.memory.has_memory, self._storages))

    def offload(self, storages: Sequence[OffloadedStorage]) -> int:
        """Copies storages to host memory and frees their memory; returns the copied bytes.

        No storage of this part may be offloaded already. Raises MemoryError if the host has too
        little memory, and RuntimeError if CUDA cannot pin more. All storages are then on the
        device.
        """
        # Frozen storages are sorted to the front and form contiguous groups for fingerprints.
        storages = sorted(storages, key=lambda s: (not s.is_frozen, self.memory.sort_key(s)))
        end = 0
        for storage in storages:
            end = storage.set_offset(end)
        if end > self._host.nbytes:
            self.release()
            self._host = self._host_bytes(end)
        kept = [storage for storage in storages if storage.is_kept]
        # Dropped before the bytes are overwritten, in case of an exception; load() makes others.
        copies, self._host_copies = self._host_copies, {}
        compared = [
            (group, copy[1])
            for group in _groups(storage for storage in kept if storage.is_frozen)
            if (copy := copies.get(group[0].begin)) is not None and copy[0] == _sizes(group)
        ]
        known = {id(storage) for group, _ in compared for storage in group}
        written = [storage for storage in kept if id(storage) not in known]
        # These copies overlap the fingerprints of the rest.
        self._copy(written, Memory.HOST)
        changed = self._changed(compared)
        self._copy(changed, Memory.HOST)
        self._host_views = {storage.begin: self._views_of(storage) for storage in kept}
        views = [
            self._host_views[storage.begin][1] if storage.is_kept else storage.host_views(None)
            for storage in storages
        ]
        self._wait()
        self._storages = storages
        _count_move()
        try:
            point_to_host(storages, views)
            self.memory.free(storages)
        except BaseException:
            self.load()
            raise
        return sum(storage.nbytes for storage in (*written, *changed))

    def load(self) -> int:
        """Allocates and fills storages that are still needed; returns the copied bytes.

        All remain offloaded if the device has too little memory (torch.OutOfMemoryError).
        """
        has_memory, unfilled = self.memory.has_memory, {id(storage) for storage in self._filling}
        empty = [
            storage
            for storage in self._storages
            if (id(storage) in unfilled or not has_memory(storage)) and storage.is_needed
        ]
        frozen: list[OffloadedStorage] = []
        try:
            self._filling = empty  # remains set if an exception interrupts the undo below
            for storages in self.memory.allocate(empty):
                kept = [storage for storage in storages if storage.is_kept]
                self._copy(kept, Memory.DEVICE)
                if new := [storage for storage in kept if storage.is_frozen]:
                    self._copies.join()
                    frozen += new
            # Fingerprints overlap the copies of the remaining storages.
            copies = [(group, self._fingerprinted(group)) for group in _groups(frozen)]
            for storage in empty:
                if not storage.is_kept:
                    bytes_at(storage.address, storage.nbytes, self._device).fill_(BLANK)
            tensors = planned_loads(self._storages)
            self._wait()  # otherwise another thread could read memory before its copy ends
        except BaseException:
            self._wait()
            self.memory.free(empty)
            raise
        self._filling = []
        _count_move()
        point_to_device(tensors)
        # The program may write to host memory that it still has, such as a kept state_dict().
        known = [(group, value) for group, value in copies if not any(map(self._is_held, group))]
        self._host_copies = {group[0].begin: (_sizes(group), value) for group, value in known}
        self._storages = []
        return sum(storage.nbytes for storage in empty if storage.is_kept)

    def release_if_used(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Releases the host memory if one of the storages uses it, so it is not overwritten.

        load_state_dict(assign=True) can assign such storages. No storage of this part may be
        offloaded.
        """
        begin, count = self._host.data_ptr(), self._host.nbytes
        if count and any(0 <= storage.data_ptr() - begin < count for storage in storages):
            self.release()

    def release(self) -> None:
        """Releases host memory, which is freed once no tensor uses it."""
        self._host, self._host_copies, self._host_views = self._host_bytes(0), {}, {}

    def _host_bytes(self, count: int) -> Tensor:
        """Host memory `[count]` that device kernels can access."""
        memory: HostMemoryKind = "registered" if self._device.type == "cuda" else "plain"
        return host_memory.empty(count, dtype=torch.uint8, memory=memory)

    def _views_of(self, storage: OffloadedStorage) -> tuple[tuple[object, ...], Sequence[Tensor]]:
        layout, cached = storage.layout(), self._host_views.get(storage.begin)
        if cached is not None and cached[0] == layout:
            return cached
        # A torch storage of the device over the storage's bytes of host memory.
        untyped = storage_at(self._host.data_ptr() + storage.begin, self._device, storage.nbytes)
        vars(untyped)["host"] = self._host  # keeps host memory alive as long as the torch storage
        return layout, storage.host_views(untyped)

    def _is_held(self, storage: OffloadedStorage) -> bool:
        """Whether the program has tensors in the host memory of a storage."""
        _, views = self._host_views[storage.begin]
        return storage_uses(views[0].untyped_storage()) > 1 + len(views)

    def _fingerprinted(self, group: Sequence[OffloadedStorage]) -> Tensor:
        parts = [bytes_at(address, count, self._device) for address, _, count in self._runs(group)]
        return fingerprint(parts[0] if len(parts) == 1 else torch.cat(parts))

    def _changed(
        self, compared: Sequence[tuple[Sequence[OffloadedStorage], Tensor]]
    ) -> list[OffloadedStorage]:
        """The storages of groups whose bytes differ from their host copy, by fingerprint."""
        if not compared:
            return []
        before = torch.stack([value for _, value in compared])
        now = torch.stack([self._fingerprinted(group) for group, _ in compared])
        same = zip(compared, (before == now).tolist(), strict=True)
        return [storage for (group, _), is_same in same if not is_same for storage in group]

    def _copy(self, storages: Sequence[OffloadedStorage], to: Memory) -> None:
        """Starts copies of storages between device and host on a side stream.

        The caller must have waited for all earlier work that reads or writes the storages.
        """
        with self._copies.after(self._device):
            for address, begin, count in self._runs(storages):
                host = self._host[begin : begin + count]
                on_device = bytes_at(address, count, self._device)
                copy_spans(host, on_device, [(0, count)], to=to)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _runs(self, storages: Sequence[OffloadedStorage]) -> Iterator[tuple[int, int, int]]:
        """Yields (device address, host offset, bytes) of runs that one copy can move."""
        on_gpu = self._device.type == "cuda"
        address = begin = count = 0
        end = -1
        for storage in storages:
            is_next = storage.address - address == storage.begin - begin and storage.begin == end
            if not (is_next and self.memory.is_contiguous(storage.address)):
                if count:
                    yield address, begin, count
                address, begin = storage.address, storage.begin
            count = storage.begin + storage.nbytes - begin
            # On a GPU, the gap between two storages belongs to the first storage's allocation.
            end = storage.end if on_gpu else storage.begin + storage.nbytes
        if count:
            yield address, begin, count


def fingerprint(values: Tensor) -> Tensor:
    """A 64-bit hash of bytes; different bytes collide with a probability of about 2^-64.

    The hash is the sum of all words, each mixed with its position like in splitmix64.
    """
    end = len(values) // 8 * 8
    words = values[:end].view(torch.int64)
    parts = [*torch.split(words, _CHUNK)] + ([values[end:].long()] if end < len(values) else [])
    # Not cached, because this tensor is as large as the longest part.
    offsets = torch.arange(max(map(len, parts)), device=values.device) * _GOLDEN
    return torch.stack([_mixed(part, number, offsets) for number, part in enumerate(parts)]).sum()


def _mixed(words: Tensor, number: int, offsets: Tensor) -> Tensor:
    mixed = words + offsets[: len(words)]
    mixed += number * 0x632BE59BD9B4E019
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed ^= mixed >> shift
        mixed *= factor
    mixed ^= mixed >> 31
    return mixed.sum()
