"""New files in the place of old ones: whole and on the disk, or not there at all."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from speedtorch.files.system_calls import (
    about,
    calls,
    open_folder,
    reserve,
    share_lock,
    sync_folder,
    where_supported,
)

__all__ = ["NewFile", "replace_files"]


class NewFile:
    """A file in the making beside the one whose place it is to take.

    Ctrl-C may come between any call on the disk and the note of it in here, so what has happened
    already is asked of the disk.
    """

    def __init__(self, path: str, token: str) -> None:
        folder, name = os.path.split(path)
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, "is a folder; name a file", path)
        self.path = path
        self.partial = os.path.join(folder, f".{name}.{token}.partial")
        self.previous = os.path.join(folder, f".{name}.{token}.previous")
        self._descriptor = -1

    def open(self) -> None:
        """Makes it, with the mode of the file that is there now."""
        there = os.path.exists(self.path)
        mode = os.stat(self.path).st_mode & 0o777 if there else 0o666
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = calls.open(self.partial, flags, mode)
        if there:
            with suppress(OSError):  # File systems without modes.
                calls.chmod(self._descriptor, mode)  # What the umask took away.

    def reserve(self, count: int) -> None:
        """Takes the disk space of `count` bytes, where the file system can do that."""
        with where_supported():
            reserve(self._descriptor, count, self.path)

    def write(self, data: bytes | memoryview) -> None:
        """Appends all of `data`."""
        rest = memoryview(data)
        with about(self.path):
            while len(rest):
                if (written := calls.write(self._descriptor, rest)) <= 0:
                    raise OSError(errno.EIO, "the disk takes no more bytes", self.path)
                rest = rest[written:]

    def finish(self) -> None:
        """Brings every byte to the disk and closes the file."""
        with about(self.path):
            calls.fsync(self._descriptor)
        self._close()

    def undo(self) -> None:
        """Brings back the file of the second name, or none if there was none."""
        if os.path.lexists(self.partial):
            return  # Not switched yet.
        if os.path.lexists(self.previous):
            calls.rename(self.previous, self.path)
        else:
            calls.unlink(self.path)

    def clean(self) -> None:
        """Removes every name that only served the making."""
        self._close()
        for left in (self.partial, self.previous):
            if os.path.lexists(left):
                calls.unlink(left)

    def _close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            calls.close(descriptor)


@contextmanager
def replace_files(paths: Sequence[str | os.PathLike[str]]) -> Iterator[list[NewFile]]:
    """Replaces or creates files at once: all of them, whole and on disk, or none.

    The new files are written within the `with` block, beside the old ones under hidden names, then
    synced, then renamed, then their folder is synced. One file switches in one atomic step, also at
    a power loss; several follow each other, and an error between two brings the earlier ones back.
    After an OSError the old files are as they were, but if only the folder's sync failed, the
    message says that the new files are in place. What a killed process left behind is removed by
    the next replacement of the same file. A symbolic link's target is replaced.
    """
    targets = [os.path.realpath(path) for path in paths]
    token = f"{os.getpid()}-{secrets.token_hex(4)}"
    with ExitStack() as stack:
        folders = {}
        for folder in dict.fromkeys(os.path.dirname(target) for target in targets):
            folders[folder] = open_folder(folder)
            stack.callback(calls.close, folders[folder])
            _sweep(folder, folders[folder], targets)
        files: list[NewFile] = []
        for target in targets:
            files.append(NewFile(target, token))
            stack.callback(files[-1].clean)
            files[-1].open()
        yield files
        for file in files:
            file.finish()
        _switch(files)
        for folder, descriptor in folders.items():
            sync_folder(folder, descriptor)


def _switch(files: Sequence[NewFile]) -> None:
    if len(files) == 1:
        # One step of the disk: there is nothing between old and new to undo.
        calls.rename(files[0].partial, files[0].path)
        return
    try:
        for file in files:
            if os.path.exists(file.path):
                calls.link(file.path, file.previous)  # a second name, to go back to
        for file in files:
            calls.rename(file.partial, file.path)
    except BaseException:
        with ExitStack() as undoing:  # One that fails does not keep the others from it.
            for file in files:
                undoing.callback(file.undo)
        raise


def _sweep(folder: str, descriptor: int, targets: Sequence[str]) -> None:
    """Removes what killed processes left of files so named, unless someone writes here now."""
    any_name = "|".join(re.escape(os.path.basename(target)) for target in targets)
    left = re.compile(rf"\.({any_name})\.\d+-[0-9a-f]{{8}}\.(partial|previous)")
    # File systems without locks cannot tell: what is left stays.
    with where_supported(errno.EBADF, errno.ENOLCK):
        # Where they are in use, or another user's, saving works all the same.
        with suppress(BlockingIOError, PermissionError):
            calls.lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for entry in filter(left.fullmatch, os.listdir(folder)):
                calls.unlink(os.path.join(folder, entry))
        share_lock(descriptor)  # Held until the files have switched.
