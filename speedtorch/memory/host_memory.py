"""Host memory for tables: exact sizes, zeroed in parallel, pinned in place.

Three kinds, each an ordinary CPU tensor:

- *managed* (CUDA managed memory that prefers the CPU): a GPU maps it in large pages. Kernels
  read and write it at the link's speed in any order. A forked child must not touch it.
- *registered* (memory of this process, pinned): works with any GPU and is safe to fork. At most
  256 GiB are pinned per registration. CUDA rejects torch's own copies (`copy_`, `to`) across the
  boundary of two registrations; `speedtorch.pinned_copy` and the other ops may cross it.
- *plain*: not pinned; the kind for a machine without a GPU.
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
from speedtorch.torch_internals import base_of, outside_modes

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
    "registration_boundaries",
    "release",
    "unpin_memory_",
]

HostMemoryKind: TypeAlias = Literal["auto", "plain", "registered", "managed"]
"""The kinds of memory that `empty` can allocate."""

# In the order of MemoryKind in csrc/memory/host_memory.h.
KIND_NAMES = ("plain", "registered", "managed", "pinned", "cuda")
HOST_KINDS: tuple[HostMemoryKind, ...] = get_args(HostMemoryKind)

# The finalizer that unpins a dead tensor object's memory, and the library's number of the
# registration. Keyed by id(), because tensors do not compare as keys must.
_pinned: dict[int, tuple[weakref.finalize[[int], Tensor], int]] = {}


def is_checked() -> bool:
    """Whether to check available memory before an allocation (SPEEDTORCH_MEMORY_CHECK=0: no)."""
    return os.environ.get("SPEEDTORCH_MEMORY_CHECK", "1") != "0"


def default_kind() -> str:
    """The kind that "auto" selects: the fastest kind that this machine supports."""
    if _ops.managed_supported():
        return "managed"
    return "registered" if _ops.built_with_cuda() and torch.cuda.is_available() else "plain"


def empty(
    size: int | Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    memory: HostMemoryKind = "auto",
) -> Tensor:
    """Allocates a zeroed tensor in host memory, without rounding its size up.

    Memory other than plain is near the current GPU, if that NUMA node has free bytes. The memory is
    freed after the tensor and its views are freed and the ops of speedtorch that used the memory
    are complete. If a captured CUDA graph may use the memory, it is freed only after
    `speedtorch.memory.release`.

    Args:
        size: Number of elements, or shape.
        dtype: Any torch dtype that is not quantized.
        memory: "managed", "registered", "plain" or "auto". "auto" is managed if every GPU can reach
            managed memory, else registered if there is a GPU, else plain. If CUDA cannot pin
            registered memory, "auto" warns and uses plain memory. Managed memory is mapped
            on the current GPU at once, and on another GPU when an op first uses it there. Torch's
            own copies between a GPU and registered memory must not cross a multiple of 256 GiB from
            its beginning: use `pinned_copy`.

    Raises:
        MemoryError: The machine has too little memory (SPEEDTORCH_MEMORY_CHECK=0 tries anyway).
        RuntimeError: This machine does not support the kind of memory, CUDA failed, or the capture
            of a CUDA graph is in progress.
        TypeError: `size` is not made of integers, or `dtype` is not a dtype.
        ValueError: `memory` is unknown, `size` is negative, or `dtype` is quantized.

    Example:
        >>> empty((3, 2), memory="plain").tolist()
        [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    """
    shape = row_shape(size, "size")
    check_dtype("dtype", dtype)
    check_span("size", shape, dtype)
    if (nbytes := math.prod(shape) * dtype.itemsize) > torch.iinfo(torch.int64).max:
        raise MemoryError(f"host memory: {nbytes} bytes requested, more than can be addressed")
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
        warnings.warn(f"this memory is not pinned, so GPU access is slower: {error}", stacklevel=2)
        made = _ops.host_empty(nbytes, KIND_NAMES.index("plain"), is_checked())
    return made.view(dtype).view(shape)


def _tensor_died(key: int) -> None:
    _, pin = _pinned.pop(key)
    with outside_modes():
        _ops.host_unregister(pin, True)


def _check_dense(op: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: expected a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ValueError(f"{op}: the tensor must be dense (strided), got {tensor.layout}")


def pin_memory_(tensor: Tensor) -> Tensor:
    """Pins a CPU tensor's memory in place, so that a GPU can access it, and returns the tensor.

    The memory remains pinned until `unpin_memory_` or until this tensor object dies. If a captured
    CUDA graph may use the memory, it remains pinned until `release`. Views share the pinned memory.
    Read-only mappings of files are pinned read-only, and ops of speedtorch raise before a write to
    them. Do not resize a pinned tensor, because new memory of its storage is not pinned.

    Args:
        tensor: A dense CPU tensor. A tensor without elements has no memory to pin.

    Raises:
        TypeError: `tensor` is not a tensor.
        ValueError: The tensor is not on the CPU or not dense, or (part of) its memory is already
            pinned or was allocated by speedtorch.
        RuntimeError: CUDA failed, or pins memory where kernels cannot access it (WSL2). Or the
            capture of a CUDA graph is in progress. The message states the reason and a remedy.

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
        raise ValueError("pin_memory_: the tensor is pinned already. Call unpin_memory_ first.")
    # The library keeps this alias, so that the memory is freed only after it is unpinned.
    pin = _ops.host_register(tensor.detach())
    finalizer = weakref.finalize(tensor, _tensor_died, id(tensor))
    finalizer.atexit = False  # no CUDA call while the interpreter exits
    _pinned[id(tensor)] = finalizer, pin
    return tensor


def pin_if_possible(tensor: Tensor) -> str:
    """Pins a tensor with `pin_memory_` if there is a GPU; returns the error text, or ""."""
    if default_kind() == "plain" or not tensor.numel():
        return ""
    try:
        pin_memory_(tensor)
    except RuntimeError as error:
        return f"not registered, so that a GPU uses staged copies of its rows: {error}"
    return ""


def pinned_tensors() -> list[Tensor]:
    """The live tensors that `pin_memory_` has pinned."""
    return [found[0] for pin, _ in [*_pinned.values()] if (found := pin.peek()) is not None]


def keep_pinned(view: Tensor, pinned: Tensor) -> Tensor:
    """Keeps a pinned tensor object alive as long as `view`, of another dtype, or a view of `view`.

    A view of the same dtype keeps its tensor alive by itself.
    """
    root = base_of(view)
    root = view if root is None else root
    if root is not pinned:
        vars(root)["_pinned"] = pinned
    return view


def unpin_memory_(tensor: Tensor) -> Tensor:
    """Unpins a tensor, and returns the tensor.

    Waits for the ops of speedtorch that use its memory. The caller must first wait for other GPU
    work that uses the memory, such as non-blocking copies of torch.

    Args:
        tensor: The tensor object that was pinned.

    Raises:
        ValueError: The tensor was not pinned with `pin_memory_`.
        RuntimeError: A captured CUDA graph may still use the memory; see `release`.

    Example:
        See `pin_memory_`.
    """
    if id(tensor) not in _pinned:
        raise ValueError(
            "unpin_memory_: the tensor was not pinned with pin_memory_. Pass the tensor object that"
            " was pinned, not a view."
        )
    finalizer, pin = _pinned[id(tensor)]
    _ops.host_unregister(pin, False)
    finalizer.detach()
    del _pinned[id(tensor)]
    return tensor


def memory_kind(tensor: Tensor) -> str:
    """Returns a tensor's kind: "managed", "registered", "pinned" (by others), "plain" or "cuda".

    Example:
        >>> memory_kind(torch.zeros(3))
        'plain'
    """
    _check_dense("memory_kind", tensor)
    return KIND_NAMES[_ops.memory_kind(tensor)]


def memory_stats() -> dict[str, int]:
    """Bytes of host memory that speedtorch has allocated or pinned in this process, by kind.

    "captured" counts memory of dead tensors that a captured CUDA graph may still use.

    Example:
        >>> sorted(memory_stats())
        ['captured', 'managed', 'plain', 'registered']
    """
    return dict(zip((*KIND_NAMES[:3], "captured"), _ops.memory_stats(), strict=True))


def registration_boundaries(tensor: Tensor) -> list[int]:
    """Ascending byte offsets in a tensor at which another CUDA registration begins.

    A CUDA copy across such an offset fails. Only registered memory above 256 GiB has any.
    """
    return list(_ops.registration_seams(tensor))


def available_bytes() -> int:
    """Bytes of available host memory: the minimum of MemAvailable and the cgroup's free bytes."""
    return int(_ops.available_bytes())


def release(tensor: Tensor | None = None) -> None:
    """Declares that no captured CUDA graph uses `tensor` again: its memory is freed with it.

    With None, the memory of all dead tensors ("captured" in memory_stats) is released at once.
    """
    if tensor is None:
        _ops.let_orphans_go()
    else:
        _ops.let_captured_go(tensor)


def check_owner(tensor: Tensor) -> None:
    """Raises RuntimeError for managed memory in a forked child, which would crash on access."""
    _ops.check_owner(tensor)
