"""What functions of torch do with the elements of tensors that they are given.

Functions as `__torch_function__` is told of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speedtorch.torch_internals import VERSION_ASKED

__all__ = ["computes", "is_counted", "is_in_place", "is_of_metadata"]

# Optimizers, zero_grad() and modules call these of all tensors.
_PROPERTIES = "dtype device grad grad_fn is_cuda is_leaf layout ndim requires_grad shape"
_GRADIENT: Any = Tensor.grad
_METADATA = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
        _GRADIENT.__set__,
        _GRADIENT.__delete__,
        VERSION_ASKED,
        Tensor.dim,
        Tensor.element_size,
        Tensor.is_complex,
        Tensor.is_floating_point,
        Tensor.nelement,
        Tensor.numel,
        Tensor.size,
    ]
)

# What they give shares the elements, but not the count of changes.
_DATA: Any = Tensor.data
_UNCOUNTED = frozenset(
    [
        _DATA.__get__,
        _DATA.__set__,
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor.data_ptr,
        Tensor.numpy,
        Tensor.storage,
        Tensor.untyped_storage,
    ]
)

# Of a tensor as it is, wherever it is.
_LOOKS = frozenset(
    [
        Tensor.__dlpack_device__,
        Tensor.__format__,
        Tensor.__hash__,
        Tensor.__len__,
        Tensor.__repr__,
        Tensor.__setstate__,
        Tensor.backward,
        Tensor.detach,
        Tensor.dim_order,
        Tensor.get_device,
        Tensor.is_contiguous,
        Tensor.is_pinned,
        Tensor.is_shared,
        Tensor.register_hook,
        Tensor.register_post_accumulate_grad_hook,
        Tensor.retain_grad,
        Tensor.storage_offset,
        Tensor.storage_type,
        Tensor.stride,
        Tensor.type,
        torch.autograd.backward,
        torch.autograd.grad,
        torch.is_same_size,
    ]
)
_ACCESSORS = {"__get__", "__set__", "__delete__"}
_COMPUTED: tuple[Any, ...] = (Tensor.H, Tensor.T, Tensor.imag, Tensor.mH, Tensor.mT, Tensor.real)
_COMPUTING_ACCESSORS = frozenset(each.__get__ for each in _COMPUTED)

_OPERATORS = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"]
_OPERATORS += ["lshift", "rshift"]
_IN_PLACE = {"__setitem__", *(f"__i{name}__" for name in _OPERATORS)}


def is_of_metadata(func: Any) -> bool:
    """Whether it neither reads nor writes elements, and is called often."""
    return func in _METADATA


def is_counted(func: Any) -> bool:
    """Whether torch counts what the program may write by it."""
    return func not in _UNCOUNTED


def computes(func: Any) -> bool:
    """Whether it gives or writes elements that depend on elements it is given."""
    if func in _METADATA or func in _UNCOUNTED or func in _LOOKS:
        return False
    return _name_of(func) not in _ACCESSORS or func in _COMPUTING_ACCESSORS


def is_in_place(func: Any) -> bool:
    """Whether it writes to what it is given first."""
    name = _name_of(func)
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _name_of(func: Any) -> str:
    return getattr(func, "__name__", "")
