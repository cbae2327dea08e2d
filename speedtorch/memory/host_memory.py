"""Host memory for tables: exact size, filled in parallel, pinned in place.

Three kinds, each an ordinary CPU tensor:

- *managed* (CUDA's, which prefers the CPU): a GPU maps it in large pages, so that kernels read and
  write it at the link's speed in any order. It must not be touched in a forked child.
- *registered* (this process's, pinned): works wherever a GPU is, and is safe to fork. It is
  pinned in pieces of at most 256 GiB. CUDA refuses a copy of torch's (`copy_`, `to`) across the
  seam of two pieces; `speedtorch.pinned_copy` and the other ops may cross it.
- *plain*: not pinned; what a machine without a GPU uses.
"""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from speedtorch.memory.near_gpu import near_gpu
from speedtorch.ops.functions import _ops
from speedtorch.ops.shapes import check_dtype, check_span, row_shape
from speedtorch.torch_internals import base_of

__all__ = [
    "available_bytes",
    "check_owner",
    "empty",
    "keep_pinned",
    "memory_kind",
    "memory_stats",
    "pin_if_possible",
    "pin_memory_",
    "pinned_tensors",
    "registration_seams",
    "release",
    "unpin_memory_",
]

HostMemoryKind: TypeAlias = Literal["auto", "plain", "registered", "managed"]
"""What `empty` makes."""

# As the library numbers them (MemoryKind in csrc/memory/host_memory.h).
KIND_NAMES = ("plain", "registered", "managed", "pinned", "cuda")
HOST_KINDS: tuple[HostMemoryKind, ...] = get_args(HostMemoryKind)

# By id() of the tensor object, as tensors do not compare as keys must: what undoes the pinning when
# the object dies, and the library's number of it.
_pinned: dict[int, tuple[weakref.finalize[[int], Tensor], int]] = {}


def is_checked() -> bool:
    """Whether memory is asked for before it is taken (SPEEDTORCH_MEMORY_CHECK=0: no)."""
    return os.environ.get("SPEEDTORCH_MEMORY_CHECK", "1") != "0"


def default_kind() -> str:
    """What "auto" stands for: the fastest kind that this machine has."""
    if _ops.managed_supported():
        return "managed"
    return "registered" if _ops.built_with_cuda() and torch.cuda.is_available() else "plain"


def empty(
    size: int | Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    memory: HostMemoryKind = "auto",
) -> Tensor:
    """A tensor of zeros in host memory, exactly as many bytes as it needs.

    Args:
        size: number of elements, or shape.
        dtype: any torch dtype of whole bytes.
        memory: "managed", "registered", "plain", or "auto": managed where every GPU can reach it,
            registered where there is a GPU at all, plain otherwise. All but plain memory lies near
            the current GPU, as far as there is room. It goes once the tensor dies and the GPU work
            that used it is done. Managed memory is mapped on the current GPU now, and on another
            one when an op first uses it there. Torch's own copies between a GPU and registered
            memory must not cross a multiple of 256 GiB from its beginning: use `pinned_copy`.

    Raises:
        MemoryError: the machine has too little (SPEEDTORCH_MEMORY_CHECK=0 tries all the same).
        RuntimeError: the kind of memory cannot be had here.
        TypeError: `size` is not made of integers, or `dtype` is no dtype.
        ValueError: `memory`, `size` or `dtype` is not one of those above.

    Example:
        >>> empty((3, 2), memory="plain").tolist()
        [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    """
    shape = row_shape(size, "size")
    check_dtype("dtype", dtype)
    check_span("size", shape, dtype)
    if (nbytes := math.prod(shape) * dtype.itemsize) > torch.iinfo(torch.int64).max:
        raise MemoryError(f"host memory: {nbytes} bytes asked for, more than can be addressed")
    if memory not in HOST_KINDS:
        raise ValueError(
            f"memory must be 'auto', 'managed', 'registered' or 'plain', got {memory!r}"
        )
    kind = default_kind() if memory == "auto" else memory
    made: Tensor
    try:
        with nullcontext() if kind == "plain" else near_gpu():
            made = _ops.host_empty(nbytes, KIND_NAMES.index(kind), is_checked())
    except RuntimeError as error:
        if (memory, kind) != ("auto", "registered"):
            raise
        warnings.warn(
            f"this table is not pinned, so the GPU reaches it more slowly: {error}", stacklevel=2
        )
        made = _ops.host_empty(nbytes, KIND_NAMES.index("plain"), is_checked())
    return made.view(dtype).view(shape)


def _tensor_died(key: int) -> None:
    _, pin = _pinned.pop(key)
    _ops.host_unregister(pin, True)


def _check_dense(op: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: expected a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ValueError(f"{op}: the tensor must be dense (strided), got {tensor.layout}")


def pin_memory_(tensor: Tensor) -> Tensor:
    """Pins a CPU tensor's memory where it is, so that the GPU reaches it; returns that tensor.

    It stays pinned until `unpin_memory_` or until this tensor object dies; views of it are pinned
    with it. Read-only mappings of files are pinned read-only, and ops refuse to write to them. Do
    not resize it meanwhile: memory that its storage gets then is not pinned.

    Args:
        tensor: any CPU tensor with elements.

    Raises:
        TypeError: it is no tensor.
        ValueError: the tensor is not on the CPU or not dense, or (part of) its memory is pinned
            already.
        RuntimeError: CUDA refused, or pins memory where kernels do not find it (WSL2); the message
            says why and what to do.

    Example:
        >>> rows = torch.zeros(1000, 4)
        >>> if torch.cuda.is_available():
        ...     assert memory_kind(pin_memory_(rows)) == "registered"
        ...     assert memory_kind(unpin_memory_(rows)) == "plain"
    """
    _check_dense("pin_memory_", tensor)
    if not tensor.is_cpu:
        raise ValueError(f"pin_memory_: the tensor must be on the CPU, it is on {tensor.device}")
    if id(tensor) in _pinned:
        raise ValueError("pin_memory_: the tensor is pinned already; unpin_memory_ it first")
    # An alias, which the library keeps: the memory goes after it is unpinned.
    pin = _ops.host_register(tensor.detach())
    finalizer = weakref.finalize(tensor, _tensor_died, id(tensor))
    finalizer.atexit = False  # no CUDA call while the interpreter ends
    _pinned[id(tensor)] = finalizer, pin
    return tensor


def pin_if_possible(tensor: Tensor) -> str:
    """Pins a tensor's memory as pin_memory_ does, if there is a GPU; why CUDA refused, or ""."""
    if default_kind() == "plain" or not tensor.numel():
        return ""
    try:
        pin_memory_(tensor)
    except RuntimeError as error:
        return f"not registered, so that a GPU gets its rows by staged copies: {error}"
    return ""


def pinned_tensors() -> list[Tensor]:
    """The tensors that pin_memory_ has pinned."""
    return [found[0] for pin, _ in [*_pinned.values()] if (found := pin.peek()) is not None]


def keep_pinned(view: Tensor, pinned: Tensor) -> Tensor:
    """Keeps a pinned tensor object while a view of another dtype, or a view of that, is there.

    A view of one dtype keeps its tensor by itself.
    """
    root = base_of(view)
    root = view if root is None else root
    if root is not pinned:
        vars(root)["_pinned"] = pinned
    return view


def unpin_memory_(tensor: Tensor) -> Tensor:
    """Undoes `pin_memory_`, after the GPU work that uses the memory is done; returns the tensor.

    Args:
        tensor: the tensor object that was pinned.

    Raises:
        ValueError: the tensor was not pinned with `pin_memory_`.
        RuntimeError: a captured CUDA graph may still use it; see `release`.

    Example:
        See `pin_memory_`.
    """
    if id(tensor) not in _pinned:
        raise ValueError("unpin_memory_: the tensor was not pinned with pin_memory_")
    finalizer, pin = _pinned[id(tensor)]
    _ops.host_unregister(pin, False)
    finalizer.detach()
    del _pinned[id(tensor)]
    return tensor


def memory_kind(tensor: Tensor) -> str:
    """Where a tensor's memory is: "managed", "registered", "pinned" (by others), "plain" or "cuda".

    Example:
        >>> memory_kind(torch.zeros(3))
        'plain'
    """
    _check_dense("memory_kind", tensor)
    return KIND_NAMES[_ops.memory_kind(tensor)]


def memory_stats() -> dict[str, int]:
    """Bytes that this process holds through speedtorch, by kind.

    Memory of dead tensors that a captured CUDA graph may still use is "captured".

    Example:
        >>> sorted(memory_stats())
        ['captured', 'managed', 'plain', 'registered']
    """
    return dict(zip((*KIND_NAMES[:3], "captured"), _ops.memory_stats(), strict=True))


def registration_seams(tensor: Tensor) -> list[int]:
    """Bytes from a tensor's first one, ascending, at which another registration with CUDA begins.

    One copy of CUDA's must not cross them. Only registered memory above 256 GiB has any.
    """
    return list(_ops.registration_seams(tensor))


def available_bytes() -> int:
    """Bytes of host memory that can be had: the least of MemAvailable and the cgroup's room."""
    return int(_ops.available_bytes())


def release(tensor: Tensor | None = None) -> None:
    """Says that no captured CUDA graph will use this tensor again: its memory goes with it.

    With None the memory of all freed tensors is released now ("captured" in memory_stats).
    """
    if tensor is None:
        _ops.let_orphans_go()
    else:
        _ops.let_captured_go(tensor)


def check_owner(tensor: Tensor) -> None:
    """RuntimeError for managed memory in a forked child, where touching it would kill that."""
    _ops.check_owner(tensor)
