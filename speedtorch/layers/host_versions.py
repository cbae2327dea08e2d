"""Versions of tensors in host memory: autograd raises for tensors that it saved on the device."""

from __future__ import annotations

from torch import Tensor

from speedtorch.torch_internals import version_of

__all__ = ["ON_HOST", "changes_of"]

ON_HOST = 1 << 31
"""The highest of a version's 32 bits, which is set in host memory and not on the device."""


def changes_of(tensor: Tensor) -> int:
    """A tensor's version without the bit of host memory."""
    return version_of(tensor) & ~ON_HOST
