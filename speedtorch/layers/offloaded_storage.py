"""OffloadedStorage: a storage that can be offloaded, and the known tensors that use it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from speedtorch.layers.host_buffer import aligned, elements
from speedtorch.torch_internals import (
    set_versions,
    storage_at,
    storage_id,
    storage_uses,
    version_of,
)

__all__ = [
    "ALIGNMENT",
    "OffloadedStorage",
    "bytes_at",
    "planned_loads",
    "point_to_device",
    "point_to_host",
]

# The alignment of torch's CUDA allocator: neighbours on the device are neighbours on the host.
ALIGNMENT = 512
# Added to the 32-bit version of an offloaded tensor. No tensor on the device has so high a version,
# so autograd raises for saved tensors while they are offloaded.
_OFFLOADED_VERSIONS = 1 << 31


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
    versions = tuple([_OFFLOADED_VERSIONS + member.version for member, _, _ in offloaded])
    set_versions(tuple([tensor for _, tensor, _ in offloaded]), versions)
    for member, tensor, view in offloaded:
        member.host_address = view.data_ptr()
        tensor.data = view


def planned_loads(storages: Iterable[OffloadedStorage]) -> list[tuple[Tensor, int, Tensor | None]]:
    """The tensors to load, each with its new version and its alias on the device.

    Tensors are included if they are offloaded or have an offloaded version. An alias of None means
    that the tensor keeps its current memory, which is not the memory it was offloaded to.
    """
    found = []
    for storage in storages:
        for member, tensor in storage.live_members():
            now, version, view = version_of(tensor), member.version, None
            if storage.is_offloaded(member, tensor):
                view = member.device_view
                # An error may have ended the last call after versions were set.
                is_same = storage.is_kept and now in (version, _OFFLOADED_VERSIONS + version)
            elif now < _OFFLOADED_VERSIONS:
                continue
            else:  # never offloaded, or assigned other memory meanwhile
                is_same = member.host_address < 0 and now == _OFFLOADED_VERSIONS + version
            found.append((tensor, version if is_same else version + 1, view))
    return found


def point_to_device(tensors: Sequence[tuple[Tensor, int, Tensor | None]]) -> None:
    """Restores versions and device memory of the tensors that planned_loads() has returned."""
    versions = tuple([version for _, version, _ in tensors])
    set_versions(tuple([tensor for tensor, _, _ in tensors]), versions)
    for tensor, _, view in tensors:
        if view is not None:
            tensor.data = view
