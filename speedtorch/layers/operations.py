"""What functions of torch do with the elements of tensors that they are given.

Functions as `__torch_function__` is told of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speedtorch.torch_internals import VERSION_ASKED

__all__ = ["computes", "is_counted", "is_in_place", "is_of_metadata"]


def _named(owner: Any, names: str) -> list[Any]:
    return [getattr(owner, name) for name in names.split()]


# Optimizers, zero_grad() and modules call these of all tensors.
_PROPERTIES = "dtype device grad grad_fn is_cuda is_leaf layout ndim requires_grad shape"
_METHODS = "dim element_size is_complex is_floating_point nelement numel size"
_GRADIENT: Any = Tensor.grad
_METADATA = frozenset(
    [
        *(each.__get__ for each in _named(Tensor, _PROPERTIES)),
        *_named(Tensor, _METHODS),
        _GRADIENT.__set__,
        _GRADIENT.__delete__,
        VERSION_ASKED,
    ]
)

# What they give shares the elements, but not the count of changes.
_SHARING = "__array__ __dlpack__ data_ptr numpy storage untyped_storage"
_DATA: Any = Tensor.data
_UNCOUNTED = frozenset([_DATA.__get__, _DATA.__set__, *_named(Tensor, _SHARING)])

# Of a tensor as it is, wherever it is.
_OF_A_TENSOR = "__dlpack_device__ __format__ __hash__ __len__ __repr__ __setstate__ backward detach"
_OF_A_TENSOR += " dim_order get_device is_contiguous is_pinned is_shared register_hook"
_OF_A_TENSOR += " register_post_accumulate_grad_hook retain_grad storage_offset storage_type stride"
_OF_A_TENSOR += " type"
_LOOKS = frozenset(
    [
        *_named(Tensor, _OF_A_TENSOR),
        torch.autograd.backward,
        torch.autograd.grad,
        torch.is_same_size,
    ]
)
_ACCESSORS = {"__get__", "__set__", "__delete__"}
_COMPUTING_ACCESSORS = frozenset(e.__get__ for e in _named(Tensor, "H T imag mH mT real"))

_OPERATORS = "add sub mul truediv floordiv mod pow and or xor lshift rshift"
_IN_PLACE = {"__setitem__", *(f"__i{name}__" for name in _OPERATORS.split())}


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
