"""Device memory of storages: freed while they are offloaded, allocated when they wake."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from speedtorch.layers.host_buffer import aligned
from speedtorch.layers.offloaded_storage import ALIGNMENT, OffloadedStorage
from speedtorch.memory.address_range import AddressRange
from speedtorch.torch_internals import storage_id, storage_of, storage_reference

__all__ = ["DeviceMemory", "KeptAddresses"]

# Torch's allocator takes allocations up to this size from segments of 2 MiB.
_SMALL = 1 << 20
# The first piece is copied while CUDA allocates memory for the rest.
_PIECE = 1 << 26
# CUDA allocations begin at multiples of this size. One copy must not cross an allocation's end.
_SEGMENT = 2 << 20
# Torch's allocator creates segments of 20 MiB, or of large_segment_size_mb, for a few MiB.
_SPARE_ADDRESSES = 1 << 30


class DeviceMemory:
    """Memory of torch's allocator: a storage is emptied, and later gets other memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Only torch's own allocator is known to place neighbours in one CUDA allocation.
        self._is_known = device.type == "cpu" or torch.cuda.get_allocator_backend() == "native"

    def is_here(self, slot: OffloadedStorage) -> bool:
        """Whether a storage has memory."""
        return slot.storage.nbytes() > 0

    def leave(self, slots: Sequence[OffloadedStorage]) -> None:
        """Frees the memory of storages, whose values are lost; call again after an error."""
        for slot in slots:
            slot.storage.resize_(0)

    def come(self, slots: Sequence[OffloadedStorage]) -> Iterator[Sequence[OffloadedStorage]]:
        """Allocates memory for storages, and yields groups of storages that have memory.

        Raises torch.OutOfMemoryError if the device has too little memory.
        """
        # resize_() would copy bytes left after an error, possibly over bytes loaded from the host.
        self.leave([each for each in slots if self.is_here(each)])
        begin = nbytes = 0
        for number, slot in enumerate(slots, 1):
            nbytes += aligned(slot.nbytes, ALIGNMENT)
            if nbytes >= _PIECE or number == len(slots):
                _fill(slots[begin:number], self._device)
                yield slots[begin:number]
                begin, nbytes = number, 0

    def goes_on(self, address: int) -> bool:
        """Whether one copy may include the bytes before and after an address."""
        return self._is_known and address % _SEGMENT != 0

    def place(self, slot: OffloadedStorage) -> int:
        """The sort key of a storage for a sleep."""
        return 0

    def others(self, slots: Sequence[OffloadedStorage]) -> list[OffloadedStorage]:
        """Other storages that lose their memory together with these."""
        return []

    @property
    def absent_bytes(self) -> int:
        """Bytes that torch's allocator counts but that have no memory."""
        return 0


def _fill(slots: Sequence[OffloadedStorage], device: torch.device) -> None:
    """Allocates neighbouring memory of torch's allocator for empty storages."""
    # Torch's allocator caches this block, and splits it for the storages.
    torch.empty(
        sum(aligned(each.nbytes, ALIGNMENT) for each in slots if each.nbytes > _SMALL),
        dtype=torch.uint8,
        device=device,
    )
    for each in slots:
        each.storage.resize_(each.nbytes)


class KeptAddresses(DeviceMemory):
    """Address ranges of a GPU that keep storages' addresses while the memory is unmapped.

    The first sleep moves storages to a range, one range per call. Storages of one range are
    offloaded and loaded together.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._ranges: dict[AddressRange, list[Any]] = {}

    def is_here(self, slot: OffloadedStorage) -> bool:
        """Whether memory is mapped at a storage's addresses."""
        of = self._range_at(slot.storage.data_ptr())
        return super().is_here(slot) if of is None else of.is_mapped

    def leave(self, slots: Sequence[OffloadedStorage]) -> None:
        """Moves new storages to a range, and unmaps the memory of all their ranges."""
        self._move(slots)
        for each in self._ranges_of(slots):
            each.unmap()

    def come(self, slots: Sequence[OffloadedStorage]) -> Iterator[Sequence[OffloadedStorage]]:
        """Maps memory for their ranges, in less than a millisecond."""
        self._move([each for each in slots if each.storage.nbytes() == 0])
        for each in self._ranges_of(slots):
            each.map()
        # Frozen storages are copied first: their fingerprints overlap with the other copies.
        for is_frozen in (True, False):
            if some := [each for each in slots if each.is_frozen == is_frozen]:
                yield some

    def goes_on(self, address: int) -> bool:
        """Only the begin of a range divides copies, because a range maps one block of memory."""
        of = self._range_at(address)
        return super().goes_on(address) if of is None else address != of.base

    def place(self, slot: OffloadedStorage) -> int:
        """The address, so that few copies suffice; storages outside a range are last."""
        address = slot.storage.data_ptr()
        return sys.maxsize if self._range_at(address) is None else address

    def others(self, slots: Sequence[OffloadedStorage]) -> list[OffloadedStorage]:
        """Storages in the ranges that other objects own, but no longer the training state."""
        known = {storage_id(each.storage) for each in slots}
        for empty in [each for each in self._ranges if each.nbytes == 0]:
            del self._ranges[empty]  # torch has freed all its allocations there
        here = [
            (each, ref) for each, refs in self._ranges.items() if each.is_mapped for ref in refs
        ]
        return [
            OffloadedStorage(each, each.nbytes(), is_kept=True, is_frozen=False)
            for of, ref in here
            if (each := storage_of(ref)) is not None
            and storage_id(each) not in known
            and self._range_at(each.data_ptr()) is of  # a resize may have moved the storage
        ]

    @property
    def absent_bytes(self) -> int:
        """Bytes of unmapped ranges."""
        return sum(each.nbytes for each in self._ranges if not each.is_mapped)

    def _ranges_of(self, slots: Sequence[OffloadedStorage]) -> set[AddressRange]:
        found = {self._range_at(each.storage.data_ptr()) for each in slots}
        return {each for each in found if each is not None}

    def _range_at(self, address: int) -> AddressRange | None:
        return next((each for each in self._ranges if each.base <= address < each.end), None)

    def _move(self, slots: Sequence[OffloadedStorage]) -> None:
        """Moves storages outside any range to unmapped addresses in a new one; values are lost."""
        moving = [each for each in slots if self._range_at(each.storage.data_ptr()) is None]
        if not moving:
            return
        nbytes = 4 * sum(aligned(each.nbytes, ALIGNMENT) for each in moving) + _SPARE_ADDRESSES
        made = AddressRange(nbytes, self._device)
        self._ranges[made] = [storage_reference(each.storage) for each in moving]
        with made.allocating():
            for each in moving:
                each.storage.resize_(0)
            _fill(moving, self._device)
