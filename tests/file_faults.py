"""File calls that fail, or that are written down and replayed as if the power had gone."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterator
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

    Args:
        work: what to run.
        number: before which of the lines, or of the interpreter's instructions, counted from 0 in
            the order in which they run.
        *modules: where they are counted.
        each: "line" or "opcode".
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

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def replace(folder: Path, *names: str) -> None:
    """Gives each file new content of two writes."""
    with replace_files([folder / name for name in names]) as new_files:
        for file, name in zip(new_files, names, strict=True):
            file.reserve(7 + len(name))
            file.write(f"new {name}".encode())
            file.write(b"...")


class Journal:
    """What reached a folder's files, call by call, and what a power loss would leave of it.

    A file keeps what its last fsync found, and is torn if it was written since. A name is on the
    disk once the folder is synced; of the changes since then any subset may be.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.before = {entry.name: entry.stat().st_ino for entry in folder.iterdir()}
        self.old = {entry.stat().st_ino: entry.read_bytes() for entry in folder.iterdir()}
        self.events: list[tuple[str, Any]] = []
        self._folder = str(folder)
        for name in ("open", "write", "fsync", "link", "rename", "unlink"):
            monkeypatch.setattr(system_calls.calls, name, getattr(self, f"_{name}")(name))

    def _open(self, name: str) -> Callable[..., int]:
        real = getattr(system_calls.calls, name)

        def call(path: str, flags: int, mode: int = 0o777) -> int:
            descriptor: int = real(path, flags, mode)
            if flags & os.O_CREAT:
                self._rename_event({path: os.fstat(descriptor).st_ino})
            return descriptor

        return call

    def _write(self, name: str) -> Callable[..., int]:
        real = getattr(system_calls.calls, name)

        def call(descriptor: int, data: memoryview) -> int:
            written: int = real(descriptor, data)
            self.events.append(("write", (os.fstat(descriptor).st_ino, bytes(data[:written]))))
            return written

        return call

    def _fsync(self, name: str) -> Callable[[int], None]:
        real = getattr(system_calls.calls, name)

        def call(descriptor: int) -> None:
            real(descriptor)
            status = os.fstat(descriptor)
            kind = "fsync folder" if stat.S_ISDIR(status.st_mode) else "fsync"
            self.events.append((kind, status.st_ino))

        return call

    def _link(self, name: str) -> Callable[[str, str], None]:
        real = getattr(system_calls.calls, name)

        def call(source: str, target: str) -> None:
            real(source, target)
            self._rename_event({target: os.stat(target).st_ino})

        return call

    def _rename(self, name: str) -> Callable[[str, str], None]:
        real = getattr(system_calls.calls, name)

        def call(source: str, target: str) -> None:
            real(source, target)
            self._rename_event({target: os.stat(target).st_ino, source: None})

        return call

    def _unlink(self, name: str) -> Callable[[str], None]:
        real = getattr(system_calls.calls, name)

        def call(path: str) -> None:
            real(path)
            self._rename_event({path: None})

        return call

    def _rename_event(self, change: dict[str, int | None]) -> None:
        assert {os.path.dirname(path) for path in change} == {self._folder}
        self.events.append(
            ("names", {os.path.basename(path): inode for path, inode in change.items()})
        )

    def without(self, kind: str) -> list[tuple[str, Any]]:
        """The events as if calls of this kind had been left out."""
        return [event for event in self.events if event[0] != kind]

    def after_power_loss(self, events: list[tuple[str, Any]]) -> Iterator[dict[str, bytes]]:
        """Every state of the folder that a power loss right after `events` may leave."""
        names: dict[str, int | None] = dict(self.before)
        written, synced = dict(self.old), dict(self.old)
        pending: list[dict[str, int | None]] = []
        for kind, what in events:
            if kind == "names":
                pending.append(what)
            elif kind == "fsync folder":
                for change in pending:
                    names.update(change)
                pending = []
            elif kind == "fsync":
                synced[what] = written.get(what, b"")
            else:
                inode, data = what
                written[inode] = written.get(inode, b"") + data
        subsets = (combinations(pending, count) for count in range(len(pending) + 1))
        for subset in chain.from_iterable(subsets):
            left = dict(names)
            for change in subset:
                left.update(change)
            yield {
                name: synced.get(inode, b"") if synced.get(inode) == written.get(inode) else TORN
                for name, inode in left.items()
                if inode is not None
            }
