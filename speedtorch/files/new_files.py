"""Atomic replacement of files: a new file appears complete and synced to disk, or not at all.

One rename replaces a single file. Several files of a folder are written to a hidden folder beside
them, `.table.npy.<token>.partial`. One rename of this folder to `.table.npy.switch` replaces all
old files at once. Then each file is moved to its own name, and the empty folder is removed.

A reader looks for a file in the switch folder first and under its own name second. A kill after the
switch leaves files in the switch folder, and the next replacement moves them first. The switch
needs no lock: a rename cannot replace a switch folder that has files, and a replacement that finds
one first moves its files to their names.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from speedtorch.files.system_calls import (
    calls,
    opened_folder,
    path_in_errors,
    reserve,
    share_lock,
    sync_folder,
    where_supported,
    write_all,
)

__all__ = ["TOKEN", "NewFile", "new_folder", "new_token", "rename_folder", "replace_files"]
__all__ += ["switch_folder"]

TOKEN = r"\d+-[0-9a-f]{8}"
"""A pattern of the results of new_token()."""

# Hidden names add 27 bytes at most; file systems allow 255 bytes, some only 143.
_LONGEST_BASE = 100

# The disk writes this many bytes while the next ones are copied to the page cache. With fsync alone
# the disk would idle until all bytes are in the page cache.
_WRITEBACK_BYTES = 16 << 20


class NewFile:
    """A new file, written under a hidden name, that will replace the file at `path`, if any.

    Ctrl-C may interrupt between a file call and its record in this object, so clean() looks at the
    disk. `count` is the number of bytes written.
    """

    def __init__(self, path: str, partial: str) -> None:
        self.path, self.partial = path, partial
        self.count = self._written_back = 0
        self._descriptor = -1
        self._mode: int | None = None
        if not os.path.exists(path):
            return
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "is a folder; name a file", path)
        if not stat.S_ISREG(mode):
            raise ValueError(f"{path}: is a named pipe, socket or device; name a regular file")
        # Raises for a file without write permission as root, too.
        if not mode & 0o222 or not os.access(path, os.W_OK, effective_ids=True):
            text = "is read-only; make it writable, or choose another name"
            raise PermissionError(errno.EACCES, text, path)
        self._mode = mode & 0o777

    def open(self) -> None:
        """Creates the file, with the mode of the file that it replaces."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        mode = 0o666 if self._mode is None else self._mode
        self._descriptor = calls.open(self.partial, flags, mode)
        if self._mode is not None:
            with suppress(OSError):  # File systems without modes.
                calls.chmod(self._descriptor, mode)  # Restores the bits that the umask cleared.

    def reserve(self, count: int) -> None:
        """Allocates disk space for `count` bytes, if the file system supports that."""
        with where_supported():
            reserve(self._descriptor, count, self.path)

    def write(self, data: bytes | memoryview) -> int:
        """Appends all of `data` and returns its number of bytes."""
        with path_in_errors(self.path):
            write_all(self._descriptor, data)
            self.count += (count := memoryview(data).nbytes)
            begin, end = self._written_back, self.count - self.count % _WRITEBACK_BYTES
            if begin < end:
                self._written_back = end
                with where_supported():
                    calls.start_writeback(self._descriptor, begin, end - begin)
        return count

    def flush(self) -> None:
        """Does nothing, because write() does not buffer; torch.save calls this."""

    def finish(self) -> None:
        """Syncs all bytes to disk and closes the file."""
        with path_in_errors(self.path):
            calls.fsync(self._descriptor)
        self._close()

    def clean(self) -> None:
        """Closes the file and removes it if it still has its hidden name."""
        self._close()
        if os.path.lexists(self.partial):
            calls.unlink(self.partial)

    def _close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            calls.close(descriptor)


@contextmanager
def replace_files(
    paths: Sequence[str | os.PathLike[str]], group: str | os.PathLike[str] | None = None
) -> Iterator[list[NewFile]]:
    """Replaces or creates files together: all of them, complete and on disk, or none.

    The `with` block writes the new files under hidden names. At its end, the files are synced and
    replace the old ones in one step, even if power is lost. After an error the old files are
    unchanged, unless the message says that the new ones are complete. The next replacement of the
    same files completes or removes the files of a killed process.

    Args:
        paths: One file, or several files of one folder that are no symbolic links. A link to a
            single file remains, and its target is replaced.
        group: The path that names the switch folder of several files (None: the first path). A
            reader looks in that folder first, see switch_folder().

    Raises:
        ValueError: A path is no regular file, or one of several is a link or in another folder.
        IsADirectoryError, PermissionError: A path is a folder, or a read-only file.
        OSError: A file call failed.
    """
    group_path = _absolute(paths[0] if group is None else group)
    several = len(paths) > 1
    targets = [_absolute(path) if several else os.path.realpath(path) for path in paths]
    folder = os.path.dirname(targets[0])
    for target in targets:
        if several and (os.path.islink(target) or os.path.dirname(target) != folder):
            text = "files that are replaced together must be in one folder, without symbolic links"
            raise ValueError(f"{target}: {text}. Choose another name.")
    partial = _hidden(group_path if several else targets[0], f"{new_token()}.partial")
    _complete_earlier(group_path)
    names = "|".join(re.escape(_base(os.path.basename(path))) for path in [group_path, *targets])
    hidden = re.compile(rf"\.({names})\.{TOKEN}\.partial")

    def publish(_: int) -> None:
        """Makes the new files visible, after those of an earlier save."""
        while not rename_folder(partial, switch_folder(group_path)):
            _complete_earlier(group_path)
        _complete(group_path)

    with ExitStack() as stack:
        if several:
            stack.callback(_complete, group_path)  # also if Ctrl-C interrupts after the switch
            inner = stack.enter_context(new_folder(folder, partial, hidden, publish))
            mode = stat.S_IMODE(os.fstat(inner).st_mode) | os.stat(folder).st_mode & 0o777
            with suppress(OSError):  # File systems without modes.
                calls.chmod(inner, mode)
        else:
            descriptor = stack.enter_context(_swept_folder(folder, hidden))
        with ExitStack() as undone:
            files: list[NewFile] = []
            for target in targets:
                within = os.path.join(partial, os.path.basename(target)) if several else partial
                files.append(NewFile(target, within))
                undone.callback(files[-1].clean)
                files[-1].open()
            yield files
            for file in files:
                file.finish()
            if not several:
                calls.rename(partial, files[0].path)
                sync_folder(folder, descriptor)
            undone.pop_all()


@contextmanager
def new_folder(
    folder: str, partial: str, hidden: re.Pattern[str], switch: Callable[[int], None]
) -> Iterator[int]:
    """Makes a folder within `folder`, whose entries appear together.

    First removes the leftovers of killed processes, whose names match `hidden`. Yields a descriptor
    of the new folder `partial`; the block writes and syncs entries there. The folder is then synced
    and `switch` renames it, with the descriptor of `folder`. An earlier error removes the folder.
    """
    with _swept_folder(folder, hidden) as descriptor, ExitStack() as stack:
        stack.callback(shutil.rmtree, partial, ignore_errors=True)  # no effect after the switch
        calls.make_folder(partial)
        inner = stack.enter_context(opened_folder(partial))
        yield inner
        with where_supported(), path_in_errors(partial):
            calls.fsync(inner)
        switch(descriptor)


def switch_folder(path: str) -> str:
    """The folder in which replace_files() puts several new files before they get their names."""
    return _hidden(path, "switch")


def _absolute(path: str | os.PathLike[str]) -> str:
    """Resolves links in the folder of a path, but not a link at the path itself."""
    folder, name = os.path.split(os.fspath(path))
    return os.path.join(os.path.realpath(folder), name)


def _hidden(path: str, ending: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{_base(name)}.{ending}")


def _base(name: str) -> str:
    """Returns a name, or a hash of a long one, for hidden names, which are longer."""
    data = os.fsencode(name)
    return name if len(data) <= _LONGEST_BASE else hashlib.sha256(data).hexdigest()[:32]


def rename_folder(source: str, target: str, *errors: int) -> bool:
    """Renames a folder. Returns False if `target` is a nonempty folder, or for these `errors`."""
    try:
        calls.rename(source, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, *errors):
            raise
        return False
    return True


def _complete_earlier(group_path: str) -> None:
    if not os.path.lexists(switch_folder(group_path)):  # also if the path's folder is no folder
        return
    with path_in_errors(
        group_path, "an earlier save cannot be completed. No file of this save is in place"
    ):
        _complete(group_path)


def _complete(group_path: str) -> None:
    """Moves the files in the switch folder, of any process, to their own names."""
    place, folder = switch_folder(group_path), os.path.dirname(group_path)
    with ExitStack() as stack:
        try:
            source = stack.enter_context(opened_folder(place))
        except FileNotFoundError:
            return
        target = stack.enter_context(opened_folder(folder))
        # Makes the switch durable first: no file may have its name after a power loss otherwise.
        sync_folder(folder, target)
        text = f"the new files are complete in {place}. Loading and the next save find them there"
        with (
            path_in_errors(group_path, text),
            suppress(FileNotFoundError),
        ):  # Another process removed it.
            for name in os.listdir(source):
                # `source` is the opened folder, even if another folder has this name by now.
                with suppress(FileNotFoundError):  # Another process has moved the file.
                    calls.move(name, source, target)
        sync_folder(place, source)
        sync_folder(folder, target)
        _remove_folder(place)


def _remove_folder(folder: str) -> None:
    """Removes a folder if it exists and is empty."""
    try:
        calls.remove_folder(folder)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise


def new_token() -> str:
    """Returns a part of a hidden name, unique among processes and saves."""
    return f"{os.getpid()}-{secrets.token_hex(4)}"


@contextmanager
def _swept_folder(folder: str, hidden: re.Pattern[str]) -> Iterator[int]:
    """Opens a folder for new entries, and removes leftovers, whose names match `hidden`.

    A process that writes to the folder holds a shared lock until the end of its `with` block.
    Nothing is removed while another process holds the lock.
    """
    with opened_folder(folder) as descriptor:
        # Without file locks, leftovers cannot be told from files in use, so all files remain.
        with where_supported(errno.EBADF, errno.ENOLCK):
            # Files in use, of another user or already removed must not prevent the save.
            with suppress(BlockingIOError, PermissionError, FileNotFoundError):
                calls.lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for entry in filter(hidden.fullmatch, os.listdir(folder)):
                    if os.path.isdir(path := os.path.join(folder, entry)):
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        calls.unlink(path)
            share_lock(descriptor)  # Held until the new entries have their names.
        yield descriptor
