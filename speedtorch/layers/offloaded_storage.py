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

__all__ = ["ALIGNMENT", "OffloadedStorage", "bytes_at", "fall_asleep", "wake_up", "waking"]

# The alignment of torch's CUDA allocator: neighbours on the device are neighbours on the host.
ALIGNMENT = 512
# Added to the 32-bit version of an offloaded tensor. No tensor on the device has so high a version,
# so autograd raises for saved tensors while they are offloaded.
_ASLEEP = 1 << 31


def bytes_at(address: int, count: int, device: torch.device) -> Tensor:
    """A tensor `[count]` over the memory at an address, without ownership."""
    return elements(storage_at(address, device, count), 0, (count,))


class _Member:
    """A tensor that uses a storage, and its layout there: first byte, size, stride and dtype.

    `here` is an alias in the device storage, which has no memory while offloaded. `shown` is the
    tensor's address while offloaded. `version` is the tensor's version on the device.
    """

    __slots__ = ("here", "layout", "ref", "shown", "version")

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        self.ref = weakref.ref(tensor)
        begin = int(tensor.storage_offset()) * tensor.itemsize
        self.layout = begin, tensor.shape, tensor.stride(), tensor.dtype
        self.version = version_of(tensor)
        # A subclass may override `data`; elements() is slower but always works.
        is_plain = type(tensor) in (Tensor, nn.Parameter)
        self.here = tensor.data if is_plain else self.of(storage)
        self.shown = -1

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """A tensor with this layout in a storage."""
        return elements(storage, *self.layout)


@dataclass(slots=True)
class OffloadedStorage:
    """A device storage, and the known tensors that use it.

    Attributes:
        storage: the storage, which has no memory while offloaded.
        nbytes: bytes of the storage while loaded.
        members: the tensors, which use the host copy while offloaded. Members that were deleted
            meanwhile are skipped.
        is_kept: whether the bytes are copied; otherwise they are lost.
        is_frozen: whether the bytes probably do not change until the next offload.
    """

    storage: torch.UntypedStorage
    nbytes: int
    members: list[_Member] = field(default_factory=list)
    is_kept: bool = False
    is_frozen: bool = True
    begin: int = 0
    """Byte offset in host memory."""

    @property
    def end(self) -> int:
        """The next free byte offset in host memory."""
        return self.begin + (aligned(self.nbytes, ALIGNMENT) if self.is_kept else 0)

    def add(self, tensor: Tensor, *, is_kept: bool, is_frozen: bool) -> None:
        """Adds a tensor that uses the storage, with its current layout."""
        if not self.members or not any(each.ref() is tensor for each in self.members):
            self.members.append(_Member(tensor, self.storage))
        self.is_kept = self.is_kept or is_kept
        self.is_frozen = self.is_frozen and is_frozen

    def take_place(self, begin: int) -> int:
        """Sets the offset in host memory, and returns the end."""
        self.begin = begin
        return self.end

    def living(self) -> Iterator[tuple[_Member, Tensor]]:
        """The members whose tensors still exist."""
        for each in self.members:
            if (tensor := each.ref()) is not None:
                yield each, tensor

    def layout(self) -> tuple[object, ...]:
        """The bytes of the storage, and the layouts of its tensors."""
        return self.nbytes, *[each.layout for each in self.members]

    def asleep(self, host: torch.UntypedStorage | None) -> list[Tensor]:
        """Aliases of the tensors in a host storage; None: empty tensors, as the values are lost."""
        if host is not None:
            return [each.of(host) for each in self.members]
        device = self.storage.device
        return [torch.empty(0, dtype=each.layout[-1], device=device) for each in self.members]

    @property
    def is_needed(self) -> bool:
        """Whether a tensor is still offloaded, or another object such as a view has the storage."""
        if any(self.sleeps(member, tensor) for member, tensor in self.living()):
            return True
        return storage_uses(self.storage) > 1 + len(self.members)

    def sleeps(self, member: _Member, tensor: Tensor) -> bool:
        """Whether a tensor still has the memory that it was offloaded to."""
        return member.shown == tensor.data_ptr() and (self.is_kept or not tensor.numel())


def fall_asleep(slots: Iterable[OffloadedStorage], views: Iterable[Sequence[Tensor]]) -> None:
    """Points the tensors of storages to the aliases that OffloadedStorage.asleep() has made."""
    falling = [
        (member, tensor, view)
        for slot, its_views in zip(slots, views, strict=True)
        for member, view in zip(slot.members, its_views, strict=True)
        if (tensor := member.ref()) is not None
        and storage_id(tensor.untyped_storage()) == storage_id(slot.storage)
    ]
    versions = tuple([_ASLEEP + member.version for member, _, _ in falling])
    set_versions(tuple([tensor for _, tensor, _ in falling]), versions)
    for member, tensor, view in falling:
        member.shown = view.data_ptr()
        tensor.data = view


def waking(slots: Iterable[OffloadedStorage]) -> list[tuple[Tensor, int, Tensor | None]]:
    """The tensors to wake, each with its new version and its alias on the device.

    Tensors are included if they are offloaded or have an offloaded version. An alias of None means
    that the tensor keeps its current memory, which is not the memory it was offloaded to.
    """
    found = []
    for slot in slots:
        for member, tensor in slot.living():
            now, version, here = version_of(tensor), member.version, None
            if slot.sleeps(member, tensor):
                here = member.here
                # An error may have ended the last call after versions were set.
                is_same = slot.is_kept and now in (version, _ASLEEP + version)
            elif now < _ASLEEP:
                continue
            else:  # never offloaded, or assigned other memory meanwhile
                is_same = member.shown < 0 and now == _ASLEEP + version
            found.append((tensor, version if is_same else version + 1, here))
    return found


def wake_up(tensors: Sequence[tuple[Tensor, int, Tensor | None]]) -> None:
    """Restores versions and device memory of the tensors that waking() has returned."""
    versions = tuple([version for _, version, _ in tensors])
    set_versions(tuple([tensor for tensor, _, _ in tensors]), versions)
    for tensor, _, here in tensors:
        if here is not None:
            tensor.data = here
