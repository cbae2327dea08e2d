"""ModuleGroups: the three tensor groups of an offloaded module.

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
from speedtorch.layers.module_changes import ModuleChanges
from speedtorch.layers.module_tensors import ModuleTensors
from speedtorch.layers.state_tensors import within_frozen, wrappers_in
from speedtorch.layers.tensor_group import Members, TensorGroup

__all__ = ["ModuleGroups", "host_copy"]


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
        """Bytes of host memory, which are also the device bytes of a loaded module."""
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
    def write_back(
        self, after: torch.cuda.Event | None = None, *, only_state: bool = False
    ) -> None:
        """Starts copying changes on the device to the host, or only those of the optimizer state.

        The module remains on the device. evict() then waits for these copies, and makes no others
        unless the module changes meanwhile. Only evict() copies gradients. The copies wait for
        `after`, the end of the module's last use; None: for all work queued on the current stream.
        """
        self._changes.join_streams(after)
        (own, members), _, (of_state, state) = self._parts()
        if not only_state:
            own.write_back(members, after)
            if own.memory is Memory.DEVICE:
                self._changes.note_copied()
        of_state.write_back(state, after)
        if of_state.memory is Memory.DEVICE:
            self._changes.note_copied_state()

    def wait(self) -> None:
        """Waits for the copies that write_back() has started."""
        for group in self.all:
            group.buffer.write_back_stream.finish()

    @untracked
    def evict(self, after: torch.cuda.Event | None, *, search: bool) -> int:
        """Moves all groups to the host; see OffloadedModule.evict()."""
        self._changes.join_streams(after)
        freed, parts = 0, self._parts()[::-1]
        # All copies are queued before the host waits for the first.
        copied = [group.begin_write_back(members) for group, members in parts]
        for (group, members), names in zip(parts, copied, strict=True):
            # Autograd graphs hold views only of parameters and buffers.
            is_searched = search or group is not self.own
            freed += group.evict(members, after, search=is_searched, copied=names)
        self._tensors.follow_inner()
        self._changes.note_copied_state()
        self.created_state_bytes = 0
        self._changes.note_copied()
        return freed

    @untracked
    def evict_state(self, after: torch.cuda.Event | None) -> int:
        """Moves only the optimizer state to the host; see OffloadedModule.evict_state()."""
        self._changes.join_streams(after)
        *_, (state, members) = self._parts()
        freed = state.evict(members, after)
        self._changes.note_copied_state()
        self.created_state_bytes = 0
        return freed

    @untracked
    def free_gradients(self, after: torch.cuda.Event | None = None) -> None:
        """Frees the device memory of gradients if the program has dropped them all."""
        if self.gradients.buffer.device_bytes and not self._tensors.current.gradients:
            self._changes.join_streams(after)
            self.gradients.evict(Members({}, ()), after)

    @property
    @untracked
    def has_new_tensors(self) -> bool:
        """Whether parameters or buffers were added or renamed since the last eviction.

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

    @property
    @untracked
    def needed_bytes(self) -> int:
        """Device bytes of all current tensors of the module."""
        return sum(group.needed_bytes(members) for group, members in self._parts())

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

    def save_on_host(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Puts host tensors into state_dict(), which remain readable after an eviction."""
        if self.own.memory is Memory.HOST:
            return
        on_host = self.on_host()
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
    names, settings = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: _shown_on_host(getattr(tensor, name), on_host) for name in names}
    made: Any = type(tensor)
    result: Tensor = made.__tensor_unflatten__(inner, settings, tensor.shape, tensor.stride())
    return result
