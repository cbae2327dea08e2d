"""Host parameters and their gradients, which are copied to a device only for an optimizer step.

Their host memory is never replaced, because other code may have pinned it or have views of it
(FSDP2). Tensor objects do not change either: on the device their `data` is a copy. For a wrapper
subclass (DTensor) the inner tensors are copied, and the wrapper is updated to their device.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtorch.layers.data_parallel import averaged_parameters
from speedtorch.layers.flat_buffer import extent
from speedtorch.layers.state_tensors import plain_tensors
from speedtorch.layers.transfer_stats import Memory, TransferStats
from speedtorch.memory.side_stream import SharedSideStream
from speedtorch.torch_internals import tree_leaves

__all__ = [
    "OffloadedParameters",
    "bring_to_host",
    "check_offloaded",
    "follow_inner",
    "offloaded_bytes",
]


class _Copied(NamedTuple):
    """A plain tensor of a parameter or gradient, its host memory, and the device copy."""

    whole: Tensor
    is_gradient: bool
    tensor: Tensor
    home: Tensor
    copy: Tensor


class OffloadedParameters:
    """Copies of parameters and gradients, which are on the device from load() to leave().

    On a GPU the copies run on side streams, like copies of a flat buffer.
    """

    def __init__(self, device: torch.device, traffic: TransferStats) -> None:
        self._device, self._traffic = device, traffic
        self._coming = SharedSideStream("layers load", is_timed=True)
        self._leaving = SharedSideStream("layers write back", is_timed=True)
        self._copied: list[_Copied] = []
        self._is_seen = False
        """Whether any of the tensors are on the device."""
        self._is_written = False
        """Whether the copy of the stepped tensors to the host has started."""

    def bring(self, parameters: Iterable[Tensor]) -> None:
        """Starts a copy of host parameters with gradients, and of the gradients, to the device."""
        copied = []
        with self._coming.after_current(self._device) as stream:
            begun = self._traffic.begin(stream)
            for each in parameters:
                if each.grad is None or not each.is_cpu:
                    continue
                for whole in (each, each.grad):
                    for _, tensor in plain_tensors("", whole):
                        home = tensor.data
                        copy = home.to(self._device, non_blocking=True, copy=True)
                        copied.append(_Copied(whole, whole is not each, tensor, home, copy))
        if copied:
            nbytes = sum(each.home.nbytes for each in copied)
            self._traffic.end(begun, self._coming.end, nbytes, Memory.DEVICE)
        self._copied = copied

    def load(self) -> None:
        """Assigns the device copies to `data`; the current stream waits for the copies."""
        self._coming.join()
        self._is_seen, self._is_written = True, False
        for each in self._copied:
            each.tensor.data = each.copy
        for each in self._copied:
            follow_inner(each.whole)

    def write_back(self) -> None:
        """Starts a copy of all tensors to the host, after the current stream's queued step.

        Gradients are copied too, because a step may change them (weight decay, Nesterov momentum).
        For wrapper subclasses torch does not count changes by `foreach` operations.
        """
        if self._copied:
            with self._leaving.after_current(self._device) as stream:
                begun = self._traffic.begin(stream)
                for each in self._copied:
                    if not (each.is_gradient and _is_expanded(each.home)):
                        # `data`, not `copy`: the step may have assigned other memory.
                        each.home.copy_(each.tensor.data, non_blocking=True)
            nbytes = sum(each.home.nbytes for each in self._copied)
            self._traffic.end(begun, self._leaving.end, nbytes, Memory.HOST)
        self._is_written = True

    def leave(self) -> None:
        """Waits for the write-back, assigns host memory to `data`, and drops the device copies.

        After an error, another call completes this one.
        """
        if self._is_seen:
            if not self._is_written:
                self.write_back()
            self._leaving.finish()
            for each in self._copied:
                each.tensor.data = each.home
            for each in self._copied:
                follow_inner(each.whole)
                if not each.is_gradient:
                    bring_to_host(each.whole.grad)  # the step may have assigned another gradient
        self._is_seen, self._copied = False, []


def offloaded_bytes(parameter: Tensor) -> int:
    """Bytes of a host parameter and its gradient; 0 for a parameter on the device."""
    return 2 * sum(each.nbytes for _, each in plain_tensors("", parameter) if each.is_cpu)


def check_offloaded(parameters: Iterable[Tensor]) -> None:
    """Raises ValueError if a host parameter or its gradient cannot be stepped on the device."""
    averaged = averaged_parameters()
    spans = []
    gradients: dict[int, Tensor] = {}
    for each in parameters:
        if each.grad is None or not each.is_cpu:
            continue
        parts = [("a parameter", each, tensor) for _, tensor in plain_tensors("", each)]
        parts += [("a gradient", each.grad, tensor) for _, tensor in plain_tensors("", each.grad)]
        for what, whole, tensor in parts:
            if tensor.layout is not torch.strided or not tensor.is_cpu:
                raise ValueError(
                    f"{what} of shape {list(whole.shape)} cannot come to the device for its step:"
                    f" expected a dense tensor on the CPU, got {tensor.layout} on"
                    f" {str(tensor.device)!r}"
                )
            if whole is not each:
                if (other := gradients.setdefault(id(tensor), each)) is not each:
                    raise ValueError(
                        f"parameters of shapes {list(other.shape)} and {list(each.shape)} have one"
                        " gradient tensor, which cannot come with both: give each its own"
                    )
            elif _is_expanded(tensor):
                raise ValueError(
                    f"a parameter of shape {list(whole.shape)} has elements that are one in memory"
                    f" (strides {list(tensor.stride())}), and cannot be stepped: give the optimizer"
                    " a contiguous one"
                )
            elif tensor.numel():
                spans.append((tensor.data_ptr(), extent(tensor), whole.shape))
        if id(each) in averaged:
            raise ValueError(
                f"a parameter of shape {list(each.shape)} is in host memory and averaged by"
                " DistributedDataParallel, which finds its gradient no more once it has been on the"
                " device: keep it there, or use fully_shard"
            )
    spans.sort(key=itemgetter(0))
    for (begin, nbytes, shape), (after, _, other_shape) in pairwise(spans):
        if after < begin + nbytes:
            raise ValueError(
                f"parameters of shapes {list(shape)} and {list(other_shape)} share host memory, and"
                " would be stepped as two: let the optimizer have one of them"
            )


def bring_to_host(value: object) -> None:
    """Moves all tensors in a value to host memory by assigning `data`."""
    for _, each in plain_tensors("", value):
        if not each.is_cpu:
            each.data = each.cpu()
    for leaf in tree_leaves(value):
        follow_inner(leaf)


def follow_inner(tensor: object) -> None:
    """Updates the `data` of a wrapper subclass so that its device is its inner tensors' device."""
    if not isinstance(tensor, Tensor) or not hasattr(tensor, "__tensor_flatten__"):
        return
    names, settings = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    tensors = [each for each in inner.values() if isinstance(each, Tensor)]
    for each in tensors:
        follow_inner(each)
    if tensors and tensors[0].device != tensor.device:
        made: Any = type(tensor)
        tensor.data = made.__tensor_unflatten__(inner, settings, tensor.shape, tensor.stride())


def _is_expanded(tensor: Tensor) -> bool:
    """Whether elements share memory (a stride of 0), so that in-place operations fail."""
    return any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
