"""Where the bytes of a table live: host memory of a kind, a GPU, or a mapped file."""

from __future__ import annotations

import os
import weakref
from typing import Literal, TypeAlias, cast, get_args

import torch

from speedtorch.files import system_calls
from speedtorch.memory import host_memory
from speedtorch.memory.calibration import calibrate_once
from speedtorch.ops.functions import wait_for_rows

__all__ = ["MemoryKind", "Placement", "check_kind"]

_Device = str | int | torch.device | None
_Path = str | os.PathLike[str] | None

MemoryKind: TypeAlias = Literal["auto", "plain", "registered", "managed", "cuda", "file"]
"""Where a table lies; see HostTable."""

_KINDS = get_args(MemoryKind)


def check_kind(kind: MemoryKind, device: _Device = None, path: _Path = None) -> None:
    """Raises ValueError unless this is a kind of memory, with the arguments that go with it."""
    if kind not in _KINDS:
        raise ValueError(f"memory: expected one of {', '.join(_KINDS)}, got {kind!r}")
    if device is not None and kind != "cuda":
        raise ValueError(f"device: goes with memory='cuda' only, not with {kind!r}")
    if kind == "file" and path is None:
        raise ValueError(
            "memory='file' needs a path: make a HostTable(..., memory='file', path=...), which"
            " Embedding.from_pretrained takes"
        )
    if kind != "file" and path is not None:
        raise ValueError(f"path: goes with memory='file' only; memory is {kind!r}")


class Placement:
    """Zeroed bytes of one kind of memory, `data` uint8 `[count]`, exactly as many as asked for.

    Kind, device and path are those of HostTable; `memory` is the kind that "auto" became.
    """

    def __init__(self, count: int, kind: MemoryKind, device: _Device, path: _Path) -> None:
        check_kind(kind, device, path)
        if count >= 2**63:
            raise ValueError(f"rows: {count:,} bytes are more than any memory has (2^63 - 1)")
        self.memory = kind
        self.path: str | None = None
        self._descriptor: int | None = None
        if path is not None:
            self.path = os.path.abspath(path)
            self.data, self._descriptor = system_calls.map_new_file(self.path, count)
            self._closer = weakref.finalize(self, system_calls.calls.close, self._descriptor)
        elif kind == "cuda":
            if not torch.cuda.is_available():
                raise RuntimeError("memory='cuda' needs a GPU, and torch finds none here")
            place = torch.device("cuda", device) if isinstance(device, int) else device or "cuda"
            if torch.device(place).type != "cuda":
                raise ValueError(f"device: expected a GPU for memory='cuda', got {str(place)!r}")
            self.data = torch.zeros(count, dtype=torch.uint8, device=place)
        elif kind != "file":  # which has a path
            if kind != "plain":
                calibrate_once(count)
            self.data = host_memory.empty(count, dtype=torch.uint8, memory=kind)
            self.memory = cast(MemoryKind, host_memory.memory_kind(self.data))

    def settle(self) -> None:
        """Waits until the GPU has done its work on the bytes; raises what it found wrong."""
        host_memory.check_owner(self.data)
        wait_for_rows(self.data.device if self.memory == "cuda" else None)

    def flush(self) -> None:
        """Settles, and brings a mapped file's bytes to the disk."""
        self.settle()
        if self._descriptor is not None:
            system_calls.calls.fsync(self._descriptor)

    def release(self) -> None:
        """Lets the memory go once no tensor uses it, also if a captured CUDA graph still does."""
        if self._descriptor is not None:
            self._closer()
        elif self.memory != "cuda":
            host_memory.release(self.data)

    def remove_file(self) -> None:
        """Deletes the mapped file, if there is one."""
        if self.path is not None:
            system_calls.calls.unlink(self.path)
