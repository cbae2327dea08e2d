"""Named tensors that move together between the two memories of a slab.

**What is where.** The tensors are views of one slab, either of its host memory or of its device
memory; what is of neither yet (a gradient, state of the first step) joins at the next move. The
objects stay: a move assigns their `data`.

**What autograd has saved.** It keeps views of the device slab, which are right again once the slab
has been filled with the same bytes, and have no memory before. Torch compares the version of a
tensor with the one at which it was saved, so each memory has a count of its own: a tensor that
moves takes the count of the memory that it comes to, one further if its elements have changed
since it was there. A graph of evicted tensors is refused by that, and is right after `load()`, as
is one whose tensors have changed on the host.

**Errors at any line.** First all is copied, then the tensors are let see the copy one by one, and
only then the memory that they have left goes: each is whole all the while, and another call
completes the move.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from speedtorch.layers.slab import Memory, Slab, check_packable
from speedtorch.layers.transfer_stats import TransferStats
from speedtorch.torch_internals import set_versions, version_of

__all__ = ["Members", "Pack"]

# Versions are 32 bits; those of the host are the upper half, so that none means both memories.
_HOST_VERSIONS = 1 << 31


class Members(NamedTuple):
    """The tensors of a pack by names that stay.

    `written`: those that may have changed although their versions have not, since they were copied.
    """

    tensors: dict[str, Tensor]
    written: Collection[str]


@contextmanager
def _no_inference() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def _plain_tensors() -> AbstractContextManager[None]:
    """What is made within is an ordinary tensor without a graph, whatever mode the caller is in."""
    return _no_inference() if torch.is_inference_mode_enabled() else torch.no_grad()


class Pack:
    """Tensors in host memory, or on the device; on the host at first.

    The caller of each move says which they are now, by names that stay. The device "cpu" is another
    part of host memory.
    """

    def __init__(self, device: torch.device, traffic: TransferStats | None = None) -> None:
        self.memory: Memory | None = Memory.HOST
        """Where they are; None after an error within a move, until another completes it."""
        self._held: dict[weakref.ref[Tensor], str] = {}
        """Views that keep a device slab which evict() has left to them, with names."""
        self._placed: dict[str, weakref.ref[Tensor]] = {}
        """The tensor that has the place of each name."""
        self._counted: dict[str, int] = {}
        """Where tensors are that were given other memory there, once their versions say so."""
        # Not one dict of pairs: thousands of these would set off collections of cycles.
        self._host_versions: dict[str, int] = {}
        self._device_versions: dict[str, int] = {}
        """The last version of each tensor in each memory."""
        with _plain_tensors():
            self.slab = Slab({}, device, traffic=traffic)
        """Of now: a tensor that joins may need another."""

    def has_place(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor is the one of that name in one of the memories."""
        return self.slab.where({name: tensor})[name] is not None

    def has_all(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether each of them has moved by that name before."""
        placed = self._placed
        return all(name in placed and placed[name]() is each for name, each in tensors.items())

    def held_by(self) -> list[str]:
        """Views that keep device memory which evict() has left to them, as text."""
        self._held = {view: text for view, text in self._held.items() if view() is not None}
        return list(self._held.values())

    def on_host(self, members: Members) -> dict[int, Tensor]:
        """What the host has of those on the device, by their address there; see write_back()."""
        tensors = members.tensors
        return {
            tensors[name].data_ptr(): self.slab.view(name, Memory.HOST)
            for name, memory in self.slab.where(tensors).items()
            if memory is Memory.DEVICE
        }

    def begin(self, tensors: Mapping[str, Tensor]) -> bool:
        """Begins to copy the host slab to the device if these tensors seem to be all of it.

        Looking at each tensor lasts long where there are thousands: bring() or load() does so next,
        and is told whether this has begun. The tensors stay on the host, and the copy harms none.
        """
        if self.slab.is_filled or self.slab.memory_at(tensors) is not Memory.HOST:
            return False
        with _plain_tensors():
            self.slab.copy_to(Memory.DEVICE, tensors, ())
        return True

    def bring(self, members: Members, *, begun: bool = False) -> None:
        """Begins to copy all to the device, where load() finds it.

        The tensors stay on the host until then. What changes there meanwhile is copied again. After
        an error, as of load(), nothing has changed.
        """
        if begun or not self.slab.is_filled:
            self._filled(members, begun=begun)

    def load(self, members: Members, *, begun: bool = False) -> None:
        """Brings all to the device, beside the current stream, which must join `slab.coming`.

        Tensors that were assigned there stay where they are. After an error all is where it was: of
        the device torch's (torch.OutOfMemoryError), of a tensor that came on the host as of
        evict().
        """
        copied: Collection[str] = ()
        if begun or not self.slab.is_filled:
            at, copied = self._filled(members, begun=begun), members.tensors
        else:
            at = self._packed(members)
        if at:
            with _plain_tensors():
                self._move(members, at, Memory.DEVICE, copied)
        self.memory = Memory.DEVICE

    def _filled(self, members: Members, *, begun: bool) -> dict[str, Memory | None]:
        """As _packed(); the device slab has all bytes of the host slab then, or is about to."""
        tensors = members.tensors
        try:
            if not begun:
                self.begin(tensors)
            with _plain_tensors():
                if at := self._packed(members, search=False):
                    if not self.slab.is_filled:
                        self.slab.copy_to(Memory.DEVICE, tensors, ())
                    self._count(self._changed(tensors), tensors, at)
        except BaseException:
            self.slab.empty()  # no tensor is there
            raise
        if not at:
            self.slab.empty()
        return at

    def _packed(self, members: Members, *, search: bool = True) -> dict[str, Memory | None]:
        """Where in the slab they are, with all of them in it; none if all are on the device.

        `search`: as of evict().
        """
        at = self.slab.where(members.tensors)
        if self._is_there(members, at):
            self._count_given(members, at)
            return {}
        if None in at.values():
            self.evict(members, search=search)
            at = self.slab.where(members.tensors)
        return at

    def _is_there(self, members: Members, at: Mapping[str, Memory | None]) -> bool:
        """Whether all of them are on the device, in its slab or elsewhere."""
        if Memory.HOST in at.values():
            return False
        others = [members.tensors[name] for name, memory in at.items() if memory is None]
        return all(each.device == self.slab.device for each in others)

    def new_bytes(self, members: Members) -> int:
        """Bytes on the device that evict() would copy now."""
        at = self.slab.where(members.tensors)
        there = {n: each for n, each in members.tensors.items() if at[n] is not Memory.HOST}
        changed = self._changed(there).union(members.written)
        return sum(each.nbytes for name, each in there.items() if name in changed)

    def other_bytes(self, members: Members) -> int:
        """Bytes on the device that came since they were loaded; raises as evict() would for one."""
        at, count = self.slab.where(members.tensors), 0
        for name, each in members.tensors.items():
            if at[name] is None and each.device == self.slab.device:
                check_packable(name, each)
                count += each.nbytes
        return count

    def missing_bytes(self, members: Members) -> int:
        """Bytes of device memory that load() would take."""
        missing = self.slab.missing_bytes
        if missing and self._is_there(members, self.slab.where(members.tensors)):
            return 0
        return missing

    def needed_bytes(self, members: Members) -> int:
        """Bytes of device memory with all of them there."""
        if not members.tensors:
            return 0
        return self.other_bytes(members) + (self.slab.device_bytes or self.missing_bytes(members))

    def begin_back(
        self, members: Members, after: torch.cuda.Event | None = None
    ) -> Collection[str]:
        """Begins to copy to the host what is said to have changed, before each tensor is looked at.

        Returns the names of that, for evict(), which is called next. Nothing is written that a
        tensor may have on the host: all have their addresses on the device.
        """
        written = members.written
        if not written or self.slab.memory_at(members.tensors) is not Memory.DEVICE:
            return ()
        written = members.tensors.keys() & written
        with _plain_tensors():
            self.slab.copy_to(Memory.HOST, written, (), after)
        return written

    def write_back(self, members: Members, after: torch.cuda.Event | None = None) -> None:
        """Begins to copy what is new on the device to the host, where evict() finds it.

        Tensors that were assigned since the load are left out. As the host is told now that it has
        all, `written` is of what changes from now on.
        """
        slab, tensors = self.slab, members.tensors
        if not slab.device_bytes:
            return
        with _plain_tensors():
            copied = self.begin_back(members, after)
            at = slab.where(tensors)
            there = {name: each for name, each in tensors.items() if at[name] is Memory.DEVICE}
            new = self._changed(there)
            settled = [name for name, memory in at.items() if memory is Memory.HOST]
            changed = new.union(there.keys() & members.written).difference(copied)
            slab.copy_to(Memory.HOST, changed, settled, after)
        self._count(new, there, at)

    def evict(
        self,
        members: Members,
        after: torch.cuda.Event | None = None,
        *,
        search: bool = True,
        copied: Collection[str] = (),
    ) -> int:
        """Brings all to the host, and what is new of it; returns the device bytes that are free.

        0 if all was on the host. Views that Python programs keep of the device slab keep its memory
        as well; see held_by(). TypeError, ValueError for a tensor that came and cannot be packed,
        and MemoryError if the host has too little for what came, leave all where it was.

        The copy begins `after` the end of their last use, or after all that the current stream has
        by now. To `search` is to look for such views among all objects if there may be some;
        without it they have no memory from now on, as what autograd has saved has none until the
        next load. begin_back() has given what is `copied`.
        """
        tensors, left = members.tensors, self.slab
        if not tensors and not left.device_bytes:
            self.memory = Memory.HOST
            return 0
        with _plain_tensors():
            at = left.where(tensors)
            if None in at.values():
                if not left.fits(tensors, at) or self._is_replaced(tensors, at):
                    self.slab = Slab(tensors, left.device, traffic=left.traffic)
                    # Graphs have what all of them leave.
                    self._placed = {name: weakref.ref(each) for name, each in tensors.items()}
                    self._counted.clear()
                elif not tensors.keys() <= left.places.keys():
                    self._grow(members, at)
                at = self.slab.where(tensors)
            self._move(members, at, Memory.HOST, copied)
        self.memory = Memory.HOST
        # All tensors are on the host: they need no slab's device memory.
        slabs = dict.fromkeys((left, self.slab))
        if search and left.device_bytes and left.is_held:
            held = left.held_by(list(tensors.values()))
            self._held |= held
            if held:
                for slab in slabs:
                    slab.leave()
                return 0
        return sum([slab.empty(after) for slab in slabs])

    def _is_replaced(self, tensors: Mapping[str, Tensor], at: Mapping[str, Memory | None]) -> bool:
        """Whether the place of a tensor that has come is that of another, which lives there."""
        came = [name for name, memory in at.items() if memory is None and name in self._placed]
        former = [(name, each) for name in came if (each := self._placed[name]()) is not None]
        return any(
            each is not tensors[name] and self.has_place(name, each) for name, each in former
        )

    def _grow(self, members: Members, at: Mapping[str, Memory | None]) -> None:
        """Brings all to the host that has a place, and makes a larger slab around that."""
        left, tensors = self.slab, members.tensors
        held = {name: each for name, each in tensors.items() if name in left.places}
        self._move(Members(held, members.written), at, Memory.HOST)
        self.slab = Slab(tensors, left.device, left, left.traffic)
        for name, tensor in held.items():
            # The memory that it leaves stays as it is: versions do so, too.
            tensor.data = self.slab.view(name, Memory.HOST)

    def _move(
        self,
        members: Members,
        at: Mapping[str, Memory | None],
        memory: Memory,
        copied: Collection[str] = (),
    ) -> None:
        """Lets all tensors be in a memory, where what they are elsewhere is copied to first.

        What is `copied` has been, or is about to be.
        """
        slab = self.slab
        leaving, settled = members.tensors, [name for name in at if at[name] is memory]
        if settled:
            leaving = {name: each for name, each in leaving.items() if at[name] is not memory}
        if not leaving:
            return
        elsewhere = [name for name in leaving if at[name] is None]
        new = self._changed(leaving).union(elsewhere)
        changed = new.union(members.written).intersection(leaving).difference(elsewhere, copied)
        slab.copy_to(memory, changed, settled)
        self._count(new, leaving, at)
        comes = memory is Memory.DEVICE
        of_memory = self._device_versions if comes else self._host_versions
        versions = tuple([of_memory[name] for name in leaving])
        views = [slab.view(name, memory) for name in leaving]
        if not comes:
            slab.leaving.finish()  # the copy may span the places of those that are elsewhere
        for name in elsewhere:
            slab.take(name, leaving[name])
        self.memory = None
        set_versions(tuple(leaving.values()), versions)
        for tensor, view in zip(leaving.values(), views, strict=True):
            tensor.data = view
        for name in elsewhere:
            self._placed[name] = weakref.ref(leaving[name])
            self._counted.pop(name, None)

    def _count_given(self, members: Members, at: Mapping[str, Memory | None]) -> None:
        """Gives tensors that have got other memory on the device a version that no graph knows.

        Torch counts no `tensor.data = values`. A graph that is made from now on is right once they
        have moved with their elements, and one that has saved what was there before is not.
        """
        for name in [name for name, memory in at.items() if memory is None]:
            tensor = members.tensors[name]
            if not self._is_known(name, tensor):
                version, device = version_of(tensor), self._device_versions.get(name, 0)
                on_device = version if version < _HOST_VERSIONS else 0
                set_versions((tensor,), (max(on_device, device) + 1,))
                self._counted[name] = tensor.data_ptr()

    def _is_known(self, name: str, tensor: Tensor) -> bool:
        """Whether graphs that have saved a tensor which is elsewhere have these elements of it."""
        if tensor.device != self.slab.device or self.slab.has(tensor):
            return False
        placed = self._placed.get(name)
        is_other = placed is None or placed() is not tensor
        return is_other or self._counted.get(name) == tensor.data_ptr()

    def _changed(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """Names of those whose elements have changed since they were copied, or never were."""
        host, device = self._host_versions, self._device_versions
        return {
            name
            for name, each in tensors.items()
            if device.get(name) != version_of(each) != host.get(name)
        }

    def _count(
        self,
        names: Iterable[str],
        tensors: Mapping[str, Tensor],
        at: Mapping[str, Memory | None],
    ) -> None:
        """Notes that tensors' elements have changed, at their versions, in the memory they leave.

        Graphs of the memory that one leaves are right if they have saved these very elements.
        """
        on_host, on_device = self._host_versions, self._device_versions
        for name in names:
            version, left = version_of(tensors[name]), at[name]
            host, device = on_host.get(name, _HOST_VERSIONS), on_device.get(name, 0)
            if left is None and version < _HOST_VERSIONS and self._is_known(name, tensors[name]):
                on_device[name] = version
                on_host[name] = host + 1
                continue
            # The last of the two says that it is counted, should Ctrl-C come in between.
            if version >= _HOST_VERSIONS:
                on_device[name] = device + 1
                on_host[name] = max(host, version + (left is not Memory.HOST))
            else:
                on_host[name] = host + 1
                on_device[name] = max(device, version + (left is not Memory.DEVICE))
