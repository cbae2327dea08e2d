"""New files in the place of old ones: whole and on the disk, or not there at all.

One file takes its place by one rename. Several files of a folder are written in a hidden folder
beside them, `.table.npy.<process>.partial`. Renaming that to `.table.npy.switch` puts all of them
in the place of the old ones in one step; then each file moves to its own name, and the folder goes.

Thus a file is in the switch folder, if it is there, and else under its own name, at every moment. A
kill after the switch leaves files in the switch folder; the next replacement moves them first.
Nothing waits for a lock: a switch folder with files in it is not replaced by another, and a process
that finds one moves its files to their names, as the process that made it does.
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
    about,
    calls,
    opened_folder,
    reserve,
    share_lock,
    sync_folder,
    where_supported,
    write_all,
)

__all__ = ["TOKEN", "NewFile", "new_folder", "new_token", "rename_folder", "replace_files"]
__all__ += ["switch_folder"]

TOKEN = r"\d+-[0-9a-f]{8}"
"""What new_token() gives."""

# Hidden names add 27 bytes at most; file systems take 255 bytes, some 143.
_LONGEST_BASE = 100

# The disk writes so many bytes while the next ones are copied to the page cache. Left to fsync
# alone, it would idle until the last of them is there.
_WRITEBACK_BYTES = 16 << 20


class NewFile:
    """A file in the making, whose place another one may have now.

    Ctrl-C may come between any call on the disk and the note of it in here, so what has happened
    already is asked of the disk. `count` bytes were written.
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
        # A file without write permission is refused as root, too.
        if not mode & 0o222 or not os.access(path, os.W_OK, effective_ids=True):
            text = "is read-only; make it writable, or choose another name"
            raise PermissionError(errno.EACCES, text, path)
        self._mode = mode & 0o777

    def open(self) -> None:
        """Makes it, with the mode of the file that is there now."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        mode = 0o666 if self._mode is None else self._mode
        self._descriptor = calls.open(self.partial, flags, mode)
        if self._mode is not None:
            with suppress(OSError):  # File systems without modes.
                calls.chmod(self._descriptor, mode)  # What the umask took away.

    def reserve(self, count: int) -> None:
        """Takes the disk space of `count` bytes, where the file system can do that."""
        with where_supported():
            reserve(self._descriptor, count, self.path)

    def write(self, data: bytes | memoryview) -> int:
        """Appends all of `data`, and returns how many bytes these are."""
        with about(self.path):
            write_all(self._descriptor, data)
            self.count += (count := memoryview(data).nbytes)
            begin, end = self._written_back, self.count - self.count % _WRITEBACK_BYTES
            if begin < end:
                self._written_back = end
                with where_supported():
                    calls.start_writeback(self._descriptor, begin, end - begin)
        return count

    def flush(self) -> None:
        """For torch.save; nothing waits: write() writes at once."""

    def finish(self) -> None:
        """Brings every byte to the disk and closes the file."""
        with about(self.path):
            calls.fsync(self._descriptor)
        self._close()

    def clean(self) -> None:
        """Removes it, unless it has taken its place."""
        self._close()
        if os.path.lexists(self.partial):
            calls.unlink(self.partial)

    def _close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            calls.close(descriptor)


@contextmanager
def replace_files(
    paths: Sequence[str | os.PathLike[str]], together: str | os.PathLike[str] | None = None
) -> Iterator[list[NewFile]]:
    """Replaces or creates files at once: all of them, whole and on disk, or none.

    The new files are written within the `with` block under hidden names, then synced, then switched
    in one step, also at a power loss. After an error the old files are as they were, unless the
    message says that the new ones are in place. What a killed process left is completed or removed
    by the next replacement of the same files.

    Args:
        paths: One file, whose symbolic link stays and points to the new one, or several of one
            folder, which are no links.
        together: The path after which the switch folder of several files is named (None: the
            first). A reader of them looks there first, see switch_folder().

    Raises:
        ValueError: In a file's place is something else, or several are links or in several folders.
        IsADirectoryError, PermissionError: In its place is a folder, or a file that is read-only.
        OSError: Of the disk.
    """
    whole = _absolute(paths[0] if together is None else together)
    several = len(paths) > 1
    targets = [_absolute(path) if several else os.path.realpath(path) for path in paths]
    folder = os.path.dirname(targets[0])
    for target in targets:
        if several and (os.path.islink(target) or os.path.dirname(target) != folder):
            text = "several files that switch together share one folder and are no symbolic links"
            raise ValueError(f"{target}: {text}; choose another name")
    partial = _hidden(whole if several else targets[0], f"{new_token()}.partial")
    _complete_earlier(whole)
    names = "|".join(re.escape(_base(os.path.basename(each))) for each in [whole, *targets])
    hidden = re.compile(rf"\.({names})\.{TOKEN}\.partial")

    def switch(_: int) -> None:
        while not rename_folder(partial, switch_folder(whole)):
            _complete_earlier(whole)
        _complete(whole)

    with ExitStack() as stack:
        if several:
            stack.callback(_complete, whole)  # also where Ctrl-C comes after the switch
            inner = stack.enter_context(new_folder(folder, partial, hidden, switch))
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
    """Makes a folder within another one, whose entries appear together.

    The block writes and syncs them under the hidden name `partial`, and has its descriptor. Then it
    is synced, and `switch` renames it, which has the descriptor of `folder`. An error before that
    removes it. What killed processes left under `hidden` names is removed first.
    """
    with _swept_folder(folder, hidden) as descriptor, ExitStack() as stack:
        stack.callback(shutil.rmtree, partial, ignore_errors=True)  # unless it has its own name
        calls.make_folder(partial)
        inner = stack.enter_context(opened_folder(partial))
        yield inner
        with where_supported(), about(partial):
            calls.fsync(inner)
        switch(descriptor)


def switch_folder(path: str) -> str:
    """Where several files that replace_files() makes together are before they have their names."""
    return _hidden(path, "switch")


def _absolute(path: str | os.PathLike[str]) -> str:
    """The path itself in its real folder; a link of this name is not followed."""
    folder, name = os.path.split(os.fspath(path))
    return os.path.join(os.path.realpath(folder), name)


def _hidden(path: str, ending: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{_base(name)}.{ending}")


def _base(name: str) -> str:
    """A name, or what stands for a long one in hidden names, which are longer."""
    data = os.fsencode(name)
    return name if len(data) <= _LONGEST_BASE else hashlib.sha256(data).hexdigest()[:32]


def rename_folder(source: str, target: str, *errors: int) -> bool:
    """Renames a folder; False if another one, which is not empty, has the name, or for `errors`."""
    try:
        calls.rename(source, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, *errors):
            raise
        return False
    return True


def _complete_earlier(whole: str) -> None:
    with about(whole, "this was the end of an earlier save; nothing of this one is in place"):
        _complete(whole)


def _complete(whole: str) -> None:
    """Moves files that have switched, of this process or another, to their own names."""
    place, folder = switch_folder(whole), os.path.dirname(whole)
    with ExitStack() as stack:
        try:
            source = stack.enter_context(opened_folder(place))
        except FileNotFoundError:
            return
        target = stack.enter_context(opened_folder(folder))
        # After a power loss no file may have its name unless all have switched.
        sync_folder(folder, target)
        text = f"the new files are whole, in {place}: loading and the next save find them there"
        with about(whole, text), suppress(FileNotFoundError):  # It may be removed by now.
            for name in os.listdir(source):
                # This is the folder that was opened, also if another one has its name by now.
                with suppress(FileNotFoundError):  # Another process has moved it.
                    calls.move(name, source, target)
        sync_folder(place, source)
        sync_folder(folder, target)
        _remove_folder(place)


def _remove_folder(folder: str) -> None:
    """Removes a folder if it is there and empty."""
    try:
        calls.remove_folder(folder)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise


def new_token() -> str:
    """A part of a hidden name that no other process and no other save has."""
    return f"{os.getpid()}-{secrets.token_hex(4)}"


@contextmanager
def _swept_folder(folder: str, hidden: re.Pattern[str]) -> Iterator[int]:
    """Opens a folder for new entries, and removes what killed processes left under hidden names.

    Nothing is removed while another process writes to the folder, which holds a lock, as this
    process does until the end of the block.
    """
    with opened_folder(folder) as descriptor:
        # Without file locks, files left behind look like files in use: all of them stay.
        with where_supported(errno.EBADF, errno.ENOLCK):
            # Where they are in use, another user's or gone by now, saving works all the same.
            with suppress(BlockingIOError, PermissionError, FileNotFoundError):
                calls.lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for entry in filter(hidden.fullmatch, os.listdir(folder)):
                    if os.path.isdir(path := os.path.join(folder, entry)):
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        calls.unlink(path)
            share_lock(descriptor)  # Held until the new entries have their names.
        yield descriptor
