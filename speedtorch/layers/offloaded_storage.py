"""OffloadedStorage: a storage that can be offloaded, and DeviceMemory, its memory on a device."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from speedtorch.layers.host_buffer import aligned, elements
from speedtorch.layers.host_versions import ON_HOST, changes_of
from speedtorch.memory.address_range import AddressRange
from speedtorch.torch_internals import (
    set_versions,
    storage_at,
    storage_id,
    storage_of,
    storage_reference,
    storage_uses,
    version_of,
)

__all__ = [
    "DeviceMemory",
    "OffloadedStorage",
    "bytes_at",
    "planned_loads",
    "point_to_device",
    "point_to_host",
]

# The alignment of torch's CUDA allocator: neighbours on the device are neighbours on the host.
ALIGNMENT = 512
# Torch's allocator takes allocations up to this size from segments of 2 MiB.
_SMALL = 1 << 20
# The first chunk is copied while CUDA allocates memory for the rest.
_CHUNK = 1 << 26
# Segments of torch's allocator begin at multiples of CUDA's page size, 2 MiB. cudaMalloc does not
# document this alignment. A copy must not cross the end of a segment.
_SEGMENT = 2 << 20
# Torch's allocator creates segments of 20 MiB, or of large_segment_size_mb, for a few MiB.
_SPARE_ADDRESSES = 1 << 30


def bytes_at(address: int, count: int, device: torch.device) -> Tensor:
    """A tensor `[count]` over the memory at an address, without ownership."""
    return elements(storage_at(address, device, count), 0, (count,))


class _Member:
    """A tensor that uses a storage, and its layout there: first byte, size, stride and dtype.

    `device_view` is an alias in the device storage, which has no memory while offloaded.
    `host_address` is the tensor's address while offloaded, and `version` its version on the device.
    """

    __slots__ = ("device_view", "host_address", "layout", "ref", "version")

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        self.ref = weakref.ref(tensor)
        begin = int(tensor.storage_offset()) * tensor.itemsize
        self.layout = begin, tensor.shape, tensor.stride(), tensor.dtype
        self.version = version_of(tensor)
        # A subclass may override `data`; elements() is slower but always works.
        is_plain = type(tensor) in (Tensor, nn.Parameter)
        self.device_view = tensor.data if is_plain else self.view_in(storage)
        self.host_address = -1

    def view_in(self, storage: torch.UntypedStorage) -> Tensor:
        """A tensor with this layout in a storage."""
        return elements(storage, *self.layout)


@dataclass(slots=True)
class OffloadedStorage:
    """A device storage, and the known tensors that use it.

    Attributes:
        untyped: the torch storage, which has no memory while offloaded.
        nbytes: bytes of the storage while loaded.
        members: the tensors, which use the host copy while offloaded. Members that were deleted
            meanwhile are skipped.
        is_kept: whether the bytes are copied; otherwise they are lost.
        is_frozen: whether the bytes probably do not change until the next offload.
    """

    untyped: torch.UntypedStorage
    nbytes: int
    members: list[_Member] = field(default_factory=list)
    is_kept: bool = False
    is_frozen: bool = True
    begin: int = 0
    """Byte offset in host memory."""

    @property
    def address(self) -> int:
        """Address of the first byte on the device."""
        return self.untyped.data_ptr()

    @property
    def end(self) -> int:
        """The next free byte offset in host memory."""
        return self.begin + (aligned(self.nbytes, ALIGNMENT) if self.is_kept else 0)

    def add(self, tensor: Tensor, *, is_kept: bool, is_frozen: bool) -> None:
        """Adds a tensor that uses the storage, with its current layout."""
        if not self.members or not any(member.ref() is tensor for member in self.members):
            self.members.append(_Member(tensor, self.untyped))
        self.is_kept = self.is_kept or is_kept
        self.is_frozen = self.is_frozen and is_frozen

    def set_offset(self, begin: int) -> int:
        """Sets the offset in host memory, and returns the end."""
        self.begin = begin
        return self.end

    def live_members(self) -> Iterator[tuple[_Member, Tensor]]:
        """The members whose tensors still exist."""
        for member in self.members:
            if (tensor := member.ref()) is not None:
                yield member, tensor

    def layout(self) -> tuple[object, ...]:
        """The bytes of the storage, and the layouts of its tensors."""
        return self.nbytes, *[member.layout for member in self.members]

    def host_views(self, host: torch.UntypedStorage | None) -> list[Tensor]:
        """Aliases of the tensors in a host storage; None: empty tensors, as the values are lost."""
        if host is not None:
            return [member.view_in(host) for member in self.members]
        device = self.untyped.device
        return [torch.empty(0, dtype=member.layout[-1], device=device) for member in self.members]

    @property
    def is_needed(self) -> bool:
        """Whether a tensor is still offloaded, or another object such as a view has the storage."""
        if any(self.is_offloaded(member, tensor) for member, tensor in self.live_members()):
            return True
        return storage_uses(self.untyped) > 1 + len(self.members)

    def is_offloaded(self, member: _Member, tensor: Tensor) -> bool:
        """Whether a tensor still has the memory that it was offloaded to."""
        return member.host_address == tensor.data_ptr() and (self.is_kept or not tensor.numel())


def point_to_host(storages: Iterable[OffloadedStorage], views: Iterable[Sequence[Tensor]]) -> None:
    """Points the tensors of storages to the aliases that OffloadedStorage.host_views() has made."""
    offloaded = [
        (member, tensor, view)
        for storage, storage_views in zip(storages, views, strict=True)
        for member, view in zip(storage.members, storage_views, strict=True)
        if (tensor := member.ref()) is not None
        and storage_id(tensor.untyped_storage()) == storage_id(storage.untyped)
    ]
    versions = tuple([ON_HOST | member.version for member, _, _ in offloaded])
    set_versions(tuple([tensor for _, tensor, _ in offloaded]), versions)
    for member, tensor, view in offloaded:
        member.host_address = view.data_ptr()
        tensor.data = view


def planned_loads(storages: Iterable[OffloadedStorage]) -> list[tuple[Tensor, int, Tensor | None]]:
    """The tensors to load, each with its new version and its alias on the device.

    Tensors are included if they are offloaded or have an offloaded version. An alias of None means
    that the tensor keeps its current memory, which is not the memory it was offloaded to.
    """
    found: list[tuple[Tensor, int, Tensor | None]] = []
    for storage in storages:
        for member, tensor in storage.live_members():
            if storage.is_offloaded(member, tensor):
                is_same, view = storage.is_kept, member.device_view
            elif version_of(tensor) < ON_HOST:
                continue
            else:  # never offloaded, or assigned other memory meanwhile
                is_same, view = member.host_address < 0, None
            found.append((tensor, changes_of(tensor) if is_same else member.version + 1, view))
    return found


def point_to_device(tensors: Sequence[tuple[Tensor, int, Tensor | None]]) -> None:
    """Restores versions and device memory of the tensors that planned_loads() has returned."""
    versions = tuple([version for _, version, _ in tensors])
    set_versions(tuple([tensor for tensor, _, _ in tensors]), versions)
    for tensor, _, view in tensors:
        if view is not None:
            tensor.data = view


_Storages: TypeAlias = Sequence[OffloadedStorage]


class DeviceMemory:
    """Memory of storages on a device, which is freed while they are offloaded.

    A storage is emptied, and later gets memory of torch's allocator again. With `keep_addresses`,
    the first offload moves storages to address ranges of a GPU, one range per call. Their memory is
    unmapped and mapped again, so storages of one range are offloaded and loaded together.
    """

    def __init__(self, device: torch.device, *, keep_addresses: bool) -> None:
        self._device, self._keep_addresses = device, keep_addresses
        # Only torch's own allocator is known to place neighbours in one CUDA allocation.
        self._is_known = device.type == "cpu" or torch.cuda.get_allocator_backend() == "native"
        self._ranges: dict[AddressRange, list[Any]] = {}

    def has_memory(self, storage: OffloadedStorage) -> bool:
        """Whether a storage has memory."""
        kept = self._range_at(storage.address)
        return storage.untyped.nbytes() > 0 if kept is None else kept.is_mapped

    def free(self, storages: _Storages) -> None:
        """Frees the memory of storages, whose values are lost; call again after an error."""
        if self._keep_addresses:
            self._move(storages)
            for kept in self._ranges_of(storages):
                kept.unmap()
        else:
            for storage in storages:
                storage.untyped.resize_(0)

    def allocate(self, storages: _Storages) -> Iterator[_Storages]:
        """Allocates memory for storages, and yields groups of storages that have memory.

        Raises torch.OutOfMemoryError if the device has too little memory.
        """
        if self._keep_addresses:
            self._move([storage for storage in storages if storage.untyped.nbytes() == 0])
            for kept in self._ranges_of(storages):  # less than a millisecond
                kept.map()
            # Frozen storages are copied first. StorageOffloader hashes their bytes on the GPU (see
            # fingerprint()) while the other storages are copied.
            for is_frozen in (True, False):
                if mapped := [storage for storage in storages if storage.is_frozen == is_frozen]:
                    yield mapped
            return
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
        """Whether one copy may include the bytes before and after an address.

        Only the begin of a range divides copies, because a range maps one block of memory.
        """
        kept = self._range_at(address)
        return self._is_known and address % _SEGMENT != 0 if kept is None else address != kept.base

    def sort_key(self, storage: OffloadedStorage) -> int:
        """The address in a range, so that few copies suffice; storages outside are last."""
        address = storage.address
        return sys.maxsize if self._range_at(address) is None else address

    def neighbours(self, storages: _Storages) -> list[OffloadedStorage]:
        """Living storages in mapped ranges that are not among `storages`.

        Other objects own them, and the training state no longer contains them. The caller offloads
        them too, because unmapping a range frees the memory of all its storages.
        """
        known = {storage_id(storage.untyped) for storage in storages}
        for empty in [kept for kept in self._ranges if kept.nbytes == 0]:
            del self._ranges[empty]  # torch has freed all allocations in the range
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
        """Bytes of unmapped ranges, which torch's allocator counts."""
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
