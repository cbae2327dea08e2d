"""File calls, exact reads and mapped files.

File calls of tables and checkpoints go through `calls`, so that tests can make each of them fail or
record their order. No such call holds the GIL while it waits for the disk. Seeking, listing, file
status, making parent folders and removing a folder tree do not go through `calls`. Neither do reads
and writes of resident rows, which are in csrc/memory/resident_rows.cpp.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "OpenFile",
    "calls",
    "map_new_file",
    "open_to_read",
    "opened",
    "opened_folder",
    "path_in_errors",
    "read_file",
    "reserve",
    "share_lock",
    "sync_folder",
    "where_supported",
    "write_all",
]


_map_copy = partial(mmap.mmap, access=mmap.ACCESS_COPY)  # writes to the memory change no file
_map_to_read = partial(mmap.mmap, access=mmap.ACCESS_READ)


def _move(name: str, source: int, target: int) -> None:
    """Moves a file from one open folder to another and replaces a file of this name there."""
    os.replace(name, name, src_dir_fd=source, dst_dir_fd=target)


def _start_writeback(descriptor: int, begin: int, count: int) -> None:
    """Starts to write dirty pages to disk and returns at once.

    POSIX_FADV_DONTNEED makes Linux start the write before it drops the clean pages of the range. A
    range that was just written has no clean pages.
    """
    os.posix_fadvise(descriptor, begin, count, os.POSIX_FADV_DONTNEED)


@dataclass
class FileCalls:
    """The file calls of tables and checkpoints; tests replace them to fail or record."""

    open: Callable[..., int] = os.open
    chmod: Callable[[int, int], None] = os.fchmod
    reserve: Callable[[int, int, int], None] = os.posix_fallocate
    write: Callable[[int, memoryview], int] = os.write
    start_writeback: Callable[[int, int, int], None] = _start_writeback
    read: Callable[[int, Sequence[memoryview], int], int] = os.preadv
    map: Callable[[int, int], mmap.mmap] = mmap.mmap
    map_copy: Callable[[int, int], mmap.mmap] = _map_copy
    map_to_read: Callable[[int, int], mmap.mmap] = _map_to_read
    make_folder: Callable[[str], None] = os.mkdir
    fsync: Callable[[int], None] = os.fsync
    lock: Callable[[int, int], Any] = fcntl.flock
    lockf: Callable[[int, int], Any] = fcntl.lockf
    rename: Callable[[str, str], None] = os.replace
    move: Callable[[str, int, int], None] = _move
    unlink: Callable[[str], None] = os.unlink
    remove_folder: Callable[[str], None] = os.rmdir
    close: Callable[[int], None] = os.close


calls = FileCalls()


_LOCK_SECONDS = 5.0


@contextmanager
def path_in_errors(path: str, more: str = "") -> Iterator[None]:
    """Adds the file's path to errors that do not name one, and `more` to errors of file calls."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(path):
            raise
        raise ValueError(f"{path}: {error}") from error
    except OSError as error:
        # A new error would keep frames, and the files they map, until a garbage collection.
        error.strerror = f"{error.strerror}: {more}" if more else error.strerror
        error.filename = path if more else error.filename or path
        error.args = (error.errno, error.strerror)  # other processes receive args
        raise


@contextmanager
def where_supported(*errnos: int) -> Iterator[None]:
    """Ignores errors of calls that a file system (NFS, FUSE) does not support, and `errnos`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, *errnos):
            raise


def reserve(descriptor: int, count: int, path: str) -> None:
    """Allocates `count` bytes of disk for a new file; a full disk then fails before the write."""
    if count == 0:
        return
    status = os.statvfs(os.path.dirname(path))
    free = status.f_bavail * status.f_frsize
    with path_in_errors(path, f"{count:,} bytes are needed and {free:,} are free"):
        # Checked first: until an allocation fails, other programs would find the disk full.
        if status.f_blocks and count > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        calls.reserve(descriptor, 0, count)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Writes all of `data` at the file's current position."""
    rest = memoryview(data)
    while len(rest):
        if (written := calls.write(descriptor, rest)) <= 0:
            raise OSError(errno.EIO, "the disk accepts no more bytes")
        rest = rest[written:]


@contextmanager
def opened_folder(folder: str) -> Iterator[int]:
    """Opens a folder, so that the names in it can be synced."""
    with ExitStack() as stack:
        try:
            descriptor = stack.enter_context(opened(folder, os.O_RDONLY | os.O_DIRECTORY))
        except FileNotFoundError as error:
            text = "the folder does not exist; create it first"
            raise FileNotFoundError(errno.ENOENT, text, folder) from error
        yield descriptor


def share_lock(descriptor: int) -> None:
    """Takes a shared lock, so that other processes do not sweep the folder while it is open.

    A sweep holds its lock briefly. After 5 seconds this function returns without the lock.
    """
    until = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            calls.lock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                return
            time.sleep(0.01)


def sync_folder(folder: str, descriptor: int) -> None:
    """Syncs the names in a folder to disk, if the file system supports that."""
    text = "the new file is complete and in place, but a power loss may still undo the replacement"
    with where_supported(), path_in_errors(folder, text):
        calls.fsync(descriptor)


@dataclass
class OpenFile:
    """A regular file that is open to be read."""

    path: str
    descriptor: int
    status: os.stat_result

    @property
    def size(self) -> int:
        """The number of bytes when the file was opened."""
        return self.status.st_size

    def read(self, view: memoryview, offset: int) -> None:
        """Fills a view with the bytes from `offset` on; ValueError if the file ends earlier."""
        with path_in_errors(self.path):
            while len(view):
                if (count := calls.read(self.descriptor, [view], offset)) == 0:
                    raise ValueError(f"the file ends at byte {offset:,}. It was cut off.")
                view, offset = view[count:], offset + count

    def map(self, how: Callable[[int, int], mmap.mmap]) -> mmap.mmap:
        """Maps the whole file; OSError if the file system does not support that."""
        with path_in_errors(self.path):
            return how(self.descriptor, self.size)


@contextmanager
def opened(path: str, flags: int, mode: int = 0o666) -> Iterator[int]:
    """Opens a file and closes its descriptor at the end of the block."""
    descriptor = calls.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield descriptor
    finally:
        calls.close(descriptor)


@contextmanager
def open_to_read(path: str | os.PathLike[str]) -> Iterator[OpenFile]:
    """Opens a regular file; ValueError for anything else."""
    name = os.fspath(path)
    # O_NONBLOCK: opening a named pipe must not wait for its writer.
    with opened(name, os.O_RDONLY | os.O_NONBLOCK) as descriptor:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{name}: is not a regular file")
        yield OpenFile(name, descriptor, status)


def read_file(path: str | os.PathLike[str], limit: float) -> bytearray:
    """Reads all bytes of a regular file; ValueError if the file has more than `limit`."""
    with open_to_read(path) as file:
        if file.size > limit:
            raise ValueError(f"the file has {file.size:,} bytes, but the limit is {limit:,}")
        file.read(memoryview(data := bytearray(file.size)), 0)
    return data


def map_new_file(path: str | os.PathLike[str], count: int) -> tuple[Tensor, int]:
    """Returns a new file of zeros, mapped as uint8 `[count]`, and its descriptor.

    The caller closes the descriptor. Disk space is allocated first, so that a full disk raises an
    error here instead of SIGBUS later. After an error the new file is removed.
    """
    name = os.path.abspath(path)
    folder = os.path.dirname(name)
    with opened_folder(folder) as parent, ExitStack() as undone:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = calls.open(name, flags, 0o666)
        except FileExistsError as error:
            text = "exists already, and a new file is needed; choose another path"
            raise FileExistsError(errno.EEXIST, text, name) from error
        undone.callback(calls.unlink, name)
        undone.callback(calls.close, descriptor)
        reserve(descriptor, count, name)
        data = torch.empty(0, dtype=torch.uint8, device="cpu")
        if count:  # An empty file cannot be mapped.
            with path_in_errors(name):
                data = torch.frombuffer(calls.map(descriptor, count), dtype=torch.uint8)
        sync_folder(folder, parent)
        undone.pop_all()
    return data, descriptor
