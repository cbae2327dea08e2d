"""Where storages of a device have their memory, and how it goes and comes while they sleep."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from speedtorch.layers.host_slab import aligned
from speedtorch.layers.slot import ALIGNMENT, Slot
from speedtorch.memory.address_range import AddressRange
from speedtorch.torch_internals import storage_id, storage_of, storage_reference

__all__ = ["DeviceMemory", "KeptAddresses"]

# Up to here torch's allocator gives memory of segments of 2 MiB, and of no larger one.
_SMALL = 1 << 20
# What comes first travels while CUDA makes memory for the rest.
_PIECE = 1 << 26
# Where CUDA begins an allocation, across whose end it copies nothing.
_SEGMENT = 2 << 20
# Torch's allocator makes segments of 20 MiB for a few MiB, or as large_segment_size_mb says.
_SPARE_ADDRESSES = 1 << 30


class DeviceMemory:
    """Memory of torch's allocator: a storage is emptied and gets other memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # How neighbours lie in an allocation is known of torch's own allocator alone.
        self._is_known = device.type == "cpu" or torch.cuda.get_allocator_backend() == "native"

    def is_here(self, slot: Slot) -> bool:
        """Whether a storage has its memory."""
        return slot.storage.nbytes() > 0

    def leave(self, slots: Sequence[Slot]) -> None:
        """Takes the memory from storages, whose values are lost; once more after an error."""
        for slot in slots:
            slot.storage.resize_(0)

    def come(self, slots: Sequence[Slot]) -> Iterator[Sequence[Slot]]:
        """Gives storages memory again, and yields them piece by piece as they have it.

        Raises torch.OutOfMemoryError if the device has too little.
        """
        # Torch would copy what an error has left there, behind what the host is about to send.
        self.leave([each for each in slots if self.is_here(each)])
        begin = nbytes = 0
        for number, slot in enumerate(slots, 1):
            nbytes += aligned(slot.nbytes, ALIGNMENT)
            if nbytes >= _PIECE or number == len(slots):
                _fill(slots[begin:number], self._device)
                yield slots[begin:number]
                begin, nbytes = number, 0

    def goes_on(self, address: int) -> bool:
        """Whether what begins there can be in one copy with what ends there."""
        return self._is_known and address % _SEGMENT != 0

    def place(self, slot: Slot) -> int:
        """In which order storages go best."""
        return 0

    def others(self, slots: Sequence[Slot]) -> list[Slot]:
        """Storages that lose their memory with these, too."""
        return []

    @property
    def absent_bytes(self) -> int:
        """What torch's allocator has no memory behind, and counts all the same."""
        return 0


def _fill(slots: Sequence[Slot], device: torch.device) -> None:
    """Gets memory of torch's allocator for empty storages, which come to lie one after another."""
    # Torch cuts this up for them.
    torch.empty(
        sum(aligned(each.nbytes, ALIGNMENT) for each in slots if each.nbytes > _SMALL),
        dtype=torch.uint8,
        device=device,
    )
    for each in slots:
        each.storage.resize_(each.nbytes)


class KeptAddresses(DeviceMemory):
    """Ranges of a GPU's addresses, which storages have for good, with memory there or without.

    Storages move there when they are first evicted, those of one call into one range. Storages of
    one range move together.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._ranges: dict[AddressRange, list[Any]] = {}

    def is_here(self, slot: Slot) -> bool:
        """Whether there is memory behind its addresses."""
        of = self._range_at(slot.storage.data_ptr())
        return super().is_here(slot) if of is None else of.is_mapped

    def leave(self, slots: Sequence[Slot]) -> None:
        """Takes the memory from their ranges."""
        self._move(slots)
        for each in self._ranges_of(slots):
            each.unmap()

    def come(self, slots: Sequence[Slot]) -> Iterator[Sequence[Slot]]:
        """Puts memory behind their ranges; this takes less than a millisecond."""
        self._move([each for each in slots if each.storage.nbytes() == 0])
        for each in self._ranges_of(slots):
            each.map()
        # What is looked at once it is here travels first.
        for is_frozen in (True, False):
            if some := [each for each in slots if each.is_frozen == is_frozen]:
                yield some

    def goes_on(self, address: int) -> bool:
        """A range has one piece of memory."""
        of = self._range_at(address)
        return super().goes_on(address) if of is None else address != of.base

    def place(self, slot: Slot) -> int:
        """By address, so that few copies do; those that have yet to move come last."""
        address = slot.storage.data_ptr()
        return sys.maxsize if self._range_at(address) is None else address

    def others(self, slots: Sequence[Slot]) -> list[Slot]:
        """Storages in the ranges that the training state has no more, and something else has."""
        known = {storage_id(each.storage) for each in slots}
        for empty in [each for each in self._ranges if each.nbytes == 0]:
            del self._ranges[empty]  # torch has nothing in it any more
        here = [
            (each, ref) for each, refs in self._ranges.items() if each.is_mapped for ref in refs
        ]
        return [
            Slot(each, each.nbytes(), is_kept=True, is_frozen=False)
            for of, ref in here
            if (each := storage_of(ref)) is not None
            and storage_id(each) not in known
            and self._range_at(each.data_ptr()) is of  # it may have been resized since
        ]

    @property
    def absent_bytes(self) -> int:
        """The ranges' bytes while they have no memory."""
        return sum(each.nbytes for each in self._ranges if not each.is_mapped)

    def _ranges_of(self, slots: Sequence[Slot]) -> set[AddressRange]:
        found = {self._range_at(each.storage.data_ptr()) for each in slots}
        return {each for each in found if each is not None}

    def _range_at(self, address: int) -> AddressRange | None:
        return next((each for each in self._ranges if each.base <= address < each.end), None)

    def _move(self, slots: Sequence[Slot]) -> None:
        """Gives storages addresses without memory in a new range, if they have none in another."""
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
