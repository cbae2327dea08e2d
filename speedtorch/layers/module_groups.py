"""ModuleGroups: the three tensor groups of an offloaded module, and ModuleChanges, their changes.

The groups are parameters and buffers, gradients, and optimizer state. A forward therefore loads no
state, and gradients are not loaded after the program dropped them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from speedtorch.layers.access_tracker import untracked
from speedtorch.layers.flat_buffer import Memory
from speedtorch.layers.module_tensors import ModuleTensors
from speedtorch.layers.state_tensors import inner_of, rewrapped, within_frozen, wrappers_in
from speedtorch.layers.tensor_group import Members, TensorGroup
from speedtorch.memory.side_stream import end_of_current
from speedtorch.torch_internals import as_plain, current_stream, version_of

__all__ = ["ModuleChanges", "ModuleGroups", "host_copy"]


class ModuleChanges:
    """Uses and steps of a module, which may change its tensors without a new version.

    `was_stepped`: whether the module was stepped the last time it was on the device.
    """

    def __init__(self, device: torch.device, tensors: ModuleTensors) -> None:
        self._device, self._tensors = device, tensors
        self._uses = 0
        self.was_stepped = False
        # All tensors may have changed before. Threads set these flags without reading them.
        self._is_touched = self._is_used = self._is_state_new = True
        self._stepped: set[str] = set()
        """Names of parameters that a step may have changed."""
        self._copied_versions: list[int] = []
        self._streams: set[torch.cuda.Stream] = set()
        """Streams that have run the module or used its tensors since they were joined."""
        self._last_use: tuple[torch.cuda.Event, torch.cuda.Stream | None, int] | None = None
        """End event and stream of a use that has ended, and the count of changes at its end."""

    def members(self) -> tuple[Members, Members, Members]:
        """The current members of the three groups: parameters and buffers, gradients, state."""
        found = self._tensors.current
        # Torch's batch norm changes its statistics without a new version.
        buffers = found.buffers if self._is_used else ()
        is_touched = self._is_touched or self._tensors.wrapper_versions() != self._copied_versions
        written = found.own.keys() if is_touched else self._stepped.union(buffers)
        state = found.state.keys() if self._is_state_new else ()
        return (
            Members(found.own, written),
            # Some changes of gradients do not change their version.
            Members(found.gradients, found.gradients.keys()),
            Members(found.state, state),
        )

    @property
    def count(self) -> int:
        """A count that grows with each use, step, and new version of the module's tensors.

        Outside a use, track() also counts changes of gradients and optimizer state. Moves of the
        module count too.
        """
        own = self._tensors.known.values()
        with as_plain():
            return self._uses + sum(map(version_of, own)) + sum(self._tensors.wrapper_versions())

    def touch(self) -> None:
        """Notes that any tensor of the module may have changed without a new version."""
        self._is_touched = self._is_state_new = True
        self._uses += 1

    def note_use(self) -> None:
        """Notes that the module runs forward or backward, or that a tensor of it is used."""
        self._is_used = True
        self._uses += 1
        if self._device.type == "cuda":
            self._streams.add(current_stream(self._device))

    @untracked
    def note_step(self, *_: object) -> None:
        """Notes that an optimizer has stepped the module."""
        self._is_used = self._is_state_new = self.was_stepped = True
        self._uses += 1
        named = self._tensors.parameters.items()
        self._stepped |= {n for n, p in named if p.requires_grad or p.grad is not None}

    def note_load(self) -> None:
        """Notes that the next load copies all tensors, so host and device are equal."""
        self.was_stepped = False
        self.note_copied(own=True, state=True)

    def note_copied(self, *, own: bool, state: bool) -> None:
        """Notes that parameters and buffers, or the state, have not changed since their copy."""
        if own:
            self._is_touched = self._is_used = False
            self._stepped = set()
            self._copied_versions = self._tensors.wrapper_versions()
        if state:
            self._is_state_new = False

    def begin_use(self) -> None:
        """Makes the current stream wait for earlier uses, because later work is not tracked."""
        (end, stream, _), self._last_use = self._last_use or (None, None, 0), None
        if end is not None and stream is not self._stream():
            # The last use, and the copy to the device before it, were on another stream.
            current_stream(self._device).wait_event(end)
        self.join_streams()

    def end_use(self) -> None:
        """Records the end of a use, which the current stream has joined."""
        if (end := end_of_current(self._device)) is not None:
            self._last_use = end, self._stream(), self.count

    def boundary(self) -> torch.cuda.Event | None:
        """The end event of the last use, behind which the module's memory is copied and reused.

        Returns None if the module is in use, or was used after that event. Copies then wait for the
        current stream, which waits for all streams that have used the module.
        """
        end, _, count = self._last_use or (None, None, 0)
        if end is not None and count == self.count:
            return end
        self.join_streams()
        return None

    def _stream(self) -> torch.cuda.Stream | None:
        return current_stream(self._device) if self._device.type == "cuda" else None

    def join_streams(self) -> None:
        """Makes the current stream wait for all streams that have used the module."""
        for stream in self._streams:
            if stream is not (current := current_stream(self._device)):
                # The module ran on that stream: its memory must not be reused before.
                current.wait_stream(stream)
        self._streams.clear()


class ModuleGroups:
    """Moves the three groups of a module; OffloadedModule describes the errors.

    `created_state_bytes`: bytes of optimizer state that steps created on the device, as counted by
    the last other_bytes().
    """

    def __init__(
        self,
        groups: tuple[TensorGroup, TensorGroup, TensorGroup],
        tensors: ModuleTensors,
        changes: ModuleChanges,
    ) -> None:
        self.own, self.gradients, self.state = self.all = groups
        self._tensors, self._changes = tensors, changes
        self.created_state_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of host memory, and of device memory if the module is loaded with its state."""
        return sum(group.buffer.nbytes for group in self.all)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory now, without tensors created there since the load."""
        return sum([group.buffer.device_bytes for group in self.all])

    def is_written_back(self, *, only_state: bool) -> bool:
        """Whether copies of write_back() are done, so evict() or evict_state() need not wait."""
        groups = self.all[2:] if only_state else self.all
        return all(group.buffer.write_back_stream.is_done for group in groups)

    def _parts(self) -> list[tuple[TensorGroup, Members]]:
        """The groups with their current members."""
        return list(zip(self.all, self._changes.members(), strict=True))

    @untracked
    def move_to_device(self, call: Callable[..., None], *, state: bool) -> None:
        """Calls TensorGroup.prefetch or TensorGroup.load for the groups."""
        empty = [group for group in self.all if not group.buffer.device_bytes]
        if len(empty) == len(self.all):
            self._changes.note_load()
        called: list[tuple[TensorGroup, Members]] = []
        try:
            # The copy of the known tensors starts first. While it runs, _parts() checks whether
            # these are still exactly the module's tensors.
            known = self._tensors.known
            is_begun = bool(known) and self.own.begin_load(known)
            parts = self._parts()
            for group, members in parts if state else parts[:2]:
                called.append((group, members))
                call(group, members, begun=is_begun and group is self.own)
            self._tensors.follow_inner()
        except BaseException as error:
            for group in self.all:  # evict() below must follow copies that have begun
                group.buffer.load_stream.join()
            for group, members in called if isinstance(error, RuntimeError) else ():
                if group in empty:
                    group.evict(members)
            if self.own in empty and self.own.memory is Memory.HOST:
                self.own.buffer.empty()
            raise

    @untracked
    def write_back(self, *, only_state: bool = False) -> None:
        """Starts copying changes on the device to the host, or only those of the optimizer state.

        The module remains on the device. evict() then waits for these copies. Only evict() copies
        gradients, tensors created on the device since the load, and later changes.
        """
        after = self._changes.boundary()
        (own, members), _, (of_state, state) = self._parts()
        if not only_state:
            own.write_back(members, after)
        of_state.write_back(state, after)
        self._changes.note_copied(
            own=not only_state and own.memory is Memory.DEVICE,
            state=of_state.memory is Memory.DEVICE,
        )

    def wait(self) -> None:
        """Waits for the copies that write_back() has started."""
        for group in self.all:
            group.buffer.write_back_stream.finish()

    @untracked
    def evict(self, *, search: bool = True, only_state: bool = False) -> int:
        """Moves all groups to the host, or only the state; see OffloadedModule.evict()."""
        after, freed, parts = self._changes.boundary(), 0, self._parts()[::-1]
        if only_state:
            del parts[1:]
        # All copies are queued before the host waits for the first.
        copied = [group.begin_write_back(members) for group, members in parts]
        for (group, members), names in zip(parts, copied, strict=True):
            # Autograd graphs hold views only of parameters and buffers.
            is_searched = search or group is not self.own
            freed += group.evict(members, after, search=is_searched, copied=names)
        if not only_state:
            self._tensors.follow_inner()
        self._changes.note_copied(own=not only_state, state=True)
        self.created_state_bytes = 0
        return freed

    @untracked
    def free_gradients(self) -> None:
        """Frees the device memory of gradients if the program has dropped them all."""
        if self.gradients.buffer.device_bytes and not self._tensors.current.gradients:
            self.gradients.evict(Members({}, ()), self._changes.boundary())

    @property
    @untracked
    def has_new_tensors(self) -> bool:
        """Whether parameters or buffers were added, replaced or renamed since the last eviction.

        Autograd must not save them before an eviction, because they are not in the buffer yet.
        """
        return not self.own.has_all(self._tensors.current.own)

    def held_by(self) -> list[str]:
        """Descriptions of views that the program holds, which keep device memory allocated."""
        return [view for group in self.all for view in group.held_by()]

    @untracked
    def missing_bytes(self, *, state: bool) -> int:
        """Bytes of device memory that load() would allocate."""
        count = 3 if state else 2
        if not any(group.buffer.missing_bytes for group in self.all[:count]):
            return 0
        return sum(group.missing_bytes(members) for group, members in self._parts()[:count])

    @untracked
    def new_bytes(self) -> int:
        """Bytes on the device that evict() would copy now."""
        return sum(group.new_bytes(members) for group, members in self._parts())

    @untracked
    def other_bytes(self) -> int:
        """Bytes of tensors created on the device since the load, such as gradients and state."""
        own, gradients, self.created_state_bytes = (
            group.other_bytes(members) for group, members in self._parts()
        )
        return own + gradients + self.created_state_bytes

    @untracked
    def on_host(self, *, state: bool = False) -> dict[int, Tensor]:
        """Host copies of parameters and buffers, or of the state, by device address.

        Writes changes back first, and waits for the copies.
        """
        group, members = self._parts()[2 if state else 0]
        if group.buffer.device_bytes:
            self.write_back()
            self.wait()
        return group.on_host(members)

    def is_view(self, tensor: Tensor) -> bool:
        """Whether a tensor shares memory with parameters or buffers on the device."""
        return any(map(self.own.buffer.has, within_frozen({"": tensor}).values()))

    @untracked
    def save_on_host(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Puts host copies into state_dict(), which an eviction does not change."""
        if self.own.memory is Memory.HOST:
            return
        on_host = {address: host.clone() for address, host in self.on_host().items()}
        # state_dict(keep_vars=True) returns these objects.
        own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        for name, value in state.items():
            if name.startswith(prefix) and isinstance(value, Tensor) and id(value) not in own:
                state[name] = _shown_on_host(value, on_host)


def host_copy(tensor: Tensor, on_host: Mapping[int, Tensor]) -> Tensor | None:
    """The host copy of a device tensor in the result of ModuleGroups.on_host(), or None."""
    found = on_host.get(tensor.data_ptr())
    is_like = found is not None and (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    return found if is_like else None


def _shown_on_host(tensor: Tensor, on_host: Mapping[int, Tensor]) -> Tensor:
    """The host copy of a tensor, also within wrappers; the tensor itself if there is none."""
    if type(tensor) is Tensor and not tensor.requires_grad:
        found = host_copy(tensor, on_host)
        return tensor if found is None else found.detach()
    if tensor.requires_grad or not wrappers_in(tensor):
        return tensor
    inner = {name: _shown_on_host(value, on_host) for name, value in inner_of(tensor).items()}
    return rewrapped(tensor, inner)
