"""Device memory of storages: freed while they are offloaded, allocated when they are loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch

from speedtorch.layers.host_buffer import aligned
from speedtorch.layers.offloaded_storage import ALIGNMENT, OffloadedStorage
from speedtorch.memory.address_range import AddressRange
from speedtorch.torch_internals import storage_id, storage_of, storage_reference

__all__ = ["DeviceMemory", "KeptAddresses"]

# Torch's allocator takes allocations up to this size from segments of 2 MiB.
_SMALL = 1 << 20
# The first chunk is copied while CUDA allocates memory for the rest.
_CHUNK = 1 << 26
# Segments of torch's allocator begin at multiples of CUDA's page size, 2 MiB. cudaMalloc does not
# document this alignment. One copy must not cross a segment's end.
_SEGMENT = 2 << 20
# Torch's allocator creates segments of 20 MiB, or of large_segment_size_mb, for a few MiB.
_SPARE_ADDRESSES = 1 << 30


_Storages: TypeAlias = Sequence[OffloadedStorage]


class DeviceMemory:
    """Memory of torch's allocator: a storage is emptied, and later gets other memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Only torch's own allocator is known to place neighbours in one CUDA allocation.
        self._is_known = device.type == "cpu" or torch.cuda.get_allocator_backend() == "native"

    def has_memory(self, storage: OffloadedStorage) -> bool:
        """Whether a storage has memory."""
        return storage.untyped.nbytes() > 0

    def free(self, storages: _Storages) -> None:
        """Frees the memory of storages, whose values are lost; call again after an error."""
        for storage in storages:
            storage.untyped.resize_(0)

    def allocate(self, storages: _Storages) -> Iterator[_Storages]:
        """Allocates memory for storages, and yields groups of storages that have memory.

        Raises torch.OutOfMemoryError if the device has too little memory.
        """
        # resize_() would copy bytes left after an error, possibly over bytes loaded from the host.
        self.free([storage for storage in storages if self.has_memory(storage)])
        begin = nbytes = 0
        for number, storage in enumerate(storages, 1):
            nbytes += aligned(storage.nbytes, ALIGNMENT)
            if nbytes >= _CHUNK or number == len(storages):
                _fill(storages[begin:number], self._device)
                yield storages[begin:number]
                begin, nbytes = number, 0

    def is_contiguous(self, address: int) -> bool:
        """Whether one copy may include the bytes before and after an address."""
        return self._is_known and address % _SEGMENT != 0

    def sort_key(self, storage: OffloadedStorage) -> int:
        """The sort key of a storage when storages are offloaded."""
        return 0

    def neighbours(self, storages: _Storages) -> list[OffloadedStorage]:
        """Other storages that lose their memory when the memory of these is freed."""
        return []

    @property
    def unmapped_bytes(self) -> int:
        """Bytes that torch's allocator counts but that have no memory."""
        return 0


def _fill(storages: _Storages, device: torch.device) -> None:
    """Allocates neighbouring memory of torch's allocator for empty storages."""
    # Torch's allocator caches this block, and splits it for the storages.
    torch.empty(
        sum(aligned(storage.nbytes, ALIGNMENT) for storage in storages if storage.nbytes > _SMALL),
        dtype=torch.uint8,
        device=device,
    )
    for storage in storages:
        storage.untyped.resize_(storage.nbytes)


class KeptAddresses(DeviceMemory):
    """Address ranges of a GPU that keep storages' addresses while the memory is unmapped.

    The first offload moves storages to a range, one range per call. Storages of one range are
    offloaded and loaded together.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._ranges: dict[AddressRange, list[Any]] = {}

    def has_memory(self, storage: OffloadedStorage) -> bool:
        """Whether memory is mapped at a storage's addresses."""
        kept = self._range_at(storage.address)
        return super().has_memory(storage) if kept is None else kept.is_mapped

    def free(self, storages: _Storages) -> None:
        """Moves new storages to a range, and unmaps the memory of all their ranges."""
        self._move(storages)
        for kept in self._ranges_of(storages):
            kept.unmap()

    def allocate(self, storages: _Storages) -> Iterator[_Storages]:
        """Maps memory for the storages' ranges, in less than a millisecond."""
        self._move([storage for storage in storages if storage.untyped.nbytes() == 0])
        for kept in self._ranges_of(storages):
            kept.map()
        # Frozen storages are copied first. StorageOffloader hashes their bytes on the GPU (see
        # fingerprint()) while the other storages are copied.
        for is_frozen in (True, False):
            if mapped := [storage for storage in storages if storage.is_frozen == is_frozen]:
                yield mapped

    def is_contiguous(self, address: int) -> bool:
        """Only the begin of a range divides copies, because a range maps one block of memory."""
        kept = self._range_at(address)
        return super().is_contiguous(address) if kept is None else address != kept.base

    def sort_key(self, storage: OffloadedStorage) -> int:
        """The address, so that few copies suffice; storages outside a range are last."""
        address = storage.address
        return sys.maxsize if self._range_at(address) is None else address

    def neighbours(self, storages: _Storages) -> list[OffloadedStorage]:
        """Living storages in mapped ranges that are not among `storages`.

        Other objects own them, and the training state no longer contains them. The caller offloads
        them too, because unmapping a range frees the memory of all its storages.
        """
        known = {storage_id(storage.untyped) for storage in storages}
        for empty in [kept for kept in self._ranges if kept.nbytes == 0]:
            del self._ranges[empty]  # torch has freed all its allocations there
        mapped = {kept: refs for kept, refs in self._ranges.items() if kept.is_mapped}
        return [
            OffloadedStorage(untyped, untyped.nbytes(), is_kept=True, is_frozen=False)
            for kept, refs in mapped.items()
            for ref in refs
            if (untyped := storage_of(ref)) is not None
            and storage_id(untyped) not in known
            and self._range_at(untyped.data_ptr()) is kept  # a resize may have moved the storage
        ]

    @property
    def unmapped_bytes(self) -> int:
        """Bytes of unmapped ranges."""
        return sum(kept.nbytes for kept in self._ranges if not kept.is_mapped)

    def _ranges_of(self, storages: _Storages) -> set[AddressRange]:
        found = {self._range_at(storage.address) for storage in storages}
        return {kept for kept in found if kept is not None}

    def _range_at(self, address: int) -> AddressRange | None:
        return next((kept for kept in self._ranges if kept.base <= address < kept.end), None)

    def _move(self, storages: _Storages) -> None:
        """Moves storages outside any range to unmapped addresses in a new one; values are lost."""
        new = [storage for storage in storages if self._range_at(storage.address) is None]
        if not new:
            return
        # Torch's allocator rounds sizes up, and its segments must fit. Addresses cost no memory.
        nbytes = 4 * sum(aligned(storage.nbytes, ALIGNMENT) for storage in new) + _SPARE_ADDRESSES
        kept = AddressRange(nbytes, self._device)
        self._ranges[kept] = [storage_reference(storage.untyped) for storage in new]
        with kept.allocating():
            for storage in new:
                storage.untyped.resize_(0)
            _fill(new, self._device)
