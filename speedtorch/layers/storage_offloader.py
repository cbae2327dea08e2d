"""StorageOffloader: storages whose memory is on the device, or in host memory while offloaded.

A storage loses its memory and receives memory again, at new or at the same addresses (see
device_memory.py), but remains the same object. All its views therefore have the same values again:
tied weights, non-contiguous tensors, and flat buffers of DistributedDataParallel and FSDP.
Meanwhile, known tensors are in mapped host memory but still report their device, whose kernels
access it over the link (PCIe or NVLink-C2C). They can be read, saved and loaded. Tensor objects
remain the same for autograd and its hooks.

**Exceptions at any line.** First all bytes are copied, then the tensors are pointed to the copy one
by one, and only then is the device memory freed. Each tensor is complete at any time. An exception
in sleep() wakes all storages. The next call completes a wake that an exception interrupted.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speedtorch.layers.device_memory import DeviceMemory, KeptAddresses
from speedtorch.layers.discarded import BLANK
from speedtorch.layers.host_buffer import copy_spans
from speedtorch.layers.offloaded_storage import (
    OffloadedStorage,
    bytes_at,
    fall_asleep,
    wake_up,
    waking,
)
from speedtorch.layers.transfer_stats import Memory
from speedtorch.memory import host_memory
from speedtorch.memory.host_memory import HostMemoryKind
from speedtorch.memory.side_stream import SharedSideStream
from speedtorch.torch_internals import storage_at

__all__ = ["StorageOffloader", "fingerprint", "times_moved"]

# Bytes of storages that are fingerprinted together: singly, small ones take longer than a copy.
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


@dataclass(slots=True)
class _Known:
    """Owners and fingerprint of a group's bytes in host memory."""

    owners: list[tuple[weakref.ref[Tensor], int]]
    """For each storage, one tensor that uses it, and its byte count."""
    fingerprint: Tensor

    def is_of(self, group: Sequence[OffloadedStorage]) -> bool:
        """Whether the group consists of the same storages."""
        return len(group) == len(self.owners) and all(
            owner() is slot.members[0].ref() and nbytes == slot.nbytes
            for slot, (owner, nbytes) in zip(group, self.owners, strict=True)
        )


def _groups(slots: Iterable[OffloadedStorage]) -> Iterator[list[OffloadedStorage]]:
    """Groups consecutive storages, up to _GROUP bytes if there are several."""
    group: list[OffloadedStorage] = []
    nbytes = 0
    for slot in slots:
        if group and nbytes + slot.nbytes > _GROUP:
            yield group
            group, nbytes = [], 0
        group.append(slot)
        nbytes += slot.nbytes
    if group:
        yield group


class StorageOffloader:
    """The storages of one part of a training state on one device.

    Host memory is allocated once and reused. With device "cpu", a second host memory is the device.
    """

    def __init__(self, device: torch.device, *, keep_addresses: bool) -> None:
        self._device = device
        self.memory = (KeptAddresses if keep_addresses else DeviceMemory)(device)
        self._host = self._host_bytes(0)
        self._copies = SharedSideStream("training state")
        self._slots: list[OffloadedStorage] = []
        """Offloaded storages, and partly offloaded ones after an exception."""
        self._filling: list[OffloadedStorage] = []
        """Storages that have device memory again, but not yet their values."""
        self._known: dict[int, _Known] = {}
        """Owners and fingerprints of host bytes, by host offset."""
        self._shown: dict[int, tuple[tuple[object, ...], Sequence[Tensor]]] = {}
        """By host offset, the layout of tensors, and their aliases in host memory."""

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory, in use or kept for reuse."""
        return self._host.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of offloaded storages."""
        return sum(each.nbytes for each in self._slots)

    @property
    def is_asleep(self) -> bool:
        """Whether any storage must be woken."""
        return bool(self._slots)

    @property
    def tensors(self) -> list[Tensor]:
        """The offloaded tensors."""
        return [each for slot in self._slots for _, each in slot.living()]

    @property
    def is_half_way(self) -> bool:
        """Whether an exception has left some storages on the device."""
        return any(map(self.memory.is_here, self._slots))

    def sleep(self, slots: Sequence[OffloadedStorage]) -> int:
        """Copies storages to host memory and frees their memory; returns the copied bytes.

        Nothing of this part may be offloaded before. Raises MemoryError if the host has too little
        memory, and RuntimeError if CUDA cannot pin more. All storages are then on the device.
        """
        # Frozen storages are sorted to the front and form contiguous groups for fingerprints.
        slots = sorted(slots, key=lambda each: (not each.is_frozen, self.memory.place(each)))
        end = 0
        for slot in slots:
            end = slot.take_place(end)
        if end > self._host.nbytes:
            self.release()
            self._host = self._host_bytes(end)
        kept = [each for each in slots if each.is_kept]
        perhaps = [
            group
            for group in _groups(each for each in kept if each.is_frozen)
            if (known := self._known.get(group[0].begin)) is not None and known.is_of(group)
        ]
        # Fingerprints of bytes about to be overwritten are dropped first, in case of an exception.
        self._forget_but({each[0].begin for each in perhaps})
        looked_at = {id(slot) for each in perhaps for slot in each}
        surely = [each for each in kept if id(each) not in looked_at]
        # These copies overlap the fingerprints of the rest.
        self._copy(surely, Memory.HOST)
        same = self._unchanged(perhaps)
        changed = [slot for each in perhaps if each[0].begin not in same for slot in each]
        self._forget_but(same)
        self._copy(changed, Memory.HOST)
        self._shown = {slot.begin: self._asleep(slot) for slot in slots if slot.is_kept}
        asleep = [
            self._shown[slot.begin][1] if slot.is_kept else slot.asleep(None) for slot in slots
        ]
        self._wait()
        self._slots = slots
        _count_move()
        try:
            fall_asleep(slots, asleep)
            self.memory.leave(slots)
        except BaseException:
            self.wake()
            raise
        return sum(each.nbytes for each in (*surely, *changed))

    def wake(self) -> int:
        """Allocates and fills storages that are still needed; returns the copied bytes.

        All remain offloaded if the device has too little memory (torch.OutOfMemoryError).
        """
        is_here, unfilled = self.memory.is_here, {id(each) for each in self._filling}
        without = [each for each in self._slots if id(each) in unfilled or not is_here(each)]
        empty = [each for each in without if each.is_needed]
        seldom_written: list[OffloadedStorage] = []
        try:
            self._filling = empty  # remains set if an exception interrupts the undo below
            for some in self.memory.come(empty):
                here = [each for each in some if each.is_kept]
                self._copy(here, Memory.DEVICE)
                if frozen := [each for each in here if each.is_frozen]:
                    self._copies.join()
                    seldom_written += frozen
            # Fingerprints overlap the copies of the remaining storages.
            known = {each[0].begin: self._known_of(each) for each in _groups(seldom_written)}
            for slot in empty:
                if not slot.is_kept:
                    bytes_at(slot.storage.data_ptr(), slot.nbytes, self._device).fill_(BLANK)
            tensors = waking(self._slots)
            self._wait()  # otherwise another thread could read memory before its copy ends
        except BaseException:
            self._wait()
            self.memory.leave(empty)
            raise
        self._filling = []
        _count_move()
        wake_up(tensors)
        self._slots, self._known = [], known
        return sum(each.nbytes for each in empty if each.is_kept)

    def spare(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Releases the host memory if one of the storages uses it, so it is not overwritten.

        load_state_dict(assign=True) can assign them. No storage of this part may be offloaded.
        """
        begin, count = self._host.data_ptr(), self._host.nbytes
        if count and any(0 <= each.data_ptr() - begin < count for each in storages):
            self.release()

    def release(self) -> None:
        """Releases host memory, which is freed once no tensor uses it."""
        self._host, self._known, self._shown = self._host_bytes(0), {}, {}

    def _host_bytes(self, count: int) -> Tensor:
        """Host memory `[count]` that device kernels can access."""
        memory: HostMemoryKind = "registered" if self._device.type == "cuda" else "plain"
        return host_memory.empty(count, dtype=torch.uint8, memory=memory)

    def _asleep(self, slot: OffloadedStorage) -> tuple[tuple[object, ...], Sequence[Tensor]]:
        layout, shown = slot.layout(), self._shown.get(slot.begin)
        if shown is not None and shown[0] == layout:
            return shown
        # A storage of the device over the slot's bytes of host memory.
        storage = storage_at(self._host.data_ptr() + slot.begin, self._device, slot.nbytes)
        vars(storage)["host"] = self._host  # keeps host memory alive as long as the storage
        return layout, slot.asleep(storage)

    def _known_of(self, group: Sequence[OffloadedStorage]) -> _Known:
        parts = [bytes_at(address, count, self._device) for address, _, count in self._runs(group)]
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        return _Known([(each.members[0].ref, each.nbytes) for each in group], fingerprint(values))

    def _forget_but(self, begins: Collection[int]) -> None:
        """Drops all fingerprints except those at these host offsets."""
        self._known = {begin: each for begin, each in self._known.items() if begin in begins}

    def _unchanged(self, groups: Sequence[Sequence[OffloadedStorage]]) -> set[int]:
        """Host offsets of groups whose bytes equal the host's bytes, by fingerprint."""
        if not groups:
            return set()
        before = torch.stack([self._known[each[0].begin].fingerprint for each in groups])
        now = torch.stack([self._known_of(each).fingerprint for each in groups])
        same = (before == now).tolist()
        return {each[0].begin for each, is_same in zip(groups, same, strict=True) if is_same}

    def _copy(self, slots: Sequence[OffloadedStorage], to: Memory) -> None:
        """Starts copies of storages between device and host on a side stream.

        The caller must have waited for all earlier work that reads or writes the storages.
        """
        with self._copies.after(self._device):
            for address, begin, count in self._runs(slots):
                host = self._host[begin : begin + count]
                there = bytes_at(address, count, self._device)
                copy_spans(host, there, [(0, count)], to=to)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _runs(self, slots: Sequence[OffloadedStorage]) -> Iterator[tuple[int, int, int]]:
        """Yields (device address, host offset, bytes) of runs that one copy can move."""
        on_gpu = self._device.type == "cuda"
        address = begin = count = 0
        end = -1
        for slot in slots:
            at = slot.storage.data_ptr()
            is_next = at - address == slot.begin - begin and slot.begin == end
            if not (is_next and self.memory.goes_on(at)):
                if count:
                    yield address, begin, count
                address, begin = at, slot.begin
            count = slot.begin + slot.nbytes - begin
            # On a GPU, the gap between two storages belongs to the first storage's allocation.
            end = slot.end if on_gpu else slot.begin + slot.nbytes
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
