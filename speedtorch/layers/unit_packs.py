"""UnitPacks: parameters and buffers, gradients, and optimizer state of a unit, in three packs.

A forward copies no state to the device, and a unit that has been stepped no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from speedtorch.layers.access_tracker import untracked
from speedtorch.layers.pack import Members, Pack
from speedtorch.layers.state_tensors import wrappers_in
from speedtorch.layers.transfers import Memory
from speedtorch.layers.unit_tensors import UnitTensors
from speedtorch.layers.unit_use import UnitUse

__all__ = ["UnitPacks", "host_copy", "shown_on_host"]

_Part: TypeAlias = tuple[Pack, Members]


class UnitPacks:
    """Moves the packs of a unit; if one cannot be moved, all are where they were.

    `made_state_bytes` are those of state made on the device, as other_bytes() counted them last.
    """

    def __init__(
        self, own: Pack, gradients: Pack, state: Pack, tensors: UnitTensors, use: UnitUse
    ) -> None:
        self.own, self.gradients, self.state = own, gradients, state
        self._all = own, gradients, state
        self._tensors, self._use = tensors, use
        self.made_state_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of host memory, and on the device if all of it is there."""
        return sum(pack.slab.nbytes for pack in self._all)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory, without tensors that were made on the device since the load."""
        own, gradients, state = self._all  # one by one: each call of a module asks several times
        return own.slab.device_bytes + gradients.slab.device_bytes + state.slab.device_bytes

    @property
    def memory(self) -> Memory | None:
        """Where parameters are; None after an error in a move, until another completes it."""
        return self.own.memory

    @property
    def is_held(self) -> bool:
        """Whether a graph or the program has views of the device memory."""
        return any(pack.slab.is_held for pack in self._all)

    def is_written_back(self, *, state_only: bool) -> bool:
        """Whether evict(), or evict_state(), would wait for no copy that write_back() has begun."""
        packs = self._all[2:] if state_only else self._all
        return all(pack.slab.transfers.to_host.is_done for pack in packs)

    def _parts(self) -> list[_Part]:
        """The packs and the tensors that are in them now."""
        return list(zip(self._all, self._use.members(), strict=True))

    @untracked
    def come(self, call: Callable[..., None], *, state: bool) -> None:
        """Calls Pack.bring or Pack.load for the packs, with optimizer state if it is asked for."""
        empty = [pack for pack in self._all if not pack.slab.device_bytes]
        if len(empty) == len(self._all):
            self._use.note_load()
        called: list[_Part] = []
        try:
            # Tensors are looked at while the copy is under way.
            is_begun = bool(self._tensors.known) and self.own.begin(self._tensors.known)
            parts = self._parts()
            for pack, members in parts if state else parts[:2]:
                called.append((pack, members))
                call(pack, members, begun=is_begun and pack is self.own)
            self._tensors.follow_inner()
        except BaseException as error:
            for pack in self._all:  # some may be on the device already
                pack.slab.transfers.to_device.join()
            for pack, members in called if isinstance(error, RuntimeError) else ():
                if pack in empty:
                    pack.evict(members)
            if self.own in empty and self.own.memory is Memory.HOST:
                self.own.slab.empty()
            raise

    def join(self, *, state: bool) -> None:
        """Lets the current stream wait for the copies to the device."""
        for pack in self._all if state else self._all[:2]:
            pack.slab.transfers.to_device.join()

    @untracked
    def write_back(
        self, after: torch.cuda.Event | None = None, *, state_only: bool = False
    ) -> None:
        """Begins to copy what is new on the device, but for gradients, or new optimizer state only.

        evict() waits for these copies, and copies what has changed meanwhile. `after` is the end of
        the unit's last use; None: all that the current stream has queued.
        """
        self._use.join_streams(after)
        (own, members), _, (of_state, state) = self._parts()
        if not state_only:
            own.write_back(members, after)
            if own.memory is Memory.DEVICE:
                self._use.note_copied()
        of_state.write_back(state, after)
        if of_state.memory is Memory.DEVICE:
            self._use.note_copied_state()

    def wait(self) -> None:
        """Waits for the copies that write_back() has begun."""
        for pack in self._all:
            pack.slab.transfers.to_host.finish()

    @untracked
    def evict(self, after: torch.cuda.Event | None, *, search: bool) -> int:
        """Moves all packs to the host; see Unit.evict()."""
        self._use.join_streams(after)
        freed, parts = 0, self._parts()[::-1]
        # All are on their way before the first is waited for.
        copied = [pack.begin_back(members) for pack, members in parts]
        for (pack, members), names in zip(parts, copied, strict=True):
            # Graphs have views of parameters and buffers only.
            is_searched = search or pack is not self.own
            freed += pack.evict(members, after, search=is_searched, copied=names)
        self._tensors.follow_inner()
        self._use.note_copied()
        self._use.note_copied_state()
        self.made_state_bytes = 0
        return freed

    @untracked
    def evict_state(self, after: torch.cuda.Event | None) -> int:
        """Moves optimizer state only to the host; returns the bytes that are free then."""
        self._use.join_streams(after)
        *_, (pack, members) = self._parts()
        freed = pack.evict(members, after)
        self._use.note_copied_state()
        self.made_state_bytes = 0
        return freed

    @untracked
    def free_gradients(self, after: torch.cuda.Event | None = None) -> None:
        """Frees the device memory of gradients if the program has dropped them all."""
        if self.gradients.slab.device_bytes and not self._tensors.found.gradients:
            self._use.join_streams(after)
            self.gradients.evict(Members({}, ()), after)

    @property
    def state_bytes(self) -> int:
        """Bytes of device memory of optimizer state, but for made_state_bytes."""
        return self.state.slab.device_bytes

    @property
    @untracked
    def has_new_tensors(self) -> bool:
        """Whether there are tensors that have never moved, which a graph must not save yet."""
        return not self.own.has_all(self._tensors.found.own)

    def held_by(self) -> list[str]:
        """Views that keep device memory of evicted tensors, as text."""
        return [view for pack in self._all for view in pack.held_by()]

    @untracked
    def missing_bytes(self, *, state: bool) -> int:
        """Bytes of device memory that Unit.load() would take."""
        count = 3 if state else 2
        if not any(pack.slab.missing_bytes for pack in self._all[:count]):
            return 0
        return sum(pack.missing_bytes(members) for pack, members in self._parts()[:count])

    @property
    @untracked
    def needed_bytes(self) -> int:
        """Bytes on the device with all tensors there."""
        return sum(pack.needed_bytes(members) for pack, members in self._parts())

    @untracked
    def new_bytes(self) -> int:
        """Bytes on the device that evict() would copy now."""
        return sum(pack.new_bytes(members) for pack, members in self._parts())

    @untracked
    def other_bytes(self) -> int:
        """Bytes of gradients and state that were made on the device since the load."""
        own, gradients, self.made_state_bytes = (
            pack.other_bytes(members) for pack, members in self._parts()
        )
        return own + gradients + self.made_state_bytes

    @untracked
    def on_host(self, *, state: bool = False) -> dict[int, Tensor]:
        """Host copies of parameters and buffers, or of state, by their device addresses."""
        pack, members = self._parts()[2 if state else 0]
        if pack.slab.device_bytes:
            self.write_back()
            self.wait()
        return pack.on_host(members)


def host_copy(tensor: Tensor, on_host: Mapping[int, Tensor]) -> Tensor | None:
    """The copy of a tensor in UnitPacks.on_host(); None: there is none."""
    found = on_host.get(tensor.data_ptr())
    is_like = found is not None and (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    return found if is_like else None


def shown_on_host(tensor: Tensor, on_host: Mapping[int, Tensor]) -> Tensor:
    """As host_copy(), also of a wrapper; the tensor itself if there is no copy of it."""
    if type(tensor) is Tensor and not tensor.requires_grad:
        found = host_copy(tensor, on_host)
        return tensor if found is None else found.detach()
    if tensor.requires_grad or not wrappers_in(tensor):
        return tensor
    names, settings = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: shown_on_host(getattr(tensor, name), on_host) for name in names}
    made: Any = type(tensor)
    result: Tensor = made.__tensor_unflatten__(inner, settings, tensor.shape, tensor.stride())
    return result
