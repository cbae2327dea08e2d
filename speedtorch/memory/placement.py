"""Where a table's bytes are stored: a kind of host memory, a GPU, files or shared memory."""

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
from speedtorch.memory.shared_memory import SharedMemory
from speedtorch.ops.functions import wait_for_rows

__all__ = [
    "MappedPlacement",
    "MemoryKind",
    "NotMapped",
    "Placement",
    "SharedPlacement",
    "allocates_host_memory",
    "check_kind",
    "check_size",
    "make_placement",
]

_Device = str | int | torch.device | None
_Path = str | os.PathLike[str] | None

MemoryKind: TypeAlias = Literal[host_memory.HostMemoryKind, "cuda", "file", "shared", "mapped"]
"""Where a table is stored; see HostTable and, for "mapped", HostTable.open."""

_KINDS = get_args(MemoryKind)

# The errors of systems that cannot map a file, such as some FUSE file systems.
_NOT_SUPPORTED = (errno.ENODEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def check_kind(kind: MemoryKind, device: _Device = None, path: _Path = None) -> None:
    """Raises ValueError unless a table can be created with these arguments."""
    if kind not in _KINDS:
        raise ValueError(f"memory: expected one of {', '.join(_KINDS)}, got {kind!r}")
    if kind == "mapped":
        raise ValueError(
            "memory='mapped' maps the file of a saved table. Open it with HostTable.open(path,"
            " 'mapped'). For a module, pass that table to Embedding.from_pretrained. memory='file'"
            " creates a new file."
        )
    if device is not None and kind != "cuda":
        raise ValueError(f"device: requires memory='cuda', got memory={kind!r}")
    if kind == "file" and path is None:
        raise ValueError(
            "memory='file' needs a path. Create a HostTable(..., memory='file', path=...). For a"
            " module, pass that table to Embedding.from_pretrained."
        )
    if kind != "file" and path is not None:
        raise ValueError(f"path: requires memory='file', got memory={kind!r}")


def allocates_host_memory(kind: MemoryKind) -> bool:
    """Whether a table of this kind allocates host memory at its creation."""
    return kind == "shared" or kind in host_memory.HOST_KINDS


class Placement:
    """The bytes of a table; one subclass per kind of memory."""

    data: Tensor  # the bytes, uint8 `[count]`; "mapped" fields have no common tensor
    memory: MemoryKind  # never "auto"
    path: str | None = None  # the file of the bytes, if there is one
    descriptor: int | None = None  # of the open file, with memory="file"
    reason: str = ""  # why the memory differs from the requested kind, or is slower to access
    writable: bool = True  # whether rows may be written
    # whether a GPU's kernels access rows in host memory without a copy; False for memory="cuda"
    is_in_place: bool = False
    memory_beside: MemoryKind = "auto"  # the kind for tables that are created beside this one
    _shared: SharedMemory | None = None

    def check(self) -> None:
        """Raises an error if the bytes have become unusable."""

    def settle(self) -> None:
        """Waits for the GPU's work on the bytes and raises the errors that the GPU found."""
        self.check()
        wait_for_rows(None)

    def flush(self) -> None:
        """Settles, and writes a file's bytes to the disk."""
        self.settle()

    def release(self) -> None:
        """Frees the memory once no tensor uses it.

        A later replay of a captured CUDA graph that uses the memory would access freed memory.
        """

    def remove_file(self) -> None:
        """Deletes the file that was created for the bytes, if any."""

    def begin(self, field: int, value: bytes, fill: Callable[[], object]) -> bool:
        """Calls `fill` to initialise a field with `value`; in shared memory only the first time.

        Returns False if the field in shared memory was initialised with another value before.
        """
        if self._shared is not None:
            return self._shared.begin(field, value, fill)
        fill()
        return True

    def mark_loaded(self, field: int) -> None:
        """Marks a field as loaded, so that begin() of another process does not overwrite it."""
        if self._shared is not None:
            self._shared.mark_loaded(field)

    @property
    def shared(self) -> SharedMemory:
        """The memory that processes share. Raises ValueError for all other kinds of memory."""
        if self._shared is None:
            raise ValueError(
                f"this table's memory is {self.memory!r}, but only memory='shared' can be shared,"
                " and has versions for writing() and read_consistently(). Create the table with"
                " memory='shared'."
            )
        return self._shared


class _HostPlacement(Placement):
    """Zeroed host memory of one of the kinds in host_memory.py."""

    def __init__(self, count: int, kind: host_memory.HostMemoryKind) -> None:
        if kind != "plain":
            calibrate_once(count)
        self.data = host_memory.empty(count, dtype=torch.uint8, memory=kind)
        self.memory = cast(MemoryKind, host_memory.memory_kind(self.data))
        self.memory_beside = self.memory
        self.is_in_place = self.memory in ("managed", "registered")

    def check(self) -> None:
        """Raises RuntimeError in a forked child that cannot access the memory."""
        host_memory.check_owner(self.data)

    def release(self) -> None:
        """See Placement."""
        host_memory.release(self.data)


class _GpuPlacement(Placement):
    """Zeroed memory on a GPU."""

    memory = memory_beside = "cuda"

    def __init__(self, count: int, device: _Device) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("memory='cuda' needs a GPU, and torch finds none")
        place = torch.device("cuda", device) if isinstance(device, int) else device or "cuda"
        if torch.device(place).type != "cuda":
            raise ValueError(f"device: expected a GPU for memory='cuda', got {str(place)!r}")
        self.data = torch.zeros(count, dtype=torch.uint8, device=place)

    def settle(self) -> None:
        """See Placement."""
        wait_for_rows(self.data.device)


class _FilePlacement(Placement):
    """A new file of zeros in a writable mapping."""

    memory = "file"

    def __init__(self, count: int, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        self.data, descriptor = system_calls.map_new_file(self.path, count)
        self._closer = weakref.finalize(self, system_calls.calls.close, descriptor)
        self.descriptor: int = descriptor

    def check(self) -> None:
        """Raises ValueError if the file was truncated, because a read would end the process."""
        check_size(str(self.path), os.fstat(self.descriptor).st_size, self.data.numel())

    def flush(self) -> None:
        """See Placement."""
        self.settle()
        system_calls.calls.fsync(self.descriptor)

    def release(self) -> None:
        """Closes the file."""
        self._closer()

    def remove_file(self) -> None:
        """See Placement."""
        system_calls.calls.unlink(str(self.path))


class SharedPlacement(Placement):
    """Memory that several processes share; each process registers it for its own GPU."""

    memory = "shared"

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared
        self.data = shared.data
        self.reason = host_memory.pin_if_possible(self.data)
        self.is_in_place = host_memory.memory_kind(self.data) == "registered"

    def release(self) -> None:
        """See Placement; other processes keep the memory."""
        host_memory.release(self.data)
        self.shared.close()


class NotMapped(Exception):
    """A file cannot be mapped; the text states the reason."""


class MappedPlacement(Placement):
    """Files of a saved table in a read-only mapping; all processes share one page cache.

    If there is a GPU, the files are registered for it in place, read-only, which reads them whole.
    `reason` describes a failed registration. `fields` are views of the mapping, and a write to them
    ends the process. With `field`, only that field is mapped, as "weight". Raises NotMapped if the
    file system cannot map the files or a field is not aligned, and ValueError like open_fields().
    """

    memory = "mapped"
    writable = False

    def __init__(self, source: str | os.PathLike[str], field: str | None = None) -> None:
        self.path = os.path.abspath(source)
        try:
            with open_fields(source, field=field) as stored:
                for name, entry in stored.items():
                    if entry.nbytes and entry.offset % entry.dtype.itemsize:
                        raise NotMapped(
                            f"field {name!r} begins at byte {entry.offset:,} of"
                            f" {entry.file.path}, which is not a multiple of the"
                            f" {entry.dtype.itemsize} bytes of {entry.dtype}. Call save(), and"
                            " open the new file"
                        )
                files = {entry.file.path: entry.file for entry in stored.values()}
                map_to_read = system_calls.calls.map_to_read
                self._files = {path: file.map(map_to_read) for path, file in files.items()}
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            raise NotMapped(f"the file system cannot map it: {error.strerror}") from error
        with warnings.catch_warnings():
            # Tables expose such tensors only as ReadOnlyRows.
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            whole = {
                path: torch.frombuffer(file, dtype=torch.uint8)
                for path, file in self._files.items()
            }
        reasons = [host_memory.pin_if_possible(data) for data in whole.values()]
        self.reason = next(filter(None, reasons), "")
        kinds = {host_memory.memory_kind(data) for data in whole.values()}
        self.is_in_place = kinds == {"registered"}
        self.fields: dict[str, Tensor] = {}
        for name, entry in stored.items():
            data = whole[entry.file.path][entry.offset : entry.offset + entry.nbytes]
            rows = data.view(entry.dtype).view(entry.shape)
            self.fields[name] = host_memory.keep_pinned(rows, whole[entry.file.path])

    def check(self) -> None:
        """Raises ValueError if a file was truncated, because a read would end the process."""
        for path, file in self._files.items():
            check_size(path, file.size(), len(file))

    def flush(self) -> None:
        """Waits only for the GPU: there are no changes to write. Accepts a truncated file too."""
        wait_for_rows(None)


def check_size(path: str, size: int, needed: int) -> None:
    """Raises ValueError if a mapped file has become shorter than the table in it.

    The system ends a process (SIGBUS) that accesses memory behind the end of a mapped file. No
    exception can report such an access, so tables call check() before they use the rows.
    """
    if size < needed:
        raise ValueError(
            f"{path}: the file was truncated to {size:,} bytes, but a table maps {needed:,} bytes"
            " of it. Close the table, and open a complete file or create a new table. To replace a"
            " file in use, write another file and rename it."
        )


def make_placement(
    count: int, fields: int, kind: MemoryKind, device: _Device, path: _Path
) -> Placement:
    """Allocates exactly `count` zeroed bytes of one kind of memory for `fields` fields.

    `kind`, `device` and `path` are those of HostTable.
    """
    check_kind(kind, device, path)
    if count >= 2**63:
        raise ValueError(f"rows: the table must be smaller than 2^63 bytes, got {count:,} bytes")
    if path is not None:
        return _FilePlacement(count, path)
    if kind == "cuda":
        return _GpuPlacement(count, device)
    if kind == "shared":
        calibrate_once(count)
        return SharedPlacement(SharedMemory.create(count, fields))
    return _HostPlacement(count, cast(host_memory.HostMemoryKind, kind))
