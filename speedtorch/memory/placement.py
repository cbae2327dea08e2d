"""Where the bytes of a table live: host memory of a kind, a GPU, files, memory of processes."""

from __future__ import annotations

import errno
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor

from speedtorch.files import system_calls
from speedtorch.files.table_files import open_fields
from speedtorch.memory import host_memory
from speedtorch.memory.calibration import calibrate_once
from speedtorch.memory.shared_memory import SharedMemory, SharedMemoryHandle
from speedtorch.ops.functions import wait_for_rows

__all__ = [
    "MappedPlacement",
    "MemoryKind",
    "NotMapped",
    "Placement",
    "SharedPlacement",
    "check_kind",
    "check_size",
    "made_placement",
    "takes_host_memory",
]

_Device = str | int | torch.device | None
_Path = str | os.PathLike[str] | None

MemoryKind: TypeAlias = Literal[host_memory.HostMemoryKind, "cuda", "file", "shared", "mapped"]
"""Where a table lies; see HostTable and, for "mapped", HostTable.open."""

_KINDS = get_args(MemoryKind)

# What systems say of files that they cannot map, as some FUSE file systems.
_NOT_SUPPORTED = (errno.ENODEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def check_kind(kind: MemoryKind, device: _Device = None, path: _Path = None) -> None:
    """Raises ValueError unless tables of this kind of memory can be made, with such arguments."""
    if kind not in _KINDS:
        raise ValueError(f"memory: expected one of {', '.join(_KINDS)}, got {kind!r}")
    if kind == "mapped":
        raise ValueError(
            "memory='mapped' maps the file of a saved table: HostTable.open(path, 'mapped') makes"
            " it, and Embedding.from_pretrained takes it; memory='file' makes a new file"
        )
    if device is not None and kind != "cuda":
        raise ValueError(f"device: goes with memory='cuda' only, not with {kind!r}")
    if kind == "file" and path is None:
        raise ValueError(
            "memory='file' needs a path: make a HostTable(..., memory='file', path=...), which"
            " Embedding.from_pretrained takes"
        )
    if kind != "file" and path is not None:
        raise ValueError(f"path: goes with memory='file' only; memory is {kind!r}")


def takes_host_memory(kind: MemoryKind) -> bool:
    """Whether a table of this kind takes host memory when it is made."""
    return kind == "shared" or kind in host_memory.HOST_KINDS


class Placement:
    """Bytes of a table, in one kind of memory; each kind is a subclass."""

    data: Tensor  # the bytes, uint8 `[count]`; "mapped" fields have none in common
    memory: MemoryKind  # never "auto"
    path: str | None = None  # the file of the bytes, if there is one
    reason: str = ""  # why the memory is not what was asked for, or reached more slowly
    writable: bool = True  # whether rows may be written
    is_in_place: bool = False  # whether kernels of a GPU read the rows where they are
    memory_beside: MemoryKind = "auto"  # what tables take that are made beside this one
    _shared: SharedMemory | None = None

    def check(self) -> None:
        """Raises what makes the bytes unusable by now."""

    def settle(self) -> None:
        """Waits until the GPU has done its work on the bytes; raises what it found wrong."""
        self.check()
        wait_for_rows(None)

    def flush(self) -> None:
        """Settles, and brings a file's bytes to the disk."""
        self.settle()

    def release(self) -> None:
        """Lets the memory go once no tensor uses it, also if a captured CUDA graph still does."""

    def remove_file(self) -> None:
        """Deletes the file that was made for the bytes, if one was."""

    def begin(self, field: int, value: bytes, fill: Callable[[], object]) -> bool:
        """Fills a field of this number with a first value, in shared memory once for all processes.

        Returns False if another process has filled it with another value.
        """
        if self._shared is not None:
            return self._shared.begin(field, value, fill)
        fill()
        return True

    def note_given(self, field: int) -> None:
        """Says that a field has values which begin() of another process is not to replace."""
        if self._shared is not None:
            self._shared.note_given(field)

    @property
    def shared(self) -> SharedMemory:
        """The memory that processes share; ValueError if this process alone has it."""
        if self._shared is None:
            raise ValueError(
                f"this table's memory is {self.memory!r}, which one process alone can use: make the"
                " table with memory='shared'"
            )
        return self._shared


class HostPlacement(Placement):
    """Zeros in host memory of one of host_memory's kinds."""

    def __init__(self, count: int, kind: host_memory.HostMemoryKind) -> None:
        if kind != "plain":
            calibrate_once(count)
        self.data = host_memory.empty(count, dtype=torch.uint8, memory=kind)
        self.memory = cast(MemoryKind, host_memory.memory_kind(self.data))
        self.memory_beside = self.memory
        self.is_in_place = self.memory in ("managed", "registered")

    def check(self) -> None:
        """Raises RuntimeError in a fork that cannot touch the memory."""
        host_memory.check_owner(self.data)

    def release(self) -> None:
        """See Placement."""
        host_memory.release(self.data)


class GpuPlacement(Placement):
    """Zeros on a GPU."""

    memory = memory_beside = "cuda"

    def __init__(self, count: int, device: _Device) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("memory='cuda' needs a GPU, and torch finds none here")
        place = torch.device("cuda", device) if isinstance(device, int) else device or "cuda"
        if torch.device(place).type != "cuda":
            raise ValueError(f"device: expected a GPU for memory='cuda', got {str(place)!r}")
        self.data = torch.zeros(count, dtype=torch.uint8, device=place)

    def settle(self) -> None:
        """See Placement."""
        wait_for_rows(self.data.device)


class FilePlacement(Placement):
    """Zeros in a new file, mapped to be written."""

    memory = "file"

    def __init__(self, count: int, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        self.data, self._descriptor = system_calls.map_new_file(self.path, count)
        self._closer = weakref.finalize(self, system_calls.calls.close, self._descriptor)

    def check(self) -> None:
        """Raises ValueError if the file was cut: reading the bytes would end the process."""
        check_size(str(self.path), os.fstat(self._descriptor).st_size, self.data.numel())

    def flush(self) -> None:
        """See Placement."""
        self.settle()
        system_calls.calls.fsync(self._descriptor)

    def release(self) -> None:
        """See Placement."""
        self._closer()

    def remove_file(self) -> None:
        """See Placement."""
        system_calls.calls.unlink(str(self.path))


class SharedPlacement(Placement):
    """Memory that several processes have; each registers it for its own GPU."""

    memory = "shared"

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared
        self.data = shared.data
        self.reason = host_memory.pin_if_possible(self.data)
        self.is_in_place = host_memory.memory_kind(self.data) == "registered"

    @classmethod
    def opened(cls, handle: SharedMemoryHandle) -> SharedPlacement:
        """The memory of a handle."""
        return cls(SharedMemory(handle.open(), handle.count))

    def release(self) -> None:
        """See Placement; other processes keep the memory."""
        host_memory.release(self.data)
        self.shared.close()


class NotMapped(Exception):
    """Why the fields of a file cannot be used where they are; its text says it."""


class MappedPlacement(Placement):
    """Files of a saved table, mapped read-only: one page cache serves all processes.

    Where there is a GPU the files are registered for it, read-only and in place, which reads them
    whole. What does not work there is the `reason`.
    `fields` are in the files' memory: writing to them ends the process. With `field` there is only
    this one, as "weight". NotMapped if the file system cannot map the files, or a field is not
    aligned; ValueError as of open_fields.
    """

    memory = "mapped"
    writable = False

    def __init__(self, source: str | os.PathLike[str], field: str | None = None) -> None:
        self.path = os.path.abspath(source)
        try:
            with open_fields(source, field=field) as stored:
                for name, each in stored.items():
                    if each.nbytes and each.offset % each.dtype.itemsize:
                        raise NotMapped(
                            f"field {name!r} begins at byte {each.offset:,} of"
                            f" {each.file.path}, which is no multiple of the"
                            f" {each.dtype.itemsize} bytes of {each.dtype}; save() the table once,"
                            " and open that file"
                        )
                files = {each.file.path: each.file for each in stored.values()}
                map_to_read = system_calls.calls.map_to_read
                self._files = {path: file.map(map_to_read) for path, file in files.items()}
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            raise NotMapped(f"the file system does not map it: {error.strerror}") from error
        with warnings.catch_warnings():
            # Tables give such tensors out as ReadOnlyRows alone.
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            whole = {
                path: torch.frombuffer(file, dtype=torch.uint8)
                for path, file in self._files.items()
            }
        reasons = [host_memory.pin_if_possible(each) for each in whole.values()]
        self.reason = next(filter(None, reasons), "")
        kinds = {host_memory.memory_kind(each) for each in whole.values()}
        self.is_in_place = kinds == {"registered"}
        self.fields: dict[str, Tensor] = {}
        for name, each in stored.items():
            data = whole[each.file.path][each.offset : each.offset + each.nbytes]
            rows = data.view(each.dtype).view(each.shape)
            self.fields[name] = host_memory.keep_pinned(rows, whole[each.file.path])

    def check(self) -> None:
        """Raises ValueError if a file was cut: reading its bytes would end the process."""
        for path, file in self._files.items():
            check_size(path, file.size(), len(file))

    def flush(self) -> None:
        """Waits for the GPU alone: there is nothing to lose, and a file that was cut is closed."""
        wait_for_rows(None)


def check_size(path: str, size: int, needed: int) -> None:
    """Raises ValueError if a mapped file has become shorter than the table in it.

    The system ends a process that touches memory behind the end of a mapped file (SIGBUS).
    """
    if size < needed:
        raise ValueError(
            f"{path}: the file was cut to {size:,} bytes while a table is mapped to {needed:,} of"
            " it: close the table, and open a whole file; write a new file beside one that is in"
            " use, and rename it"
        )


def made_placement(
    count: int, fields: int, kind: MemoryKind, device: _Device, path: _Path
) -> Placement:
    """Zeroed bytes of one kind of memory for so many fields, exactly as many as asked for.

    Kind, device and path are those of HostTable.
    """
    check_kind(kind, device, path)
    if count >= 2**63:
        raise ValueError(f"rows: {count:,} bytes are more than any memory has (2^63 - 1)")
    if path is not None:
        return FilePlacement(count, path)
    if kind == "cuda":
        return GpuPlacement(count, device)
    if kind == "shared":
        calibrate_once(count)
        return SharedPlacement(SharedMemory.made(count, fields))
    return HostPlacement(count, cast(host_memory.HostMemoryKind, kind))
