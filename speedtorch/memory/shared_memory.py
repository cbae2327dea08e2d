"""SharedMemory: host memory that several processes map, and the handle with which they open it.

The memory is an anonymous file (memfd_create) in a shared mapping. The kernel frees the memory once
no process uses it, however those processes end. The size is sealed, so that no process can truncate
the file under another. Words behind the data store the version and the origin of each field's first
values. The version is a sequence lock for one writer and any number of readers.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from speedtorch.files.system_calls import calls
from speedtorch.memory import host_memory
from speedtorch.memory.near_gpu import near_gpu

__all__ = ["SharedMemory", "SharedMemoryHandle"]

_Result = TypeVar("_Result")

_NOEXEC_SEAL = 0x8  # MFD_NOEXEC_SEAL of Linux 6.3, which some systems require
_RESERVED_AT_ONCE = 1 << 30  # Python handles signals between two calls
_WORD_BYTES = 8
_LOADED = 1  # the word of a field whose values were loaded

_FIRST_NAP_SECONDS, _LONGEST_NAP_SECONDS = 1e-5, 1e-3


class _Descriptor(io.FileIO):
    """A file descriptor, `_Descriptor(path or number, "r+")`, that is closed with the object.

    The object owns the descriptor from the start, so that no exception can leave it open.
    """

    __del__ = io.FileIO.close  # without FileIO's ResourceWarning

    def opened_again(self) -> _Descriptor:
        """Opens the same memory again; the new open file has its own locks."""
        return _Descriptor(f"/proc/self/fd/{self.fileno()}", "r+")

    @property
    def file(self) -> tuple[int, int]:
        """The device and inode numbers of the memory."""
        return _identity(self.fileno())


_writers: WeakValueDictionary[tuple[int, int, tuple[int, int]], _Descriptor] = WeakValueDictionary()
"""The locks of the threads that are inside `writing()`."""


@dataclass(eq=False, repr=False)
class SharedMemoryHandle:
    """Opens the memory in another process, which receives the pickled handle.

    A process that multiprocessing starts receives a descriptor with the handle. Other processes
    open the descriptor in /proc of the process that made the handle, which must live until then.
    """

    boot: str  # identifies the machine and its last boot
    namespace: str  # the namespace of the process number
    process: int
    started: int  # the start time of the process, in clock ticks since the boot
    number: int  # a descriptor of the process
    file: tuple[int, int]  # device and inode numbers of the memory
    count: int  # bytes of data
    own: _Descriptor | None  # the handle's own descriptor, if open() needs no other process

    def __getstate__(self) -> dict[str, Any]:
        own = None if get_spawning_popen() is None else self.own
        return vars(self) | {"own": own and DupFd(own.fileno())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        sent = state["own"]
        vars(self).update(state, own=sent and _Descriptor(sent.detach(), "r+"))

    def open(self) -> _Descriptor:
        """Returns a new descriptor of the memory.

        Raises:
            ValueError: The memory is of another machine or container, or from before a restart.
            ProcessLookupError: The process that made the handle has ended or closed its table.
            PermissionError: The memory belongs to another user, or the system denies access to the
                process that made the handle.
        """
        if self.own is not None:
            return self.own.opened_again()
        if self.boot != _boot():
            raise ValueError(
                "handle: the table is in the memory of another machine, or this machine has since"
                " restarted. save() the table there and HostTable.open() the file here."
            )
        if self.namespace != _namespace():
            raise ValueError(
                f"handle: the table is shared by a process of another container"
                f" ({self.namespace}, this process is in {_namespace()}). Run both containers in"
                " one PID namespace, or map one file in both with HostTable.open(path, 'mapped')."
            )
        gone = (
            f"process {self.process}, which shared the table, has closed it or has ended. Call"
            " share() in a process that has the table open."
        )
        path = f"/proc/{self.process}/fd/{self.number}"
        is_there = _start_of(self.process) == self.started
        try:
            # Checked before the open: the number may now name a socket or another file.
            if is_there and _identity(path) == self.file:
                descriptor = _Descriptor(path, "r+")
                if descriptor.file == self.file:
                    return descriptor
        except FileNotFoundError as error:
            raise ProcessLookupError(errno.ESRCH, gone) from error
        except PermissionError as error:
            text = (
                "the table belongs to another user, or the system denies access to the process that"
                " shared it. Share tables among processes of one user with the same privileges."
            )
            raise PermissionError(errno.EACCES, text, path) from error
        raise ProcessLookupError(errno.ESRCH, gone)


class SharedMemory:
    """Zero-initialised memory that several processes map and can read and write.

    `data` is uint8 `[count]`. The memory is freed with the last process, tensor and handle that
    uses it. This object owns the descriptor and closes it, even if the constructor raises. If
    `new_bytes` is not 0, the memory is new, and the constructor reserves and seals that many bytes.
    """

    def __init__(self, descriptor: _Descriptor, count: int, new_bytes: int = 0) -> None:
        self._descriptor = descriptor
        self._count = count
        self.data = torch.empty(0, dtype=torch.uint8, device="cpu")
        try:
            if new_bytes:
                os.fchmod(descriptor.fileno(), 0o600)
                with near_gpu():
                    for offset in range(0, new_bytes, _RESERVED_AT_ONCE):
                        count_at_once = min(_RESERVED_AT_ONCE, new_bytes - offset)
                        calls.reserve(descriptor.fileno(), offset, count_at_once)
                seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            if count:
                self.data = torch.frombuffer(
                    calls.map(descriptor.fileno(), count), dtype=torch.uint8
                )
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, count: int, fields: int) -> SharedMemory:
        """Reserves new memory for a table with `fields` fields.

        Raises MemoryError if there is too little memory, RuntimeError without memfd_create.
        """
        size = _in_pages(_in_pages(count) + _WORD_BYTES * (1 + fields))
        if host_memory.is_checked() and size > (available := host_memory.available_bytes()):
            raise MemoryError(
                f"shared memory: {size:,} bytes are needed and {available:,} are available. Free"
                " memory, use fewer or narrower rows, or set SPEEDTORCH_MEMORY_CHECK=0 to try"
                " anyway"
            )
        try:
            return cls(_new_file(), count, size)
        except OSError as error:
            if error.errno not in (errno.ENOMEM, errno.ENOSPC):
                raise
            raise MemoryError(
                f"shared memory: the system could not reserve {size:,} bytes: {error}"
            ) from error

    def handle(self) -> SharedMemoryHandle:
        """Returns a handle that opens the memory in another process."""
        return SharedMemoryHandle(
            boot=_boot(),
            namespace=_namespace(),
            process=os.getpid(),
            started=_start_of(os.getpid()) or 0,
            number=self._descriptor.fileno(),
            file=self._descriptor.file,
            count=self._count,
            # A separate descriptor: a process may start after this table is closed.
            own=self._descriptor.opened_again(),
        )

    def close(self) -> None:
        """Closes the descriptor; the memory remains until its tensors are freed."""
        self._descriptor.close()

    # ---- first values

    def begin(self, field: int, value: bytes, fill: Callable[[], object]) -> bool:
        """Calls `fill` to fill a field with `value`, unless it is filled or loaded already.

        Other processes wait meanwhile. Returns whether the field began with this value or with
        loaded values.
        """
        lock = nullcontext(self._descriptor) if self._is_mine() else self._locked(fcntl.LOCK_EX)
        with lock as descriptor:
            if (mark := self._read_word(1 + field)) == 0:
                fill()
                self._write_word(descriptor, 1 + field, mark := _mark_of(value))
        return mark in (_LOADED, _mark_of(value))

    def mark_loaded(self, field: int) -> None:
        """Marks a field as loaded: no process will fill the field with its initial value."""
        self._write_word(self._descriptor, 1 + field, _LOADED)

    # ---- the version: a sequence lock

    @property
    def version(self) -> int:
        """The version: odd during a write or after a writer ended halfway, otherwise even.

        A complete write adds 2.

        pread and pwrite access the version instead of the mapping. The kernel locks the page during
        these calls, which orders them with earlier and later accesses to the mapping.
        """
        return self._read_word(0)

    def _read_word(self, number: int) -> int:
        offset = _in_pages(self._count) + _WORD_BYTES * number
        return int.from_bytes(os.pread(self._descriptor.fileno(), _WORD_BYTES, offset), "little")

    def _write_word(self, descriptor: _Descriptor, number: int, word: int) -> None:
        offset = _in_pages(self._count) + _WORD_BYTES * number
        os.pwrite(descriptor.fileno(), word.to_bytes(_WORD_BYTES, "little"), offset)

    @contextmanager
    def writing(self, settle: Callable[[], object]) -> Iterator[None]:
        """Makes this thread the only writer, and lets readers detect the writes by the version.

        At the end, `settle()` completes all writes. If `settle()` raises, the version remains odd
        and readers raise the error about a writer that ended.
        """
        if self._is_mine():
            raise RuntimeError("writing: this thread is already inside a writing() block")
        process = os.getpid()
        with self._locked(fcntl.LOCK_EX) as descriptor:
            _writers[self._this_thread()] = descriptor
            # The version is odd already if an earlier writer ended halfway.
            version = self.version | 1
            self._write_word(descriptor, 0, version)
            try:
                yield
            finally:
                if os.getpid() == process:  # a child that was forked inside ends no block
                    settle()
                    # Another thread may have closed `self._descriptor` by now.
                    self._write_word(descriptor, 0, version + 1)

    def _is_mine(self) -> bool:
        """Whether this thread is inside `writing()`, where the lock would wait for itself."""
        lock = _writers.get(self._this_thread())
        return lock is not None and not lock.closed

    def _this_thread(self) -> tuple[int, int, tuple[int, int]]:
        """The key of this thread and this memory in `_writers`."""
        return os.getpid(), threading.get_ident(), self._descriptor.file

    @contextmanager
    def _locked(self, how: int) -> Iterator[_Descriptor]:
        """Locks the memory for this thread and yields the descriptor that has the lock.

        The descriptor is a new open file, because one open file's locks do not exclude each other.
        """
        process = os.getpid()
        with self._descriptor.opened_again() as descriptor:
            calls.lock(descriptor.fileno(), how)
            try:
                yield descriptor
            finally:
                if os.getpid() == process:
                    # Closing the file does not release a lock if a forked child has it open, too.
                    calls.lock(descriptor.fileno(), fcntl.LOCK_UN)

    def read_consistently(self, read: Callable[[], _Result], timeout_s: float) -> _Result:
        """Returns the result of a `read()` call during which no other thread was in writing().

        Raises TimeoutError if none succeeds in time, and RuntimeError if a writer ended halfway.
        """
        if self._is_mine():
            return read()
        until, nap = time.monotonic() + timeout_s, _FIRST_NAP_SECONDS
        while True:
            before = self.version
            if before % 2 == 0:
                result = read()
                if self.version == before:
                    return result
            elif self._writer_ended(before):
                raise RuntimeError(
                    "read_consistently: a writer ended within `with table.writing()`, and some of"
                    " its rows may be old. Write its rows again within such a block."
                )
            if time.monotonic() > until:
                raise TimeoutError(
                    f"read_consistently: every read for {timeout_s:g} s overlapped with a write."
                    " Read fewer rows at once, write less often or in shorter writing() blocks, or"
                    " increase timeout_s."
                )
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_SECONDS)

    def _writer_ended(self, version: int) -> bool:
        """Whether the version marks a write but no process has the writer's lock."""
        try:
            with self._locked(fcntl.LOCK_SH | fcntl.LOCK_NB):
                return self.version == version
        except BlockingIOError:
            return False


def _in_pages(count: int) -> int:
    """`count` bytes, rounded up to whole pages."""
    return -(-count // mmap.PAGESIZE) * mmap.PAGESIZE


def _mark_of(value: bytes) -> int:
    """A word for a value, different from 0 and _LOADED."""
    digest = hashlib.blake2b(value, digest_size=_WORD_BYTES).digest()
    return int.from_bytes(digest, "little") | 2


def _new_file() -> _Descriptor:
    """An empty anonymous file in memory that can be sealed."""
    if not hasattr(os, "memfd_create"):
        raise RuntimeError("memory='shared' needs memfd_create from Linux with glibc 2.27 or later")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return _Descriptor(os.memfd_create("speedtorch", flags | _NOEXEC_SEAL), "r+")
    except OSError as error:
        if error.errno != errno.EINVAL:  # raised by Linux before 6.3
            raise
        return _Descriptor(os.memfd_create("speedtorch", flags), "r+")


def _identity(file: str | int) -> tuple[int, int]:
    """The device and inode numbers of a file, given its path or descriptor."""
    status = os.stat(file)
    return status.st_dev, status.st_ino


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _start_of(process: int) -> int | None:
    """The start time of a process in clock ticks since the boot, or None without such a process."""
    try:
        status = Path(f"/proc/{process}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in parentheses, which may contain any characters.
    return int(status.rpartition(b")")[2].split()[19])
