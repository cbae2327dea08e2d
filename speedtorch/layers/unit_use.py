"""UnitUse: what uses of a unit may have changed, and the streams on which they ran."""

from __future__ import annotations

import torch

from speedtorch.layers.access_tracker import untracked
from speedtorch.layers.pack import Members
from speedtorch.layers.unit_tensors import UnitTensors
from speedtorch.torch_internals import as_plain, current_stream

__all__ = ["UnitUse"]


class UnitUse:
    """Which tensors of a unit must be written back although torch counts no change of them.

    `was_stepped`: whether it was stepped when it was on the device last.
    """

    def __init__(self, device: torch.device, tensors: UnitTensors) -> None:
        self._device, self._tensors = device, tensors
        self._count = 0
        self.was_stepped = False
        # All tensors may have been changed before. Threads set each flag without reading it.
        self._is_touched = self._is_used = self._is_state_new = True
        self._stepped: set[str] = set()
        """Parameters that a step may have changed."""
        self._copied_versions: list[int] = []
        self._streams: set[torch.cuda.Stream] = set()
        """Streams that the module ran on, and its tensors were used on, since join_streams()."""

    def members(self) -> tuple[Members, Members, Members]:
        """Parameters and buffers, gradients, and optimizer state, as they are now."""
        found = self._tensors.found
        # Torch's batch norm changes its statistics and counts no version.
        buffers = found.buffers if self._is_used else ()
        is_touched = self._is_touched or self._tensors.wrapper_versions() != self._copied_versions
        written = found.own.keys() if is_touched else self._stepped.union(buffers)
        state = found.state.keys() if self._is_state_new else ()
        return (
            Members(found.own, written),
            # Torch counts not all changes of gradients.
            Members(found.gradients, found.gradients.keys()),
            Members(found.state, state),
        )

    @property
    def count(self) -> int:
        """Grows with uses, steps, moves, and changes that torch counts."""
        with as_plain():
            return self._count + self._tensors.changes()

    def touch(self) -> None:
        """Says that any of its tensors may have changed without torch's counting it."""
        self._is_touched = self._is_state_new = True
        self._count += 1

    def note(self) -> None:
        """Says that its module runs, forward or backward, or that a tensor of it is used."""
        self._is_used = True
        self._count += 1
        if self._device.type == "cuda":
            self._streams.add(current_stream(self._device))

    def note_buffers(self) -> None:
        """Says that buffers were added, which may have changed."""
        self._is_used = True

    @untracked
    def note_step(self, *_: object) -> None:
        """Says that an optimizer has stepped it."""
        self._is_used = self._is_state_new = self.was_stepped = True
        self._count += 1
        named = self._tensors.parameters.items()
        self._stepped |= {n for n, p in named if p.requires_grad or p.grad is not None}

    def note_load(self) -> None:
        """Says that all is on the host, and begins to move to the device."""
        self.was_stepped = False
        self.note_copied()
        self.note_copied_state()

    def note_copied(self) -> None:
        """Says that parameters and buffers have not changed since they were copied."""
        self._is_touched = self._is_used = False
        self._stepped = set()
        self._copied_versions = self._tensors.wrapper_versions()

    def note_copied_state(self) -> None:
        """Says that the optimizer state has not changed since it was copied."""
        self._is_state_new = False

    def join_streams(self, after: torch.cuda.Event | None = None) -> None:
        """Lets the current stream wait for the streams of the last use, unless its end is known."""
        if after is not None or not self._streams:
            return
        current = current_stream(self._device)
        for each in self._streams:
            if each is not current:
                # The module ran there: its memory is reused behind that, too.
                current.wait_stream(each)
        self._streams.clear()
