"""SharedMemory: host memory that several processes map, and the handle by which they open it.

It is an anonymous file in memory (memfd_create), mapped shared. The kernel frees it once no process
has it, however those end: there is no name to sweep. Its size is sealed, so that no process can cut
it under another. Words behind the data hold the version, a sequence lock of one writer and any
number of readers, and for each field of the table how it began.
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

_NOEXEC_SEAL = 0x8  # MFD_NOEXEC_SEAL of Linux 6.3, which some systems demand
_RESERVED_AT_ONCE = 1 << 30  # Python answers signals in between
_WORD_BYTES = 8
_GIVEN = 1  # the word of a field that was loaded

_FIRST_NAP_SECONDS, _LONGEST_NAP_SECONDS = 1e-5, 1e-3


class _Descriptor(io.FileIO):
    """A descriptor of the memory, `_Descriptor(path or number, "r+")`, that closes with the object.

    There is no line at which it is open and an error would leave it so.
    """

    __del__ = io.FileIO.close  # without the warning that FileIO gives

    def opened_again(self) -> _Descriptor:
        """Another open file of the same memory, with locks of its own."""
        return _Descriptor(f"/proc/self/fd/{self.fileno()}", "r+")

    @property
    def file(self) -> tuple[int, int]:
        """Device and inode of the memory."""
        return _identity(self.fileno())


_writers: WeakValueDictionary[tuple[int, int, tuple[int, int]], _Descriptor] = WeakValueDictionary()
"""Threads within writing(), and their locks."""


@dataclass(eq=False, repr=False)
class SharedMemoryHandle:
    """What opens the memory in another process, once pickled there.

    A process that multiprocessing starts gets a descriptor with it. Others open the descriptor of
    the process that made the handle, which has to live until then, by its number in /proc.
    """

    boot: str  # the machine, and its last start
    namespace: str  # in which process numbers are counted
    process: int
    started: int  # when the process started, in clock ticks since the boot
    number: int  # of a descriptor of the process
    file: tuple[int, int]  # device and inode of the memory
    count: int  # bytes of data
    own: _Descriptor | None  # of the handle, as long as this process does not need the others

    def __getstate__(self) -> dict[str, Any]:
        own = None if get_spawning_popen() is None else self.own
        return vars(self) | {"own": own and DupFd(own.fileno())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        sent = state["own"]
        vars(self).update(state, own=sent and _Descriptor(sent.detach(), "r+"))

    def open(self) -> _Descriptor:
        """A new descriptor of the memory.

        Raises:
            ValueError: It is memory of another machine or container, or from before a restart.
            ProcessLookupError: The process that made the handle, or its table, is gone.
            PermissionError: It belongs to another user.
        """
        if self.own is not None:
            return self.own.opened_again()
        if self.boot != _boot():
            raise ValueError(
                "handle: the table is in the memory of another machine, or of this one before its"
                " last start; save() it there, and HostTable.open() the file here"
            )
        if self.namespace != _namespace():
            raise ValueError(
                f"handle: the table is shared by a process of another container"
                f" ({self.namespace}, here {_namespace()}); let both see the same processes, or"
                " map one file in both: HostTable.open(path, 'mapped')"
            )
        gone = (
            f"process {self.process}, which shared the table, has closed it or has ended; call"
            " share() in a process that has the table open"
        )
        path = f"/proc/{self.process}/fd/{self.number}"
        is_there = _start_of(self.process) == self.started
        try:
            # Asked first: by now the number may be that of a socket, or of another's file.
            if is_there and _identity(path) == self.file:
                descriptor = _Descriptor(path, "r+")
                if descriptor.file == self.file:
                    return descriptor
        except FileNotFoundError as error:
            raise ProcessLookupError(errno.ESRCH, gone) from error
        except PermissionError as error:
            text = "the table belongs to another user; processes of one user can share it"
            raise PermissionError(errno.EACCES, text, path) from error
        raise ProcessLookupError(errno.ESRCH, gone)


class SharedMemory:
    """Zeros that several processes read and write at the same place.

    The memory goes with the last process, tensor and handle that has it. `data` is uint8 `[count]`.
    The descriptor is closed with this, also where this raises. `new_bytes` are all bytes of memory
    that is new, which is taken and sealed now.
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
    def made(cls, count: int, fields: int) -> SharedMemory:
        """New memory of a table with so many fields, all of it taken now.

        Raises MemoryError if the machine has too little, RuntimeError if it has no such memory.
        """
        size = _in_pages(_in_pages(count) + _WORD_BYTES * (1 + fields))
        if host_memory.is_checked() and size > (available := host_memory.available_bytes()):
            raise MemoryError(
                f"shared memory: {size:,} bytes are needed and {available:,} are available: free"
                " memory, use fewer or narrower rows, or set SPEEDTORCH_MEMORY_CHECK=0 to try all"
                " the same"
            )
        try:
            return cls(_new_file(), count, size)
        except OSError as error:
            if error.errno not in (errno.ENOMEM, errno.ENOSPC):
                raise
            raise MemoryError(
                f"shared memory: the system gave less than {size:,} bytes: {error}"
            ) from error

    def handle(self) -> SharedMemoryHandle:
        """What opens the memory in another process."""
        return SharedMemoryHandle(
            boot=_boot(),
            namespace=_namespace(),
            process=os.getpid(),
            started=_start_of(os.getpid()) or 0,
            number=self._descriptor.fileno(),
            file=self._descriptor.file,
            count=self._count,
            # Of its own: the process that is started next may get it after the table is closed.
            own=self._descriptor.opened_again(),
        )

    def close(self) -> None:
        """Closes the descriptor; the memory goes with the tensors of it."""
        self._descriptor.close()

    # ---- first values

    def begin(self, field: int, value: bytes, fill: Callable[[], object]) -> bool:
        """Lets one process fill a field of this number with a value, once; the others wait.

        Returns whether the field began with this value, or with values that were loaded.
        """
        lock = nullcontext(self._descriptor) if self._is_mine() else self._locked(fcntl.LOCK_EX)
        with lock as descriptor:
            if (mark := self._read_word(1 + field)) == 0:
                fill()
                self._write_word(descriptor, 1 + field, mark := _mark_of(value))
        return mark in (_GIVEN, _mark_of(value))

    def note_given(self, field: int) -> None:
        """Says that a field has values which no process is to fill."""
        self._write_word(self._descriptor, 1 + field, _GIVEN)

    # ---- the version: a sequence lock

    @property
    def version(self) -> int:
        """Even: what changed is whole. Odd: a writer is at work. Each write adds two.

        Calls read and write it, not the mapping: the kernel's locks on the page order it with what
        is read and written in the mapping before and after.
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
        """Within, this thread alone writes for readers that check the version.

        At the end it calls settle(), after which all is written. If that raises the version stays
        odd, and readers are told that the writer ended.
        """
        if self._is_mine():
            raise RuntimeError("writing: this thread writes already; one block is enough")
        process = os.getpid()
        with self._locked(fcntl.LOCK_EX) as descriptor:
            _writers[self._this_thread()] = descriptor
            # That of a writer that ended half-way is odd already.
            version = self.version | 1
            self._write_word(descriptor, 0, version)
            try:
                yield
            finally:
                if os.getpid() == process:  # a child that was forked within ends no block
                    settle()
                    # Another thread may have closed the other descriptor.
                    self._write_word(descriptor, 0, version + 1)

    def _is_mine(self) -> bool:
        """Whether this thread is within writing(): it has the lock, and would wait for itself."""
        lock = _writers.get(self._this_thread())
        return lock is not None and not lock.closed

    def _this_thread(self) -> tuple[int, int, tuple[int, int]]:
        """This thread, as what writes to this memory."""
        return os.getpid(), threading.get_ident(), self._descriptor.file

    @contextmanager
    def _locked(self, how: int) -> Iterator[_Descriptor]:
        """A lock of this thread: another open file has another lock, also in one process.

        It gives that file.
        """
        process = os.getpid()
        with self._descriptor.opened_again() as descriptor:
            calls.lock(descriptor.fileno(), how)
            try:
                yield descriptor
            finally:
                if os.getpid() == process:
                    # Closing gives no lock back that a forked child has, too.
                    calls.lock(descriptor.fileno(), fcntl.LOCK_UN)

    def read_consistently(self, read: Callable[[], _Result], timeout_s: float) -> _Result:
        """The result of a call of read() while which no writer but this thread was at work.

        Raises TimeoutError if there was none in time, RuntimeError if a writer ended half-way.
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
                    "read_consistently: a writer ended within `with table.writing()`, and its rows"
                    " may be of both versions; write them again within such a block"
                )
            if time.monotonic() > until:
                raise TimeoutError(
                    f"read_consistently: writers left no {timeout_s:g} s in which the rows could be"
                    " read: read fewer rows at once, write less often, or wait longer (timeout_s)"
                )
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_SECONDS)

    def _writer_ended(self, version: int) -> bool:
        """Whether no process writes though the version says so."""
        try:
            with self._locked(fcntl.LOCK_SH | fcntl.LOCK_NB):
                return self.version == version
        except BlockingIOError:
            return False


def _in_pages(count: int) -> int:
    """The bytes of the pages that so many bytes take."""
    return -(-count // mmap.PAGESIZE) * mmap.PAGESIZE


def _mark_of(value: bytes) -> int:
    """A word for a value, which is neither 0 nor _GIVEN."""
    digest = hashlib.blake2b(value, digest_size=_WORD_BYTES).digest()
    return int.from_bytes(digest, "little") | 2


def _new_file() -> _Descriptor:
    """An empty anonymous file in memory that can be sealed."""
    if not hasattr(os, "memfd_create"):
        raise RuntimeError("memory='shared' needs memfd_create, of Linux with glibc 2.27 or later")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return _Descriptor(os.memfd_create("speedtorch", flags | _NOEXEC_SEAL), "r+")
    except OSError as error:
        if error.errno != errno.EINVAL:  # which Linux before 6.3 says
            raise
        return _Descriptor(os.memfd_create("speedtorch", flags), "r+")


def _identity(file: str | int) -> tuple[int, int]:
    """Device and inode of a file, by its path or descriptor."""
    status = os.stat(file)
    return status.st_dev, status.st_ino


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _start_of(process: int) -> int | None:
    """When a process started, in clock ticks since the boot; None if there is none."""
    try:
        status = Path(f"/proc/{process}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in parentheses, which may hold anything.
    return int(status.rpartition(b")")[2].split()[19])
