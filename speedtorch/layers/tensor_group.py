"""Named tensors that move together between host memory and device memory of a flat buffer.

**Location.** The tensors are views of one flat buffer, either of its host memory or of its device
memory. A tensor in neither (a gradient, state of the first step) joins the buffer at the next move.
Tensor objects do not change: a move assigns their `data`.

**Saved tensors.** Autograd keeps views of the device buffer. These views have no memory after
eviction, and are valid again after the buffer is filled with the same bytes. Torch compares a
tensor's version with its version when it was saved, which differs between the memories. A backward
through evicted tensors therefore raises, and works after `load()`. If saved tensors have changed on
the host, the backward still raises.

**Exceptions at any line.** A move first copies all bytes, then assigns `data` tensor by tensor, and
frees the old memory last. Each tensor is complete at any time, and another call completes the move.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from speedtorch.layers.access_tracker import untracked
from speedtorch.layers.flat_buffer import FlatBuffer, Memory, check_packable
from speedtorch.layers.host_versions import ON_HOST, changes_of
from speedtorch.layers.transfer_stats import TransferStats
from speedtorch.torch_internals import set_versions, version_of

__all__ = ["Members", "TensorGroup"]

_Where: TypeAlias = Mapping[str, Memory | None]


class Members(NamedTuple):
    """The tensors of a group by names that do not change.

    `written`: names of tensors that may have changed since their copy without a new version.
    """

    tensors: dict[str, Tensor]
    written: Collection[str]


class TensorGroup:
    """Tensors in host memory, or on the device; in host memory at first.

    The caller passes the current tensors to each move, by names that do not change, and runs
    as an `untracked` function. The device "cpu" is another part of host memory.
    """

    @untracked
    def __init__(self, device: torch.device, traffic: TransferStats | None = None) -> None:
        self.memory: Memory | None = Memory.HOST
        """Where the tensors are; None after an interrupted move, until another completes it."""
        self._held: dict[weakref.ref[Tensor], str] = {}
        """Views that keep a device buffer alive after evict(), with their descriptions."""
        self._placed: dict[str, weakref.ref[Tensor]] = {}
        """The tensor in the place of each name."""
        self._replaced_addresses: dict[str, int] = {}
        """Device addresses of tensors whose memory was replaced, once they have a new version."""
        self._versions: dict[str, int] = {}
        """The version of each tensor at its last copy, without the bit of host memory."""
        self.buffer = FlatBuffer({}, device, traffic=traffic)
        """The current buffer; replaced if a joining tensor does not fit."""

    def has_place(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor lies in the place of a name, in either memory."""
        return self.buffer.where({name: tensor})[name] is not None

    def has_all(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether each tensor has moved under its name before."""
        return all(self._is_placed(name, tensor) for name, tensor in tensors.items())

    def _is_placed(self, name: str, tensor: Tensor) -> bool:
        placed = self._placed.get(name)
        return placed is not None and placed() is tensor

    def held_by(self) -> list[str]:
        """Descriptions of views that keep device memory alive after evict()."""
        self._held = {view: text for view, text in self._held.items() if view() is not None}
        return list(self._held.values())

    def on_host(self, members: Members) -> dict[int, Tensor]:
        """Host views of the tensors on the device, by device address; see write_back()."""
        tensors = members.tensors
        return {
            tensors[name].data_ptr(): self.buffer.view(name, Memory.HOST)
            for name, memory in self.buffer.where(tensors).items()
            if memory is Memory.DEVICE
        }

    def begin_load(self, tensors: Mapping[str, Tensor]) -> bool:
        """Starts a copy of the host buffer to the device if it seems to contain all these tensors.

        A check of thousands of tensors is slow, so the copy starts before the check in prefetch()
        or load(). Call one of these next, with the result as `begun`. No tensor changes.
        """
        if self.buffer.is_filled or self.buffer.memory_at(tensors) is not Memory.HOST:
            return False
        self.buffer.copy_to(Memory.DEVICE, tensors, ())
        return True

    def prefetch(self, members: Members, *, begun: bool = False) -> None:
        """Starts a copy of all tensors to the device, for load().

        The tensors remain on the host until load(), which copies later changes again. Raises like
        load(); nothing has changed then.
        """
        if begun or not self.buffer.is_filled:
            self._filled(members, begun=begun)

    def load(self, members: Members, *, begun: bool = False) -> None:
        """Loads all tensors to the device on a side stream, which the current stream joins.

        Tensors assigned on the device keep their memory. Raises torch.OutOfMemoryError, and for new
        tensors on the host the errors of evict(). After an error no tensor has moved.
        """
        copied: Collection[str] = ()
        if begun or not self.buffer.is_filled:
            where, copied = self._filled(members, begun=begun), members.tensors
        else:
            where = self._packed(members)
        if where:
            self._move(members, where, Memory.DEVICE, copied)
        self.memory = Memory.DEVICE
        self.buffer.load_stream.join()

    def _filled(self, members: Members, *, begun: bool) -> dict[str, Memory | None]:
        """Like _packed(), and starts a copy of the whole host buffer to the device buffer."""
        tensors = members.tensors
        try:
            if not begun:
                self.begin_load(tensors)
            if where := self._packed(members, search=False):
                if not self.buffer.is_filled:
                    self.buffer.copy_to(Memory.DEVICE, tensors, ())
                self._record_versions(self._changed(tensors), tensors, where)
        except BaseException:
            self.buffer.empty()  # no tensor is in the device buffer
            raise
        if not where:
            self.buffer.empty()
        return where

    def _packed(self, members: Members, *, search: bool = True) -> dict[str, Memory | None]:
        """Adds all tensors to the buffer, and returns their places; empty if all are on the device.

        `search` is passed to evict().
        """
        where = self.buffer.where(members.tensors)
        if self._is_on_device(members, where):
            self._count_replaced(members, where)
            return {}
        if None in where.values() or self._is_replaced(members.tensors, where):
            self.evict(members, search=search)
            where = self.buffer.where(members.tensors)
        return where

    def _is_on_device(self, members: Members, where: _Where) -> bool:
        """Whether all tensors are on the device, in the buffer or elsewhere."""
        if Memory.HOST in where.values():
            return False
        outside = [members.tensors[name] for name, memory in where.items() if memory is None]
        return all(tensor.device == self.buffer.device for tensor in outside)

    def new_bytes(self, members: Members) -> int:
        """Bytes on the device that evict() would copy now."""
        where = self.buffer.where(members.tensors)
        loaded = {n: value for n, value in members.tensors.items() if where[n] is not Memory.HOST}
        changed = self._changed(loaded).union(members.written)
        return sum(tensor.nbytes for name, tensor in loaded.items() if name in changed)

    def other_bytes(self, members: Members) -> int:
        """Bytes of tensors added on the device since load(); raises like evict() for them."""
        where, count = self.buffer.where(members.tensors), 0
        for name, tensor in members.tensors.items():
            if where[name] is None and tensor.device == self.buffer.device:
                check_packable(name, tensor)
                count += tensor.nbytes
        return count

    def missing_bytes(self, members: Members) -> int:
        """Bytes of device memory that load() would allocate."""
        missing = self.buffer.missing_bytes
        if missing and self._is_on_device(members, self.buffer.where(members.tensors)):
            return 0
        return missing

    def begin_write_back(
        self, members: Members, after: torch.cuda.Event | None = None
    ) -> Collection[str]:
        """Starts a copy of the `written` tensors to the host, before each tensor is checked.

        Returns the copied names, for evict(), which is called next. The copy overwrites no tensor
        in host memory, because all tensors are on the device.
        """
        written = members.written
        if not written or self.buffer.memory_at(members.tensors) is not Memory.DEVICE:
            return ()
        written = members.tensors.keys() & written
        self.buffer.copy_to(Memory.HOST, written, (), after)
        return written

    def write_back(self, members: Members, after: torch.cuda.Event | None = None) -> None:
        """Starts a copy of changed tensors on the device to the host, for evict().

        Tensors assigned since the load are not copied. The host copies count as current from here
        on: `written` of later calls must name later changes only.
        """
        buffer, tensors = self.buffer, members.tensors
        if not buffer.device_bytes:
            return
        copied = self.begin_write_back(members, after)
        where = buffer.where(tensors)
        loaded = {n: value for n, value in tensors.items() if where[n] is Memory.DEVICE}
        new = self._changed(loaded)
        settled = [name for name, memory in where.items() if memory is Memory.HOST]
        changed = new.union(loaded.keys() & members.written).difference(copied)
        buffer.copy_to(Memory.HOST, changed, settled, after)
        self._record_versions(new, loaded, where)

    def evict(
        self,
        members: Members,
        after: torch.cuda.Event | None = None,
        *,
        search: bool = True,
        copied: Collection[str] = (),
    ) -> int:
        """Moves all tensors to the host, copies changed ones, and returns the device bytes freed.

        Args:
            members: the current tensors.
            after: the end of the last use. The device memory is reused after this event, or after
                all queued work of the current stream. The copy always follows the current stream.
            search: looks among all Python objects for views of the device buffer. Such views keep
                its memory, and 0 is returned; see held_by(). Without it such views have no memory
                afterwards, like tensors saved by autograd until the next load. Tensors that were
                replaced or removed keep their memory in any case.
            copied: the names that begin_write_back() returned.

        Raises:
            TypeError, ValueError: a new tensor cannot be packed.
            MemoryError: the host has too little memory for new tensors.

        After such an error no tensor has moved.
        """
        tensors, former = members.tensors, self.buffer
        if not tensors and not former.device_bytes:
            self.memory = Memory.HOST
            return 0
        where = former.where(tensors)
        is_replaced = self._is_replaced(tensors, where)
        if is_replaced or None in where.values():
            if is_replaced or not former.fits(tensors, where):
                self.buffer = FlatBuffer(tensors, former.device, traffic=former.traffic)
                # Graphs may have saved the former memory of each tensor.
                self._placed = {name: weakref.ref(value) for name, value in tensors.items()}
                self._replaced_addresses.clear()
            elif not tensors.keys() <= former.places.keys():
                self._grow(members, where)
            where = self.buffer.where(tensors)
        self._move(members, where, Memory.HOST, copied)
        self.memory = Memory.HOST
        # All tensors are on the host: they need no buffer's device memory.
        buffers = dict.fromkeys((former, self.buffer))
        if (search or is_replaced) and former.device_bytes and former.is_held:
            held = former.held_by(list(tensors.values()))
            self._held |= held
            if held:
                for buffer in buffers:
                    buffer.drop_device_storage()
                return 0
        return sum([buffer.empty(after) for buffer in buffers])

    def _is_replaced(self, tensors: Mapping[str, Tensor], where: _Where) -> bool:
        """Whether a living tensor, which is no longer the tensor of its name, still has its place.

        Such a tensor keeps the former buffer's memory. `where` has the places of `tensors`.
        """
        if None not in where.values() and len(self._placed) <= len(tensors):
            return False
        placed = {
            name: tensor for name, ref in self._placed.items() if (tensor := ref()) is not None
        }
        self._placed = {name: self._placed[name] for name in placed}
        current = set(map(id, tensors.values()))
        return any(
            tensor is not tensors.get(name)
            and (where.get(name) is None if name in tensors else id(tensor) not in current)
            and self.has_place(name, tensor)
            for name, tensor in placed.items()
        )

    def _grow(self, members: Members, where: _Where) -> None:
        """Moves tensors with a place to the host, and creates a larger buffer with their memory."""
        former, tensors = self.buffer, members.tensors
        placed = {name: value for name, value in tensors.items() if name in former.places}
        self._move(Members(placed, members.written), where, Memory.HOST)
        self.buffer = FlatBuffer(tensors, former.device, former, former.traffic)
        for name, tensor in placed.items():
            # The new buffer keeps the old buffer's elements, so versions do not change.
            tensor.data = self.buffer.view(name, Memory.HOST)

    def _move(
        self,
        members: Members,
        where: _Where,
        memory: Memory,
        copied: Collection[str] = (),
    ) -> None:
        """Copies changed tensors to a memory, and then assigns `data` of all tensors.

        The tensors in `copied` are not copied again.
        """
        buffer = self.buffer
        moved, settled = members.tensors, [name for name in where if where[name] is memory]
        if settled:
            moved = {name: tensor for name, tensor in moved.items() if where[name] is not memory}
        if not moved:
            return
        elsewhere = [name for name in moved if where[name] is None]
        new = self._changed(moved).union(elsewhere)
        changed = new.union(members.written).intersection(moved).difference(elsewhere, copied)
        buffer.copy_to(memory, changed, settled)
        self._record_versions(new, moved, where)
        is_load = memory is Memory.DEVICE
        bit = 0 if is_load else ON_HOST
        versions = tuple([self._versions[name] | bit for name in moved])
        views = [buffer.view(name, memory) for name in moved]
        if not is_load:
            buffer.write_back_stream.finish()  # the copy may span places that store() fills below
        for name in elsewhere:
            buffer.store(name, moved[name])
        self.memory = None
        set_versions(tuple(moved.values()), versions)
        for tensor, view in zip(moved.values(), views, strict=True):
            tensor.data = view
        for name in elsewhere:
            self._placed[name] = weakref.ref(moved[name])
            self._replaced_addresses.pop(name, None)

    def _count_replaced(self, members: Members, where: _Where) -> None:
        """Sets a new version for tensors whose memory on the device was replaced.

        Torch does not count `tensor.data = values`. With the new version, graphs created from here
        on remain valid after a move, and graphs that saved the old memory raise.
        """
        for name in [name for name, memory in where.items() if memory is None]:
            tensor = members.tensors[name]
            if not self._is_known(name, tensor):
                set_versions((tensor,), (changes_of(tensor) + 1,))
                self._replaced_addresses[name] = tensor.data_ptr()

    def _is_known(self, name: str, tensor: Tensor) -> bool:
        """Whether graphs that saved a tensor outside the buffer have saved its current elements."""
        is_on_device = tensor.device == self.buffer.device and version_of(tensor) < ON_HOST
        if not is_on_device or self.buffer.has(tensor):
            return False
        is_counted = self._replaced_addresses.get(name) == tensor.data_ptr()
        return is_counted or not self._is_placed(name, tensor)

    def _changed(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """Names of tensors that have changed since their last copy, or were never copied."""
        known = self._versions
        return {
            name
            for name, value in tensors.items()
            # Another tensor of the same memory has another version counter.
            if known.get(name) != changes_of(value) or not self._is_placed(name, value)
        }

    def _record_versions(
        self,
        names: Iterable[str],
        tensors: Mapping[str, Tensor],
        where: _Where,
    ) -> None:
        """Records the versions of changed tensors, which have a new one if their memory is new.

        Graphs of a tensor's former memory remain valid if they saved its current elements.
        """
        for name in names:
            tensor, is_new = tensors[name], where[name] is None
            changes = changes_of(tensor)
            self._versions[name] = changes + (is_new and not self._is_known(name, tensor))
            if not is_new:
                self._placed[name] = weakref.ref(tensor)
