"""The memory of tensors, by storages: on the device, or in host memory while they sleep.

A storage is emptied and filled again, and stays the same object all the while. So whatever has a
view of it has the same values again: tied weights, tensors that are not contiguous, the flat
buffers of DistributedDataParallel and FSDP. Tensors that are known by name are in mapped host
memory meanwhile, as tensors of their device still, whose kernels reach it over the link: they can
be read, saved and loaded, and autograd and its hooks know no other tensors.

**Errors at any line.** First all is copied, then the tensors are let see the copy one by one, and
only then goes the memory that they have left: each is whole all the while. An error on the way to
sleep wakes all again, and what an error in that has left is completed by the next call.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speedtorch.layers.host_slab import copy_spans
from speedtorch.memory import host_memory
from speedtorch.memory.host_memory import HostMemoryKind
from speedtorch.memory.side_stream import SharedSideStream
from speedtorch.torch_internals import (
    set_versions,
    storage_at,
    storage_id,
    storage_uses,
    version_of,
)

__all__ = ["SleepingStorages", "Slot", "times_moved"]

# Torch's allocator begins a tensor there: neighbours on the device are neighbours on the host, too.
_ALIGNMENT = 512
# Up to here torch's allocator gives memory of segments of 2 MiB, and of no larger one.
_SMALL = 1 << 20
# Where CUDA begins an allocation, across whose end it copies nothing.
_SEGMENT = 2 << 20
# Of Weyl's sequence, which splitmix64 takes; as a signed number of 64 bits.
_GOLDEN = -0x61C8864680B583EB
# Words that are mixed at once.
_CHUNK = 1 << 22
# What comes first travels while CUDA makes memory for the rest.
_PIECE = 1 << 26
# Versions of 32 bits; none of a tensor on the device is so high, so that what autograd has saved of
# it is refused while it sleeps.
_ASLEEP = 1 << 31


_moved = 0


def times_moved() -> int:
    """How often storages have left the device: what knows an address asks whether it holds."""
    return _moved


def _count_move() -> None:
    global _moved
    _moved += 1


def _up(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


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
    shown: int = -1
    """Where its first byte is while it sleeps."""

    def note(self, tensor: Tensor) -> None:
        """Notes how it lies now."""
        self.first, self.size = int(tensor.storage_offset()), tuple(tensor.shape)
        self.stride, self.dtype = tensor.stride(), tensor.dtype
        self.version = version_of(tensor)

    def show(self, tensor: Tensor, view: Tensor) -> None:
        """Lets it be a view of what sleeps."""
        self.shown = view.data_ptr()
        set_versions((tensor,), (_ASLEEP + self.version,))
        tensor.data = view

    def of(self, storage: torch.UntypedStorage, device: torch.device) -> Tensor:
        """Such a tensor in a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=device)
        return empty.set_(storage, self.first, self.size, self.stride)


@dataclass(slots=True)
class Slot:
    """A storage of the device, and the tensors that are known to have it.

    Attributes:
        storage: which is empty while it sleeps.
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
        return self.begin + (_up(self.nbytes) if self.is_kept else 0)

    @property
    def is_awake(self) -> bool:
        """Whether the storage has its memory."""
        return self.storage.nbytes() > 0

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

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device, in this storage."""
        return storage_id(tensor.untyped_storage()) == storage_id(self.storage)

    def bytes(self) -> Tensor:
        """Its bytes on the device."""
        return _bytes_at(self.storage.data_ptr(), self.nbytes, self.storage.device)

    def asleep(self, host: torch.UntypedStorage | None) -> list[Tensor]:
        """Its tensors as those of a host storage; None: what they have is lost."""
        device = self.storage.device
        if host is not None:
            return [each.of(host, device) for each in self.members]
        return [torch.empty(0, dtype=each.dtype, device=device) for each in self.members]

    def awake(self) -> list[Tensor]:
        """Its tensors as they are on the device."""
        device = self.storage.device
        return [each.of(self.storage, device) for each in self.members]

    def fall_asleep(self, views: Sequence[Tensor]) -> None:
        """Lets its tensors be views that asleep() has made, and empties its storage."""
        for member, view in zip(self.members, views, strict=True):
            tensor = member.ref()
            if tensor is not None and self.has(tensor):
                member.show(tensor, view)
        self.storage.resize_(0)

    def wake_up(self, views: Sequence[Tensor]) -> None:
        """Lets its tensors be those of awake(), but for those that were given other memory.

        Args:
            views: none if there is no tensor that sleeps.
        """
        for number, member in enumerate(self.members):
            if (tensor := member.ref()) is None:
                continue
            now, version = version_of(tensor), member.version
            if self._sleeps(member, tensor):
                is_same = self.is_kept and now == _ASLEEP + version
                set_versions((tensor,), (version if is_same else version + 1,))
                tensor.data = views[number]
            elif now >= _ASLEEP:
                set_versions((tensor,), (version + 1,))

    @property
    def is_needed(self) -> bool:
        """Whether a tensor sleeps still, or something else has the storage, as a view does."""
        if storage_uses(self.storage) > 1:
            return True
        return any(self._sleeps(member, each) for member, each in self.living())

    def _sleeps(self, member: _Member, tensor: Tensor) -> bool:
        """Whether a tensor is where it was put to sleep."""
        return member.shown == tensor.data_ptr() and (self.is_kept or not tensor.numel())


def _bytes_at(address: int, count: int, device: torch.device) -> Tensor:
    """Memory from an address on, which the tensor does not own."""
    storage = storage_at(address, device, count)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (count,), (1,))


def _fingerprint(values: Tensor) -> Tensor:
    """A number that other bytes have, too, with a probability of 2^-64 or so.

    It is the sum of all words, each mixed with its place as by splitmix64.
    """
    end = len(values) // 8 * 8
    words = values[:end].view(torch.int64)
    parts = [*torch.split(words, _CHUNK)] + ([values[end:].long()] if end < len(values) else [])
    # Not kept: these are as many bytes as the longest part.
    places = torch.arange(max(map(len, parts)), device=values.device) * _GOLDEN
    return torch.stack([_mixed(part, number, places) for number, part in enumerate(parts)]).sum()


def _mixed(words: Tensor, number: int, places: Tensor) -> Tensor:
    mixed = words + places[: len(words)]
    mixed += number * 0x632BE59BD9B4E019
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed ^= mixed >> shift
        mixed *= factor
    mixed ^= mixed >> 31
    return mixed.sum()


class SleepingStorages:
    """The storages of one part of a training state on one device.

    Host memory is made once and used again.

    Args:
        device: where they are while they are awake; "cpu" is another part of host memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = self._host_bytes(0)
        self._copies = SharedSideStream("training state")
        self._slots: list[Slot] = []
        """What sleeps, or is half way after an error."""
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        """Of the host's bytes by place: a tensor that has them, how many, and their fingerprint."""

    @property
    def host_nbytes(self) -> int:
        """Of host memory that is kept."""
        return self._host.nbytes

    @property
    def nbytes(self) -> int:
        """Of what sleeps."""
        return sum(each.nbytes for each in self._slots)

    @property
    def is_asleep(self) -> bool:
        """Whether there is something to wake."""
        return bool(self._slots)

    @property
    def tensors(self) -> list[Tensor]:
        """Those that sleep."""
        return [each for slot in self._slots for _, each in slot.living()]

    @property
    def is_half_way(self) -> bool:
        """Whether an error has left some of it awake."""
        return any(each.is_awake for each in self._slots)

    def sleep(self, slots: Sequence[Slot]) -> int:
        """Copies storages to host memory and empties them; returns the bytes that were copied.

        Nothing of this part sleeps before.

        Raises:
            MemoryError, RuntimeError: the host has too little memory, or CUDA pins no more of it;
                all is awake.
        """
        end = 0
        for slot in slots:
            end = slot.take_place(end)
        if end > self._host.nbytes:
            self.release()
            self._host = self._host_bytes(end)
        kept = [each for each in slots if each.is_kept]
        perhaps = [each for each in kept if self._may_have(each)]
        surely = [each for each in kept if not self._may_have(each)]
        # What is about to be overwritten is not known any more, also if an error ends this.
        self._forget_but({each.begin for each in perhaps})
        # These go while the rest is looked at.
        self._copy(surely, comes=False)
        same = self._unchanged(perhaps)
        changed = [each for each in perhaps if each.begin not in same]
        self._forget_but(same)
        self._copy(changed, comes=False)
        asleep = [slot.asleep(self._host_storage(slot) if slot.is_kept else None) for slot in slots]
        self._wait()
        self._slots = list(slots)
        _count_move()
        try:
            for slot, views in zip(slots, asleep, strict=True):
                slot.fall_asleep(views)
        except BaseException:
            self.wake()
            raise
        return sum(each.nbytes for each in (*surely, *changed))

    def wake(self) -> int:
        """Fills the storages again that are still needed; returns the bytes that were copied.

        Raises:
            RuntimeError: what torch raises where the device has too little memory
                (torch.OutOfMemoryError); all sleeps on.
        """
        needed = [each for each in self._slots if each.is_awake or each.is_needed]
        empty = [each for each in needed if not each.is_awake]
        seldom_written: list[Slot] = []
        try:
            for some in _pieces(empty):
                # Torch cuts this up for the storages, which come to lie one after another.
                nbytes = sum(_up(each.nbytes) for each in some if each.nbytes > _SMALL)
                torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                for slot in some:
                    slot.storage.resize_(slot.nbytes)
                here = [each for each in some if each.is_kept]
                self._copy(here, comes=True)
                if frozen := [each for each in here if each.is_frozen]:
                    self._copies.join()
                    seldom_written += frozen
            # The link is busy meanwhile with what comes after them.
            known = {each.begin: self._known_of(each) for each in seldom_written}
            for slot in empty:
                if not slot.is_kept:
                    slot.bytes().fill_(255)
            awake = {id(each): each.awake() for each in needed}
            self._wait()  # or another thread would see memory that has nothing yet
        except BaseException:
            self._wait()
            for slot in empty:
                slot.storage.resize_(0)
            raise
        for slot in self._slots:
            slot.wake_up(awake.get(id(slot), ()))
        self._slots, self._known = [], known
        return sum(each.nbytes for each in empty if each.is_kept)

    def release(self) -> None:
        """Gives host memory back, which goes once no sleeping tensor has it."""
        self._host, self._known = self._host_bytes(0), {}

    def _host_bytes(self, count: int) -> Tensor:
        """Host memory `[count]` that kernels of the device reach."""
        memory: HostMemoryKind = "registered" if self._device.type == "cuda" else "plain"
        return host_memory.empty(count, dtype=torch.uint8, memory=memory)

    def _host_storage(self, slot: Slot) -> torch.UntypedStorage:
        """A slot's bytes of host memory, as a storage of the device."""
        address = self._host.data_ptr() + slot.begin
        made = storage_at(address, self._device, slot.nbytes)
        vars(made)["host"] = self._host  # torch keeps the object as long as the memory is used
        return made

    def _known_of(self, slot: Slot) -> tuple[weakref.ref[Tensor], int, Tensor]:
        return slot.members[0].ref, slot.nbytes, _fingerprint(slot.bytes())

    def _may_have(self, slot: Slot) -> bool:
        """Whether the host has had the bytes of a storage that is seldom written."""
        if not slot.is_frozen or (known := self._known.get(slot.begin)) is None:
            return False
        owner, nbytes, _ = known
        return owner() is slot.members[0].ref() and nbytes == slot.nbytes

    def _forget_but(self, begins: Collection[int]) -> None:
        """Keeps what is known of these places of host memory, and of no other."""
        self._known = {begin: each for begin, each in self._known.items() if begin in begins}

    def _unchanged(self, slots: Sequence[Slot]) -> set[int]:
        """The places of those whose bytes the host has."""
        if not slots:
            return set()
        before = torch.stack([self._known[each.begin][2] for each in slots])
        now = torch.stack([_fingerprint(each.bytes()) for each in slots])
        same = (before == now).tolist()
        return {each.begin for each, is_same in zip(slots, same, strict=True) if is_same}

    def _copy(self, slots: Sequence[Slot], *, comes: bool) -> None:
        """Begins to copy storages between device and host, beside the current stream.

        That has nothing to do before which writes or reads them: the caller has waited for it.
        """
        with self._copies.after(self._device):
            for address, begin, count in _runs(slots):
                other, host = _bytes_at(address, count, self._device), self._host
                part = host[begin : begin + count]
                copy_spans(part, other, [(0, count)], comes=comes, is_pinned=True)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _pieces(slots: Sequence[Slot]) -> Iterator[Sequence[Slot]]:
    """Storages that get their memory together, while those before them are copied."""
    begin = nbytes = 0
    for number, slot in enumerate(slots, 1):
        nbytes += _up(slot.nbytes)
        if nbytes >= _PIECE or number == len(slots):
            yield slots[begin:number]
            begin, nbytes = number, 0


def _runs(slots: Sequence[Slot]) -> Iterator[tuple[int, int, int]]:
    """The address, the place in host memory and the bytes of storages that can go in one copy.

    How neighbours lie in an allocation is known of torch's own allocator alone.
    """
    on_gpu = any(each.storage.device.type == "cuda" for each in slots[:1])
    are_joined = not on_gpu or torch.cuda.get_allocator_backend() == "native"
    address = begin = count = 0
    end = -1
    for slot in slots:
        at = slot.storage.data_ptr()
        goes_on = at - address == slot.begin - begin and slot.begin == end
        if not (are_joined and goes_on) or at % _SEGMENT == 0:
            if count:
                yield address, begin, count
            address, begin = at, slot.begin
        count = slot.begin + slot.nbytes - begin
        # On a GPU what is between two storages is of the first one's memory alone.
        end = slot.end if on_gpu else slot.begin + slot.nbytes
    if count:
        yield address, begin, count
