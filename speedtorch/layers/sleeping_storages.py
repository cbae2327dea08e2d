"""The memory of tensors, by storages: on the device, or in host memory while they sleep.

A storage loses its memory and gets some again, elsewhere or at the same addresses (see
device_memory.py), and stays the same object all the while. So whatever has a view of it has the
same values again: tied weights, tensors that are not contiguous, the flat buffers of
DistributedDataParallel and FSDP. Tensors that are known by name are in mapped host memory
meanwhile, as tensors of their device still, whose kernels reach it over the link: they can be read,
saved and loaded, and autograd and its hooks know no other tensors.

**Errors at any line.** First all is copied, then the tensors are let see the copy one by one, and
only then goes the memory that they have left: each is whole all the while. An error on the way to
sleep wakes all again, and what an error in that has left is completed by the next call.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speedtorch.layers.device_memory import DeviceMemory, KeptAddresses
from speedtorch.layers.discarded import BLANK
from speedtorch.layers.host_slab import copy_spans
from speedtorch.layers.slot import Slot, bytes_at, fall_asleep, wake_up, waking
from speedtorch.layers.transfer_stats import Memory
from speedtorch.memory import host_memory
from speedtorch.memory.host_memory import HostMemoryKind
from speedtorch.memory.side_stream import SharedSideStream
from speedtorch.torch_internals import storage_at

__all__ = ["SleepingStorages", "fingerprint", "times_moved"]

# Storages that are fingerprinted together: one by one small ones would take longer than to copy.
_GROUP = 1 << 25
# Of Weyl's sequence, which splitmix64 takes; as a signed number of 64 bits.
_GOLDEN = -0x61C8864680B583EB
# Words that are mixed at once.
_CHUNK = 1 << 22

_moved = 0


def times_moved() -> int:
    """How often storages have left the device: what knows an address asks whether it holds."""
    return _moved


def _count_move() -> None:
    global _moved
    _moved += 1


@dataclass(slots=True)
class _Known:
    """What bytes of host memory are: whose, and their fingerprint."""

    owners: list[tuple[weakref.ref[Tensor], int]]
    """Of each storage a tensor that has it, and its bytes."""
    fingerprint: Tensor

    def is_of(self, group: Sequence[Slot]) -> bool:
        """Whether these are the same storages."""
        return len(group) == len(self.owners) and all(
            owner() is slot.members[0].ref() and nbytes == slot.nbytes
            for slot, (owner, nbytes) in zip(group, self.owners, strict=True)
        )


def _groups(slots: Iterable[Slot]) -> Iterator[list[Slot]]:
    """Small storages together."""
    group: list[Slot] = []
    nbytes = 0
    for slot in slots:
        if group and nbytes + slot.nbytes > _GROUP:
            yield group
            group, nbytes = [], 0
        group.append(slot)
        nbytes += slot.nbytes
    if group:
        yield group


class SleepingStorages:
    """The storages of one part of a training state on one device.

    Host memory is made once and used again. The device "cpu" is another part of host memory.
    """

    def __init__(self, device: torch.device, *, keep_addresses: bool) -> None:
        self._device = device
        self.memory = (KeptAddresses if keep_addresses else DeviceMemory)(device)
        self._host = self._host_bytes(0)
        self._copies = SharedSideStream("training state")
        self._slots: list[Slot] = []
        """What sleeps, or is half way after an error."""
        self._filling: list[Slot] = []
        """What has memory again, but not yet its values."""
        self._known: dict[int, _Known] = {}
        """What the host's bytes are, by place."""
        self._shown: dict[int, tuple[tuple[object, ...], Sequence[Tensor]]] = {}
        """By place the layout of tensors, and what they are shown while they sleep."""

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
        return any(map(self.memory.is_here, self._slots))

    def sleep(self, slots: Sequence[Slot]) -> int:
        """Copies storages to host memory and empties them; returns the bytes that were copied.

        Nothing of this part sleeps before. All is awake after an error: the host has too little
        memory (MemoryError), or CUDA pins no more of it (RuntimeError).
        """
        # What may not have changed goes in one piece, if it has or has not.
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
        # What is about to be overwritten is not known any more, also if an error ends this.
        self._forget_but({each[0].begin for each in perhaps})
        looked_at = {id(slot) for each in perhaps for slot in each}
        surely = [each for each in kept if id(each) not in looked_at]
        # These go while the rest is looked at.
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
        """Fills the storages again that are still needed; returns the bytes that were copied.

        All sleeps on if the device has too little memory (torch.OutOfMemoryError).
        """
        is_here, unfilled = self.memory.is_here, {id(each) for each in self._filling}
        without = [each for each in self._slots if id(each) in unfilled or not is_here(each)]
        empty = [each for each in without if each.is_needed]
        seldom_written: list[Slot] = []
        try:
            self._filling = empty  # also where an error ends what undoes this
            for some in self.memory.come(empty):
                here = [each for each in some if each.is_kept]
                self._copy(here, Memory.DEVICE)
                if frozen := [each for each in here if each.is_frozen]:
                    self._copies.join()
                    seldom_written += frozen
            # The link is busy meanwhile with what comes after them.
            known = {each[0].begin: self._known_of(each) for each in _groups(seldom_written)}
            for slot in empty:
                if not slot.is_kept:
                    bytes_at(slot.storage.data_ptr(), slot.nbytes, self._device).fill_(BLANK)
            tensors = waking(self._slots)
            self._wait()  # or another thread would see memory that has nothing yet
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
        """Leaves host memory that one of these has to it, as load_state_dict(assign=True) assigns.

        Nothing of this part sleeps.
        """
        begin, count = self._host.data_ptr(), self._host.nbytes
        if count and any(0 <= each.data_ptr() - begin < count for each in storages):
            self.release()

    def release(self) -> None:
        """Gives host memory back, which goes once no sleeping tensor has it."""
        self._host, self._known, self._shown = self._host_bytes(0), {}, {}

    def _host_bytes(self, count: int) -> Tensor:
        """Host memory `[count]` that kernels of the device reach."""
        memory: HostMemoryKind = "registered" if self._device.type == "cuda" else "plain"
        return host_memory.empty(count, dtype=torch.uint8, memory=memory)

    def _asleep(self, slot: Slot) -> tuple[tuple[object, ...], Sequence[Tensor]]:
        layout, shown = slot.layout(), self._shown.get(slot.begin)
        if shown is not None and shown[0] == layout:
            return shown
        # The slot's bytes of host memory, as a storage of the device.
        storage = storage_at(self._host.data_ptr() + slot.begin, self._device, slot.nbytes)
        vars(storage)["host"] = self._host  # torch keeps the object as long as the memory is used
        return layout, slot.asleep(storage)

    def _known_of(self, group: Sequence[Slot]) -> _Known:
        parts = [bytes_at(address, count, self._device) for address, _, count in self._runs(group)]
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        return _Known([(each.members[0].ref, each.nbytes) for each in group], fingerprint(values))

    def _forget_but(self, begins: Collection[int]) -> None:
        """Keeps what is known of these places of host memory, and of no other."""
        self._known = {begin: each for begin, each in self._known.items() if begin in begins}

    def _unchanged(self, groups: Sequence[Sequence[Slot]]) -> set[int]:
        """The places of those whose bytes the host has."""
        if not groups:
            return set()
        before = torch.stack([self._known[each[0].begin].fingerprint for each in groups])
        now = torch.stack([self._known_of(each).fingerprint for each in groups])
        same = (before == now).tolist()
        return {each[0].begin for each, is_same in zip(groups, same, strict=True) if is_same}

    def _copy(self, slots: Sequence[Slot], to: Memory) -> None:
        """Begins to copy storages between device and host, beside the current stream.

        That has nothing to do before which writes or reads them: the caller has waited for it.
        """
        with self._copies.after(self._device):
            for address, begin, count in self._runs(slots):
                host = self._host[begin : begin + count]
                there = bytes_at(address, count, self._device)
                copy_spans(host, there, [(0, count)], to=to)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _runs(self, slots: Sequence[Slot]) -> Iterator[tuple[int, int, int]]:
        """The address, the place in host memory and the bytes of what can go in one copy."""
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
            # On a GPU what is between two storages is of the first one's memory alone.
            end = slot.end if on_gpu else slot.begin + slot.nbytes
        if count:
            yield address, begin, count


def fingerprint(values: Tensor) -> Tensor:
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
