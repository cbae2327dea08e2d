"""Discarded: tensors whose values `sleep()` did not copy, until you load new values."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtorch.layers.access_tracker import untracked
from speedtorch.layers.module_hook import ModuleHook
from speedtorch.layers.offloaded_storage import OffloadedStorage
from speedtorch.torch_internals import version_of

__all__ = ["BLANK", "Discarded"]

BLANK = 255
"""The value of all bytes of a discarded tensor after `wake()`: all bits are set.

Floating-point elements of 16 or more bits are then NaN.
"""
_NAMED = 4
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 24


class _Blank(NamedTuple):
    """A discarded tensor, and its version after `wake()`."""

    ref: weakref.ref[Tensor]
    version: int

    def is_not_loaded(self, tensor: Tensor) -> Tensor:
        """Whether elements of the tensor have not been loaded, as a boolean on its device."""
        if not tensor.numel():  # the tensor is offloaded
            return torch.ones((), dtype=torch.bool, device=tensor.device)
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        # A comparison allocates one byte per element, so chunks bound its memory.
        chunks = torch.split(values.view(_INTEGERS[values.itemsize]).reshape(-1), _CHUNK)
        are_blank = [chunk == -1 for chunk in chunks]
        if values.is_floating_point() and values.itemsize > 1:
            return torch.stack([blank.any() for blank in are_blank]).any()
        # For integers and 8-bit floats, this bit pattern may also be a loaded value.
        is_blank = torch.stack([blank.all() for blank in are_blank]).all()
        return is_blank & (version_of(tensor) == self.version)


class Discarded:
    """Raises RuntimeError if discarded tensors are used before they are loaded.

    A discarded tensor counts as loaded if it has no element with the bits that `wake()` wrote.
    Integers and 8-bit floats, for which these bits may be a loaded value, count as loaded if one
    element or the tensor's version has changed. Checks end after the first use that finds all
    tensors loaded. The error's message ends with `remedy`.
    """

    def __init__(self, device: torch.device, remedy: str) -> None:
        self._device, self._remedy = device, remedy
        self._blank: dict[str, _Blank] = {}
        self._hooks = ExitStack()

    def add(
        self,
        storages: Iterable[OffloadedStorage],
        names: Mapping[int, str],
        users: Iterable[nn.Module | Optimizer],
    ) -> None:
        """Records tensors before they are discarded; call this before the sleep.

        `names` has the tensors' names by `id()`. The forward or `step()` of `users` uses the
        tensors, and checks them first.
        """
        for storage in storages:
            for member, tensor in () if storage.is_kept else storage.live_members():
                if tensor.numel():
                    self._blank[names[id(tensor)]] = _Blank(member.ref, member.version + 1)
        self._hooks.close()
        hook = ModuleHook(self._check)
        for user in users if self._blank else ():
            if isinstance(user, nn.Module):
                self._hooks.enter_context(user.register_forward_pre_hook(hook, prepend=True))
            else:
                self._hooks.enter_context(user.register_step_pre_hook(hook))

    @untracked
    def _check(self, *_: object) -> None:
        """Checks the tensors before a forward or an optimizer step."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # values cannot be read during a capture
        flags = {
            name: blank.is_not_loaded(tensor)
            for name, blank in self._blank.items()
            if (tensor := blank.ref()) is not None and tensor.device == self._device
        }
        found = torch.stack(list(flags.values())).tolist() if flags else []
        if lost := [name for name, is_lost in zip(flags, found, strict=True) if is_lost]:
            more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
            raise RuntimeError(
                f"{', '.join(lost[:_NAMED])}{more}: values discarded by sleep() have not been"
                f" loaded completely since. {self._remedy}"
            )
        self._blank.clear()
        self._hooks.close()
