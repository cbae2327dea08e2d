"""A storage that sleeps, and the tensors that are known to have it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from speedtorch.torch_internals import (
    set_versions,
    storage_at,
    storage_id,
    storage_uses,
    version_of,
)

__all__ = ["ALIGNMENT", "Slot", "aligned", "bytes_at"]

# Torch's allocator begins a tensor there: neighbours on the device are neighbours on the host, too.
ALIGNMENT = 512
# Versions of 32 bits; none of a tensor on the device is so high, so that what autograd has saved of
# it is refused while it sleeps.
_ASLEEP = 1 << 31


def aligned(count: int) -> int:
    """Bytes up to where the next storage may begin."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def bytes_at(address: int, count: int, device: torch.device) -> Tensor:
    """Memory `[count]` from an address on, which the tensor does not own."""
    storage = storage_at(address, device, count)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (count,), (1,))


@dataclass(slots=True)
class _Member:
    """A tensor that has a storage, and how it lies in it."""

    name: str
    ref: weakref.ref[Tensor]
    first: int = 0
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8
    version: int = 0
    """On the device."""
    here: Tensor | None = None
    """The same on the device, where its storage has no memory while it sleeps."""
    shown: int = -1
    """Where its first byte is while it sleeps."""

    def note(self, tensor: Tensor) -> None:
        """Notes how it lies now."""
        self.first, self.size = int(tensor.storage_offset()), tuple(tensor.shape)
        self.stride, self.dtype = tensor.stride(), tensor.dtype
        self.version = version_of(tensor)
        # What a class of its own makes of detach() is not known, and the other way takes longer.
        is_plain = type(tensor) in (Tensor, nn.Parameter)
        self.here = tensor.detach() if is_plain else self.of(tensor.untyped_storage())

    def layout(self) -> tuple[object, ...]:
        """How it lies in its storage."""
        return self.first, self.size, self.stride, self.dtype

    def show(self, tensor: Tensor, view: Tensor) -> None:
        """Lets it be a view of what sleeps."""
        self.shown = view.data_ptr()
        set_versions((tensor,), (_ASLEEP + self.version,))
        tensor.data = view

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """Such a tensor in a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.first, self.size, self.stride)


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
        return self.begin + (aligned(self.nbytes) if self.is_kept else 0)

    def add(self, name: str, tensor: Tensor, *, is_kept: bool, is_frozen: bool) -> None:
        """One more tensor that has the storage."""
        if not self.members or not any(each.ref() is tensor for each in self.members):
            self.members.append(_Member(name, weakref.ref(tensor)))
        self.is_kept = self.is_kept or is_kept
        self.is_frozen = self.is_frozen and is_frozen

    def living(self) -> Iterator[tuple[_Member, Tensor]]:
        """Its tensors that there are still."""
        for each in self.members:
            if (tensor := each.ref()) is not None:
                yield each, tensor

    def take_place(self, begin: int) -> int:
        """Notes where it begins in host memory, and how its tensors lie in it; gives its end."""
        self.begin = begin
        for member, tensor in self.living():
            member.note(tensor)
        return self.end

    def layout(self) -> tuple[object, ...]:
        """Its bytes, and how its tensors lie in them."""
        return self.nbytes, *(each.layout() for each in self.members)

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device, in this storage."""
        return storage_id(tensor.untyped_storage()) == storage_id(self.storage)

    def bytes(self) -> Tensor:
        """Its bytes on the device."""
        return bytes_at(self.storage.data_ptr(), self.nbytes, self.storage.device)

    def asleep(self, host: torch.UntypedStorage | None) -> list[Tensor]:
        """Its tensors as those of a host storage; None: what they have is lost."""
        if host is not None:
            return [each.of(host) for each in self.members]
        device = self.storage.device
        return [torch.empty(0, dtype=each.dtype, device=device) for each in self.members]

    def fall_asleep(self, views: Sequence[Tensor]) -> None:
        """Lets its tensors be views that asleep() has made."""
        for member, view in zip(self.members, views, strict=True):
            tensor = member.ref()
            if tensor is not None and self.has(tensor):
                member.show(tensor, view)

    def wake_up(self) -> None:
        """Lets its tensors be what they were, but for those that were given other memory."""
        for member, tensor in self.living():
            now, version = version_of(tensor), member.version
            if self._sleeps(member, tensor):
                is_same = self.is_kept and now == _ASLEEP + version
                set_versions((tensor,), (version if is_same else version + 1,))
                assert member.here is not None
                tensor.data = member.here
            elif now >= _ASLEEP:
                set_versions((tensor,), (version + 1,))

    @property
    def is_needed(self) -> bool:
        """Whether a tensor sleeps still, or something else has the storage, as a view does."""
        if any(self._sleeps(member, each) for member, each in self.living()):
            return True
        own = 1 + sum(each.here is not None for each in self.members)
        return storage_uses(self.storage) > own

    def _sleeps(self, member: _Member, tensor: Tensor) -> bool:
        """Whether a tensor is where it was put to sleep."""
        return member.shown == tensor.data_ptr() and (self.is_kept or not tensor.numel())
