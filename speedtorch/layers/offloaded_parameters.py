"""Host parameters and their gradients, which are copied to a device only for an optimizer step.

Their host memory is never replaced, because other code may have pinned it or have views of it
(FSDP2). Tensor objects do not change either: on the device their `data` is a copy. For a wrapper
subclass (DTensor) the inner tensors are copied, and the wrapper is updated to their device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtorch.layers.data_parallel import averaged_parameters
from speedtorch.layers.flat_buffer import segments_of
from speedtorch.layers.state_tensors import inner_of, plain_tensors, rewrapped
from speedtorch.layers.transfer_stats import Memory, TransferStats
from speedtorch.memory.side_stream import SharedSideStream
from speedtorch.torch_internals import tree_leaves

__all__ = [
    "OffloadedParameters",
    "check_offloaded",
    "follow_inner",
    "move_to_host",
    "offloaded_bytes",
]


class _Entry(NamedTuple):
    """A plain tensor of a parameter or gradient, its host memory, and the device copy."""

    whole: Tensor
    is_gradient: bool
    tensor: Tensor
    host: Tensor
    copy: Tensor


class OffloadedParameters:
    """Copies of parameters and gradients, which are on the device from load() to offload().

    On a GPU the copies run on side streams, like copies of a flat buffer.
    """

    def __init__(self, device: torch.device, traffic: TransferStats) -> None:
        self._device, self._traffic = device, traffic
        self._load_stream = SharedSideStream("layers load", is_timed=True)
        self._write_back_stream = SharedSideStream("layers write back", is_timed=True)
        self._entries: list[_Entry] = []
        self._is_seen = False
        """Whether any of the tensors are on the device."""
        self._is_written = False
        """Whether the copy of the stepped tensors to the host has started."""

    def prefetch(self, parameters: Iterable[Tensor]) -> None:
        """Starts a copy of host parameters with gradients, and of the gradients, to the device."""
        entries = []
        with self._load_stream.after_current(self._device) as stream:
            begun = self._traffic.begin(stream)
            for param in parameters:
                if param.grad is None or not param.is_cpu:
                    continue
                for whole in (param, param.grad):
                    for _, tensor in plain_tensors("", whole):
                        host = tensor.data
                        copy = host.to(self._device, non_blocking=True, copy=True)
                        entries.append(_Entry(whole, whole is not param, tensor, host, copy))
        if entries:
            nbytes = sum(entry.host.nbytes for entry in entries)
            self._traffic.end(begun, self._load_stream.end, nbytes, Memory.DEVICE)
        self._entries = entries

    def load(self) -> None:
        """Assigns the device copies to `data`; the current stream waits for the copies."""
        self._load_stream.join()
        self._is_seen, self._is_written = True, False
        for entry in self._entries:
            entry.tensor.data = entry.copy
        for entry in self._entries:
            follow_inner(entry.whole)

    def write_back(self) -> None:
        """Starts a copy of all tensors to the host, after the current stream's queued step.

        Gradients are copied too, because a step may change them (weight decay, Nesterov momentum).
        For wrapper subclasses torch does not count changes by `foreach` operations.
        """
        if self._entries:
            with self._write_back_stream.after_current(self._device) as stream:
                begun = self._traffic.begin(stream)
                for entry in self._entries:
                    if not (entry.is_gradient and _is_expanded(entry.host)):
                        # `data`, not `copy`: the step may have assigned other memory.
                        entry.host.copy_(entry.tensor.data, non_blocking=True)
            nbytes = sum(entry.host.nbytes for entry in self._entries)
            self._traffic.end(begun, self._write_back_stream.end, nbytes, Memory.HOST)
        self._is_written = True

    def offload(self) -> None:
        """Waits for the write-back, assigns host memory to `data`, and drops the device copies.

        After an error, another call completes this one.
        """
        if self._is_seen:
            if not self._is_written:
                self.write_back()
            self._write_back_stream.finish()
            for entry in self._entries:
                entry.tensor.data = entry.host
            for entry in self._entries:
                follow_inner(entry.whole)
                if not entry.is_gradient:
                    move_to_host(entry.whole.grad)  # the step may have assigned another gradient
        self._is_seen, self._entries = False, []


def offloaded_bytes(parameter: Tensor) -> int:
    """Bytes of a host parameter and its gradient; 0 for a parameter on the device."""
    return 2 * sum(tensor.nbytes for _, tensor in plain_tensors("", parameter) if tensor.is_cpu)


def check_offloaded(parameters: Iterable[Tensor]) -> None:
    """Raises ValueError if a host parameter or its gradient cannot be stepped on the device."""
    averaged = averaged_parameters()
    tensors: dict[str, Tensor] = {}
    gradients: dict[int, Tensor] = {}
    for param in parameters:
        if param.grad is None or not param.is_cpu:
            continue
        parts = [("a parameter", param, tensor) for _, tensor in plain_tensors("", param)]
        parts += [("a gradient", param.grad, tensor) for _, tensor in plain_tensors("", param.grad)]
        for what, whole, tensor in parts:
            if tensor.layout is not torch.strided or not tensor.is_cpu:
                raise ValueError(
                    f"{what} of shape {list(whole.shape)} cannot be copied to the device for its"
                    f" step: expected a dense tensor on the CPU, got {tensor.layout} on"
                    f" {str(tensor.device)!r}."
                )
            if whole is not param:
                if (other := gradients.setdefault(id(tensor), param)) is not param:
                    raise ValueError(
                        f"parameters of shapes {list(other.shape)} and {list(param.shape)} share a"
                        " gradient tensor. Give each parameter its own gradient tensor."
                    )
            elif _is_expanded(tensor):
                raise ValueError(
                    f"a parameter of shape {list(whole.shape)} cannot be stepped, because its"
                    f" elements share memory (strides {list(tensor.stride())}). Pass the optimizer"
                    " a contiguous parameter."
                )
            else:
                tensors[str(len(tensors))] = tensor
        if param.requires_grad and id(param) in averaged:
            raise ValueError(
                f"a parameter of shape {list(param.shape)} is in host memory, and"
                " DistributedDataParallel would not find its gradient after a step on the device."
                " Keep the parameter on the device, or use fully_shard."
            )
    for segment in segments_of(tensors):
        if len(segment) > 1:
            shapes = " and ".join(str(list(tensors[name].shape)) for name in list(segment)[:2])
            raise ValueError(
                f"parameters of shapes {shapes} share host memory, but would be stepped"
                " separately. Pass the optimizer only one of them."
            )


def move_to_host(value: object) -> None:
    """Moves all tensors in a value to host memory by assigning `data`."""
    for _, tensor in plain_tensors("", value):
        if not tensor.is_cpu:
            tensor.data = tensor.cpu()
    for leaf in tree_leaves(value):
        follow_inner(leaf)


def follow_inner(tensor: Any) -> None:
    """Updates the `data` of a wrapper subclass so that its device is its inner tensors' device."""
    inner = inner_of(tensor)
    tensors = [value for value in inner.values() if isinstance(value, Tensor)]
    for value in tensors:
        follow_inner(value)
    if tensors and tensors[0].device != tensor.device:
        tensor.data = rewrapped(tensor, inner)


def _is_expanded(tensor: Tensor) -> bool:
    """Whether elements share memory (a stride of 0), so that in-place operations fail."""
    return any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
