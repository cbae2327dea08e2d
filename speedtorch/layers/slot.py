"""A storage that sleeps, and the tensors that are known to have it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from speedtorch.layers.host_slab import aligned, elements
from speedtorch.torch_internals import (
    set_versions,
    storage_at,
    storage_id,
    storage_uses,
    version_of,
)

__all__ = ["ALIGNMENT", "Slot", "bytes_at", "fall_asleep", "wake_up", "waking"]

# Torch's allocator begins a tensor there: neighbours on the device are neighbours on the host, too.
ALIGNMENT = 512
# Versions of 32 bits; none of a tensor on the device is so high, so that what autograd has saved of
# it is refused while it sleeps.
_ASLEEP = 1 << 31


def bytes_at(address: int, count: int, device: torch.device) -> Tensor:
    """Memory `[count]` from an address on, which the tensor does not own."""
    return elements(storage_at(address, device, count), 0, (count,))


class _Member:
    """A tensor that has a storage, and its layout there: its first byte, size, stride and dtype.

    `here` is the same on the device, where its storage has no memory while it sleeps, and `shown`
    where its first byte is then. The version is that on the device.
    """

    __slots__ = ("here", "layout", "ref", "shown", "version")

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        self.ref = weakref.ref(tensor)
        begin = int(tensor.storage_offset()) * tensor.itemsize
        self.layout = begin, tensor.shape, tensor.stride(), tensor.dtype
        self.version = version_of(tensor)
        # What a class of its own makes of `data` is not known, and the other way takes longer.
        is_plain = type(tensor) in (Tensor, nn.Parameter)
        self.here = tensor.data if is_plain else self.of(storage)
        self.shown = -1

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """Such a tensor in a storage."""
        return elements(storage, *self.layout)


@dataclass(slots=True)
class Slot:
    """A storage of the device, and the tensors that are known to have it.

    Attributes:
        storage: which has no memory while it sleeps.
        nbytes: its bytes while it is awake.
        members: all of them are let see the host's copy. Of those that are gone since then there is
            nothing to wake.
        is_kept: whether its bytes are copied; without it they are lost.
        is_frozen: whether its bytes are likely to be the same the next time.
    """

    storage: torch.UntypedStorage
    nbytes: int
    members: list[_Member] = field(default_factory=list)
    is_kept: bool = False
    is_frozen: bool = True
    begin: int = 0
    """Its place in host memory."""

    @property
    def end(self) -> int:
        """Where the next one may begin."""
        return self.begin + (aligned(self.nbytes, ALIGNMENT) if self.is_kept else 0)

    def add(self, tensor: Tensor, *, is_kept: bool, is_frozen: bool) -> None:
        """One more tensor that has the storage, as it lies there now."""
        if not self.members or not any(each.ref() is tensor for each in self.members):
            self.members.append(_Member(tensor, self.storage))
        self.is_kept = self.is_kept or is_kept
        self.is_frozen = self.is_frozen and is_frozen

    def take_place(self, begin: int) -> int:
        """Notes where it begins in host memory; gives its end."""
        self.begin = begin
        return self.end

    def living(self) -> Iterator[tuple[_Member, Tensor]]:
        """Its tensors that there are still."""
        for each in self.members:
            if (tensor := each.ref()) is not None:
                yield each, tensor

    def layout(self) -> tuple[object, ...]:
        """Its bytes, and how its tensors lie in them."""
        return self.nbytes, *[each.layout for each in self.members]

    def asleep(self, host: torch.UntypedStorage | None) -> list[Tensor]:
        """Its tensors as those of a host storage; None: what they have is lost."""
        if host is not None:
            return [each.of(host) for each in self.members]
        device = self.storage.device
        return [torch.empty(0, dtype=each.layout[-1], device=device) for each in self.members]

    @property
    def is_needed(self) -> bool:
        """Whether a tensor sleeps still, or something else has the storage, as a view does."""
        if any(self.sleeps(member, tensor) for member, tensor in self.living()):
            return True
        return storage_uses(self.storage) > 1 + len(self.members)

    def sleeps(self, member: _Member, tensor: Tensor) -> bool:
        """Whether a tensor is where it was put to sleep."""
        return member.shown == tensor.data_ptr() and (self.is_kept or not tensor.numel())


def fall_asleep(slots: Iterable[Slot], views: Iterable[Sequence[Tensor]]) -> None:
    """Lets the tensors of storages be views that Slot.asleep() has made."""
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


def waking(slots: Iterable[Slot]) -> list[tuple[Tensor, int, Tensor | None]]:
    """The tensors of storages that sleep, or have the version of one that does.

    With each is the version that it wakes with, and what it is then; None: as it is now, with other
    memory than it slept in.
    """
    found = []
    for slot in slots:
        for member, tensor in slot.living():
            now, version, here = version_of(tensor), member.version, None
            if slot.sleeps(member, tensor):
                here = member.here
                # An error may have ended the last call once versions were set.
                is_same = slot.is_kept and now in (version, _ASLEEP + version)
            elif now < _ASLEEP:
                continue
            else:  # it never slept, or has been given other memory
                is_same = member.shown < 0 and now == _ASLEEP + version
            found.append((tensor, version if is_same else version + 1, here))
    return found


def wake_up(tensors: Sequence[tuple[Tensor, int, Tensor | None]]) -> None:
    """Lets them be what they were."""
    versions = tuple([version for _, version, _ in tensors])
    set_versions(tuple([tensor for tensor, _, _ in tensors]), versions)
    for tensor, _, here in tensors:
        if here is not None:
            tensor.data = here
