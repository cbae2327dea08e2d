"""File calls that fail, or that are written down and replayed as if the power had gone."""

from __future__ import annotations

import errno
import gc
import os
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

from speedtorch.files import system_calls
from speedtorch.files.new_files import replace_files

TORN = b"torn"

# What replace() leaves in these files.
NEW = {"a": b"new a...", "b": b"new b..."}


def snapshot(folder: Path) -> dict[str, bytes]:
    """Names and contents of all files in a folder, hidden ones too."""
    return {entry.name: entry.read_bytes() for entry in sorted(folder.iterdir())}


@contextmanager
def opened_as(path: Path, flags: int) -> Iterator[None]:
    """Within the block all descriptors of the file are open with other flags."""
    numbers = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{name}") == str(path):
                numbers.append(int(name))
    saved, other = {number: os.dup(number) for number in numbers}, os.open(path, flags)
    for number in numbers:
        os.dup2(other, number)
    try:
        yield
    finally:
        for number, descriptor in saved.items():
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(other)


def restore(folder: Path, names: Iterable[str], files: dict[str, bytes]) -> None:
    """Gives those of the named files that are among `files` their contents, and removes others."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
        if name in files:
            (folder / name).write_bytes(files[name])


def count_calls(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> Counter[str]:
    """How often `work` makes each file call."""
    counts: Counter[str] = Counter()
    with monkeypatch.context() as patch:
        for name in vars(system_calls.calls):
            patch.setattr(system_calls.calls, name, _counted(counts, name))
        work()
    return counts


def _counted(counts: Counter[str], name: str) -> Callable[..., Any]:
    real = getattr(system_calls.calls, name)

    def call(*args: Any) -> Any:
        counts[name] += 1
        return real(*args)

    return call


def fail(
    monkeypatch: pytest.MonkeyPatch, name: str, number: int = 1, code: int = errno.EIO
) -> None:
    """Makes one of the next file calls of this name fail, the `number`-th from here."""
    real = getattr(system_calls.calls, name)
    left = [number]

    def call(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(code, os.strerror(code))
        return real(*args)

    monkeypatch.setattr(system_calls.calls, name, call)


def interrupt(work: Callable[[], object], number: int, *modules: ModuleType, each: str) -> bool:
    """Runs `work` with one Ctrl-C in the code of these modules; whether it came to that.

    The interrupt comes before a line or an "opcode" of the interpreter, which are counted from 0 in
    the order in which they run.
    """
    ours = {module.__file__ for module in modules}
    left = [number]

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in ours:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = each == "opcode", each == "line"
        if event == each:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # garbage of other tests may run code of these modules, and lose the exception
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    assert left[0] >= 0, "the code caught the interrupt"
    return False


def replace(folder: Path, *names: str) -> None:
    """Gives each file new content of two writes."""
    with replace_files([folder / name for name in names]) as new_files:
        for file, name in zip(new_files, names, strict=True):
            content = os.fsencode(f"new {name}")
            file.reserve(len(content) + 3)
            file.write(content)
            file.write(b"...")


def of_one_save(state: dict[str, bytes], whole: str, *names: str) -> dict[str, bytes]:
    """Those of these files that a reader finds: in the switch folder of `whole`, else as named."""
    places = {name: (f".{whole}.switch/{name}", name) for name in names}
    return {
        name: state[next(place for place in each if place in state)]
        for name, each in places.items()
        if not state.keys().isdisjoint(each)
    }


class Journal:
    """What reached a folder's files, call by call, and what a power loss would leave of it.

    A file keeps what its last fsync found, and is torn if it was written since. A name is on the
    disk once its folder is synced; of the changes since then any subset may be. A move from one
    folder to another is one change, which the sync of either brings to the disk.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.before = {entry.name: entry.stat().st_ino for entry in folder.iterdir()}
        self.old = {entry.stat().st_ino: entry.read_bytes() for entry in folder.iterdir()}
        self.events: list[tuple[str, Any]] = []
        self._root = folder.stat().st_ino
        self._folders: set[int] = set()
        for name in (
            *("open", "write", "fsync", "make_folder", "rename", "move", "unlink"),
            "remove_folder",
        ):
            real = getattr(system_calls.calls, name)
            monkeypatch.setattr(system_calls.calls, name, partial(getattr(self, f"_{name}"), real))

    def _open(self, real: Callable[..., int], path: str, flags: int, mode: int = 0o777) -> int:
        descriptor = real(path, flags, mode)
        if flags & os.O_CREAT:
            self._names((path, os.fstat(descriptor).st_ino))
        return descriptor

    def _write(self, real: Callable[..., int], descriptor: int, data: memoryview) -> int:
        written = real(descriptor, data)
        self.events.append(("write", (os.fstat(descriptor).st_ino, bytes(data[:written]))))
        return written

    def _fsync(self, real: Callable[..., None], descriptor: int) -> None:
        real(descriptor)
        status = os.fstat(descriptor)
        kind = "fsync folder" if stat.S_ISDIR(status.st_mode) else "fsync"
        self.events.append((kind, status.st_ino))

    def _make_folder(self, real: Callable[..., None], path: str) -> None:
        real(path)
        self._folders.add(os.stat(path).st_ino)
        self._names((path, os.stat(path).st_ino))

    def _rename(self, real: Callable[..., None], source: str, target: str) -> None:
        real(source, target)
        self._names((target, os.stat(target).st_ino), (source, None))

    def _move(self, real: Callable[..., None], name: str, source: int, target: int) -> None:
        inode = os.stat(name, dir_fd=source).st_ino
        real(name, source, target)
        folders = os.fstat(target).st_ino, os.fstat(source).st_ino
        self.events.append(("names", [(folders[0], name, inode), (folders[1], name, None)]))

    def _unlink(self, real: Callable[..., None], path: str) -> None:
        real(path)
        self._names((path, None))

    def _remove_folder(self, real: Callable[..., None], path: str) -> None:
        real(path)
        self._names((path, None))

    def _names(self, *changes: tuple[str, int | None]) -> None:
        what = [
            (os.stat(os.path.dirname(path)).st_ino, os.path.basename(path), inode)
            for path, inode in changes
        ]
        self.events.append(("names", what))

    def without(self, kind: str) -> list[tuple[str, Any]]:
        """The events as if calls of this kind had been left out."""
        return [event for event in self.events if event[0] != kind]

    def after_power_loss(self, events: list[tuple[str, Any]]) -> Iterator[dict[str, bytes]]:
        """Every state of the folder that a power loss right after `events` may leave.

        The names of files in folders within it have the form "folder/file".
        """
        folders: dict[int, dict[str, int]] = {self._root: dict(self.before)}
        written, synced = dict(self.old), dict(self.old)
        pending: list[list[tuple[int, str, int | None]]] = []
        for kind, what in events:
            if kind == "names":
                pending.append(what)
            elif kind == "fsync folder":
                for change in pending:
                    if what in [folder for folder, _, _ in change]:
                        _change(folders, change)
                pending = [
                    change for change in pending if what not in [folder for folder, _, _ in change]
                ]
            elif kind == "fsync":
                synced[what] = written.get(what, b"")
            else:
                inode, data = what
                written[inode] = written.get(inode, b"") + data
        subsets = (combinations(pending, count) for count in range(len(pending) + 1))
        for subset in chain.from_iterable(subsets):
            left = {folder: dict(names) for folder, names in folders.items()}
            for change in subset:
                _change(left, change)
            yield {
                name: synced.get(inode, b"") if synced.get(inode) == written.get(inode) else TORN
                for name, inode in _files(left, self._root)
                if inode not in self._folders
            }


def _change(folders: dict[int, dict[str, int]], change: list[tuple[int, str, int | None]]) -> None:
    for folder, name, inode in change:
        names = folders.setdefault(folder, {})
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode


def _files(folders: dict[int, dict[str, int]], folder: int) -> Iterator[tuple[str, int]]:
    for name, inode in folders[folder].items():
        yield name, inode
        if inode in folders:
            yield from ((f"{name}/{each}", its) for each, its in _files(folders, inode))
