"""Calls on files, exact reads, mapped files.

Every call on a file goes through `calls`, so that tests can make each of them fail or record their
order. None of them holds the GIL while it waits for the disk. Seeking, listing, making the folders
above a path and removing a folder with all in it do not go through it.
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
    "about",
    "calls",
    "map_new_file",
    "open_to_read",
    "opened",
    "opened_folder",
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
    """Moves a file from one open folder to another, in the place of the one of this name there."""
    os.replace(name, name, src_dir_fd=source, dst_dir_fd=target)


def _start_writeback(descriptor: int, begin: int, count: int) -> None:
    """Starts to write dirty pages to the disk, without waiting for it.

    Linux does so before it drops the clean pages of a range; there are none where all was written
    just now.
    """
    os.posix_fadvise(descriptor, begin, count, os.POSIX_FADV_DONTNEED)


@dataclass
class FileCalls:
    """The file calls of tables and what is saved; tests put failing or recording ones here."""

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
    own: Callable[[int, int], Any] = fcntl.lockf
    rename: Callable[[str, str], None] = os.replace
    move: Callable[[str, int, int], None] = _move
    unlink: Callable[[str], None] = os.unlink
    remove_folder: Callable[[str], None] = os.rmdir
    close: Callable[[int], None] = os.close


calls = FileCalls()


_LOCK_SECONDS = 5.0


@contextmanager
def about(path: str, more: str = "") -> Iterator[None]:
    """Names the file in errors that do not yet, and says more of those of calls on it."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(path):
            raise
        raise ValueError(f"{path}: {error}") from error
    except OSError as error:
        # A new error would keep the frames, and what they have mapped, until garbage is collected.
        error.strerror = f"{error.strerror}: {more}" if more else error.strerror
        error.filename = path if more else error.filename or path
        error.args = (error.errno, error.strerror)  # which is what another process is told
        raise


@contextmanager
def where_supported(*others: int) -> Iterator[None]:
    """Passes over what a file system cannot do (NFS, CIFS, some FUSE), also by other answers."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, *others):
            raise


def reserve(descriptor: int, count: int, path: str) -> None:
    """Takes `count` bytes of disk for a new file now, rather than find none left half-way."""
    if count == 0:
        return
    status = os.statvfs(os.path.dirname(path))
    free = status.f_bavail * status.f_frsize
    with about(path, f"{count:,} bytes are needed and {free:,} are free"):
        # Asked first, because taking what there is would leave nothing to others until it fails.
        if status.f_blocks and count > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        calls.reserve(descriptor, 0, count)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Writes all of `data` from where the file is on."""
    rest = memoryview(data)
    while len(rest):
        if (written := calls.write(descriptor, rest)) <= 0:
            raise OSError(errno.EIO, "the disk takes no more bytes")
        rest = rest[written:]


@contextmanager
def opened_folder(folder: str) -> Iterator[int]:
    """Opens a folder, to sync the names in it."""
    with ExitStack() as stack:
        try:
            descriptor = stack.enter_context(opened(folder, os.O_RDONLY | os.O_DIRECTORY))
        except FileNotFoundError as error:
            text = "the folder does not exist; create it first"
            raise FileNotFoundError(errno.ENOENT, text, folder) from error
        yield descriptor


def share_lock(descriptor: int) -> None:
    """Keeps other processes from sweeping a folder while it is open here.

    A sweep has the lock for a moment. Where another process has it longer, this goes on without.
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
    """Brings the names in a folder to the disk; some network file systems do that by themselves."""
    text = "the new file is in place and whole, but a power loss may still undo it"
    with where_supported(), about(folder, text):
        calls.fsync(descriptor)


@dataclass
class OpenFile:
    """A regular file that is open to be read."""

    path: str
    descriptor: int
    status: os.stat_result

    @property
    def size(self) -> int:
        """Its bytes when it was opened."""
        return self.status.st_size

    def read(self, view: memoryview, offset: int) -> None:
        """Fills a view from this byte on; ValueError if the file ends before."""
        with about(self.path):
            while len(view):
                if (count := calls.read(self.descriptor, [view], offset)) == 0:
                    raise ValueError(f"ends at byte {offset:,}; it was cut off")
                view, offset = view[count:], offset + count

    def map(self, how: Callable[[int, int], mmap.mmap]) -> mmap.mmap:
        """Maps it whole; OSError if the file system cannot do that."""
        with about(self.path):
            return how(self.descriptor, self.size)


@contextmanager
def opened(path: str, flags: int, mode: int = 0o666) -> Iterator[int]:
    """A descriptor of a file, which is closed at the end."""
    descriptor = calls.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield descriptor
    finally:
        calls.close(descriptor)


@contextmanager
def open_to_read(path: str | os.PathLike[str]) -> Iterator[OpenFile]:
    """Opens a regular file; ValueError for anything else."""
    name = os.fspath(path)
    # Opening a named pipe must not wait for its writer.
    with opened(name, os.O_RDONLY | os.O_NONBLOCK) as descriptor:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{name}: is not a regular file")
        yield OpenFile(name, descriptor, status)


def read_file(path: str | os.PathLike[str], limit: float) -> bytearray:
    """All bytes of a regular file; ValueError if it has more than `limit`."""
    with open_to_read(path) as file:
        if file.size > limit:
            raise ValueError(f"it has {file.size:,} bytes, and the limit is {limit:,}")
        file.read(memoryview(data := bytearray(file.size)), 0)
    return data


def map_new_file(path: str | os.PathLike[str], count: int) -> tuple[Tensor, int]:
    """A new file of zeros, mapped as uint8 `[count]`, and its descriptor, which the caller closes.

    Its disk space is taken first, so that a full disk is an error here and no SIGBUS later. An
    error leaves nothing behind.
    """
    name = os.path.abspath(path)
    folder = os.path.dirname(name)
    with opened_folder(folder) as parent, ExitStack() as undone:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = calls.open(name, flags, 0o666)
        except FileExistsError as error:
            text = "exists already; delete it or choose another path"
            raise FileExistsError(errno.EEXIST, text, name) from error
        undone.callback(calls.unlink, name)
        undone.callback(calls.close, descriptor)
        reserve(descriptor, count, name)
        data = torch.empty(0, dtype=torch.uint8, device="cpu")
        if count:  # An empty file cannot be mapped.
            with about(name):
                data = torch.frombuffer(calls.map(descriptor, count), dtype=torch.uint8)
        sync_folder(folder, parent)
        undone.pop_all()
    return data, descriptor
