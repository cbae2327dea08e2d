"""ModuleChanges: what may have changed in an offloaded module since it was copied."""

from __future__ import annotations

import torch

from speedtorch.layers.access_tracker import untracked
from speedtorch.layers.module_tensors import ModuleTensors
from speedtorch.layers.tensor_group import Members
from speedtorch.torch_internals import as_plain, current_stream, version_of

__all__ = ["ModuleChanges"]


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
        """Streams that have run the module or used its tensors since join_streams()."""

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

    def note_buffers(self) -> None:
        """Notes that buffers were added, which may have changed."""
        self._is_used = True

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
        self.note_copied_state()
        self.note_copied()

    def note_copied(self) -> None:
        """Notes that parameters and buffers have not changed since they were copied."""
        self._is_touched = self._is_used = False
        self._stepped = set()
        self._copied_versions = self._tensors.wrapper_versions()

    def note_copied_state(self) -> None:
        """Notes that the optimizer state has not changed since it was copied."""
        self._is_state_new = False

    def join_streams(self, after: torch.cuda.Event | None = None) -> None:
        """Makes the current stream wait for streams of the last use, unless `after` is given."""
        if after is not None or not self._streams:
            return
        current = current_stream(self._device)
        for stream in self._streams:
            if stream is not current:
                # The module ran on that stream: its memory must not be reused before.
                current.wait_stream(stream)
        self._streams.clear()
