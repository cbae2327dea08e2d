"""Parameters in host memory, and their gradients, which come to a device for a step alone.

Their memory on the host stays where it is, so that code which has pinned it or has views of it
(FSDP2) goes on with it. The objects stay, too: on the device their `data` is a copy. Of a tensor of
a class of its own (DTensor) the tensors within move, and it is let see their device.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtorch.layers.data_parallel import averaged_parameters
from speedtorch.layers.slab import extent
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
    """A plain tensor of a parameter or a gradient, its host memory, and the copy of that."""

    whole: Tensor
    is_gradient: bool
    tensor: Tensor
    home: Tensor
    copy: Tensor


class OffloadedParameters:
    """Copies of parameters and gradients, which are seen on the device from load() to leave().

    On a GPU copies go beside the current stream, as those of a slab.
    """

    def __init__(self, device: torch.device, traffic: TransferStats) -> None:
        self._device, self._traffic = device, traffic
        self._coming = SharedSideStream("layers coming", is_timed=True)
        self._leaving = SharedSideStream("layers leaving", is_timed=True)
        self._copied: list[_Copied] = []
        self._is_seen = False
        """Whether they are, or some of them, on the device."""
        self._is_written = False
        """Whether the host has all that is new, or is about to."""

    def bring(self, parameters: Iterable[Tensor]) -> None:
        """Begins to copy those that are on the host and have gradients, with these."""
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
        """Lets them be seen on the device, behind the copies."""
        self._coming.join()
        self._is_seen, self._is_written = True, False
        for each in self._copied:
            each.tensor.data = each.copy
        for each in self._copied:
            follow_inner(each.whole)

    def write_back(self) -> None:
        """Begins to copy all to the host, behind a step.

        Gradients as well: a step may have changed them (weight decay, Nesterov's momentum), and of
        tensors of a class of its own torch counts no change that a `foreach` operation makes.
        """
        if self._copied:
            with self._leaving.after_current(self._device) as stream:
                begun = self._traffic.begin(stream)
                for each in self._copied:
                    if not (each.is_gradient and _is_expanded(each.home)):
                        # Of its data, which a step may have assigned.
                        each.home.copy_(each.tensor.data, non_blocking=True)
            nbytes = sum(each.home.nbytes for each in self._copied)
            self._traffic.end(begun, self._leaving.end, nbytes, Memory.HOST)
        self._is_written = True

    def leave(self) -> None:
        """Lets all be seen on the host, as the step has left it; the copies go.

        Another call does what an error has interrupted.
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
                    bring_to_host(each.whole.grad)  # which a step may have assigned
        self._is_seen, self._copied = False, []


def offloaded_bytes(parameter: Tensor) -> int:
    """Bytes of a parameter and its gradient that come to the device; 0 if it is there."""
    return 2 * sum(each.nbytes for _, each in plain_tensors("", parameter) if each.is_cpu)


def check_offloaded(parameters: Iterable[Tensor]) -> None:
    """Raises ValueError if one of those that are on the host cannot come to the device."""
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
    """Lets all tensors in a value be in host memory."""
    for _, each in plain_tensors("", value):
        if not each.is_cpu:
            each.data = each.cpu()
    for leaf in tree_leaves(value):
        follow_inner(leaf)


def follow_inner(tensor: object) -> None:
    """Lets a tensor of a class of its own be seen on the device where the tensors within are."""
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
    """Whether elements of it are one in memory, which no operation changes in place."""
    return any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
