"""New files take the place of old ones whole or not at all, whatever fails and when."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from file_faults import NEW, count_calls, fail, interrupt, replace, restore, snapshot
from warm_python import run_warm

from speedtorch.files import new_files, system_calls
from speedtorch.files.new_files import replace_files

LEFT_BEHIND = ".a.4711-0123abcd.partial"


def test_all_files_are_replaced_or_made_and_nothing_else_is_left(tmp_path: Path) -> None:
    for _ in range(2):
        replace(tmp_path, "a", "b")
        assert snapshot(tmp_path) == NEW


@pytest.mark.parametrize("names", [("a",), ("a", "b")], ids=["one file", "two files"])
@pytest.mark.parametrize("there", [True, False], ids=["old files", "no old files"])
@pytest.mark.parametrize(
    "call",
    [
        *("open", "reserve", "write", "fsync", "lock", "make_folder", "rename", "move"),
        "remove_folder",
    ],
)
def test_a_failing_call_leaves_old_files_or_new_ones_after_the_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, there: bool, names: tuple[str, ...]
) -> None:
    start = {name: f"old {name}".encode() for name in names if there}
    restore(tmp_path, names, start)
    times = count_calls(monkeypatch, lambda: replace(tmp_path, *names))[call]
    found: list[bool] = []
    for number in range(1, times + 1):
        restore(tmp_path, names, start)
        with monkeypatch.context() as patch:
            fail(patch, call, number)
            with pytest.raises(OSError, match="Input/output error"):
                replace(tmp_path, *names)
        state = snapshot(tmp_path)
        assert state in (start, {name: NEW[name] for name in names})
        found.append(state != start)
    assert found == sorted(found)  # once they have switched, an error comes too late for the old
    if call in ("reserve", "write", "lock", "make_folder", "rename"):
        assert not any(found)
    elif call in ("move", "remove_folder"):
        assert all(found)
    else:
        assert not found[0] and (found[-1] or (call, len(names)) == ("open", 1))


def test_a_failing_sync_of_the_folder_says_that_the_new_file_is_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "fsync", 2)
    with pytest.raises(OSError, match="complete and in place, but a power loss may still undo"):
        replace(folder, "a")
    assert snapshot(folder) == {"a": NEW["a"], "b": b"old b"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_of_the_writer_leaves_the_folder_as_it_was(
    folder: Path, error: type[BaseException]
) -> None:
    before = snapshot(folder)
    with pytest.raises(error), replace_files([folder / "a"]) as (file,):
        file.write(b"half")
        raise error
    assert snapshot(folder) == before


@pytest.mark.parametrize("number", [0, 1])
def test_an_interrupt_after_the_switch_still_gives_all_files_their_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real, left = system_calls.calls.move, [number]

    def move(*args: Any) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(system_calls.calls, "move", move)
    with pytest.raises(KeyboardInterrupt):
        replace(folder, "a", "b")
    assert snapshot(folder) == NEW


def test_a_disk_that_moves_no_file_keeps_the_new_ones_in_the_switch_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def move(*args: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(system_calls.calls, "move", move)
        message = r"complete in .*/\.a\.switch. Loading and the next save find them there"
        with pytest.raises(OSError, match=message):
            replace(folder, "a", "b")
        assert snapshot(folder / ".a.switch") == NEW
        with pytest.raises(OSError, match="an earlier save cannot be completed. No file of this"):
            replace(folder, "a", "b")
    (folder / ".a.switch" / "b").write_bytes(b"of the earlier save")
    with pytest.raises(RuntimeError), replace_files([folder / "a", folder / "b"]):
        raise RuntimeError
    assert snapshot(folder) == {"a": NEW["a"], "b": b"of the earlier save"}


def test_a_save_of_the_first_name_alone_ends_one_of_several_files(folder: Path) -> None:
    (folder / ".a.switch").mkdir()
    (folder / ".a.switch" / "b").write_bytes(b"switched")
    replace(folder, "a")
    assert snapshot(folder) == {"a": NEW["a"], "b": b"switched"}


def test_another_save_that_switches_first_is_completed_and_then_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = system_calls.calls.rename

    def rename(source: str, target: str) -> None:
        if not os.path.exists(folder / "other"):
            (folder / "other").write_bytes(b"")
            os.mkdir(target)
            (Path(target) / "other").write_bytes(b"of another process")
        real(source, target)

    monkeypatch.setattr(system_calls.calls, "rename", rename)
    replace(folder, "a", "b")
    assert snapshot(folder) == {**NEW, "other": b"of another process"}


def test_the_switch_folder_may_be_used_by_those_who_may_use_its_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.chmod(0o775)
    seen: list[int] = []
    real = system_calls.calls.rename
    note = lambda *names: (seen.append(os.stat(names[0]).st_mode), real(*names))  # noqa: E731
    monkeypatch.setattr(system_calls.calls, "rename", note)
    before = os.umask(0o077)
    try:
        replace(folder, "a", "b")
    finally:
        os.umask(before)
    assert [mode & 0o777 for mode in seen] == [0o775]


@pytest.mark.dealt("there")
@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="settrace tells of no instruction")
@pytest.mark.parametrize("names", [("a",), ("a", "b")], ids=["one file", "two files"])
@pytest.mark.parametrize("there", [True, False], ids=["old files", "no old files"])
def test_an_interrupt_at_any_instruction_leaves_all_old_or_all_new_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, names: tuple[str, ...]
) -> None:
    monkeypatch.setattr(system_calls.calls, "fsync", lambda descriptor: None)
    old = {name: f"old {name}".encode() for name in names if there}
    new = {name: NEW[name] for name in names}
    seen: list[dict[str, bytes]] = []
    for number in range(100_000):
        restore(tmp_path, names, old)
        work = partial(replace, tmp_path, *names)
        interrupted = interrupt(work, number, new_files, system_calls, each="opcode")
        found = {name: data for name, data in snapshot(tmp_path).items() if name[0] != "."}
        assert found in (old, new), number
        seen.append(found)
        if not interrupted:
            break
    assert old in seen[:-1] and new in seen[:-1]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="settrace tells of no instruction")
def test_garbage_that_runs_the_same_code_loses_no_interrupt(tmp_path: Path) -> None:
    threshold = gc.get_threshold()
    try:
        for number in range(0, 300, 5):
            gc.disable()
            opened = [system_calls.opened(str(tmp_path / "x"), os.O_CREAT) for _ in range(2)]
            for one in opened:
                one.__enter__()
            opened.append(opened)  # type: ignore[arg-type]
            del opened, one
            gc.set_threshold(30)
            gc.enable()
            work = partial(replace, tmp_path, "a")
            assert interrupt(work, number, new_files, system_calls, each="opcode"), number
    finally:
        gc.set_threshold(*threshold)
        gc.enable()


def test_no_descriptor_remains_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.listdir("/proc/self/fd")
    replace(folder, "a", "b")
    fail(monkeypatch, "write", 2)
    with pytest.raises(OSError, match="Input/output"):
        replace(folder, "a", "b")
    assert set(os.listdir("/proc/self/fd")) <= set(before)


def test_a_file_is_closed_whose_descriptor_is_0(folder: Path) -> None:
    """As in a daemon, which has no standard input."""
    standard_input = os.dup(0)
    os.close(0)
    try:
        new = new_files.NewFile(str(folder / "a"), str(folder / "a.partial"))
        new.open()
        os.fstat(0)
        new.clean()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(0)
    finally:
        os.dup2(standard_input, 0)
        os.close(standard_input)


def test_short_writes_are_continued_and_one_that_takes_nothing_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system_calls.calls, "write", lambda file, data: os.write(file, data[:2]))
    replace(folder, "a")
    assert snapshot(folder)["a"] == NEW["a"]
    monkeypatch.setattr(system_calls.calls, "write", lambda file, data: 0)
    with pytest.raises(OSError, match=r"accepts no more bytes.*/a'"):
        replace(folder, "a")


def test_the_disk_starts_with_whole_parts_while_the_next_are_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_files, "_WRITEBACK_BYTES", 10)
    started = []
    monkeypatch.setattr(
        system_calls.calls, "start_writeback", lambda file, *part: started.append(part)
    )
    with replace_files([folder / "a"]) as (file,):
        for count in (4, 5, 1, 25, 4, 1, 9):
            file.write(bytes(count))
    assert started == [(0, 10), (10, 20), (30, 10)]
    assert file.count == 49


def test_a_failing_start_of_the_writeback_leaves_the_old_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_files, "_WRITEBACK_BYTES", 1)
    before = snapshot(folder)
    fail(monkeypatch, "start_writeback")
    with pytest.raises(OSError, match="Input/output error: '.*/a'"):
        replace(folder, "a")
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    ("call", "number", "code"),
    [
        ("start_writeback", 1, errno.EINVAL),
        ("reserve", 1, errno.EOPNOTSUPP),
        ("fsync", 2, errno.EINVAL),  # of the folder
        ("chmod", 1, errno.EPERM),
        ("unlink", 1, errno.EACCES),  # of another user's leftover
    ],
)
def test_a_file_system_without_a_call_is_written_to_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, code: int
) -> None:
    monkeypatch.setattr(new_files, "_WRITEBACK_BYTES", 1)
    (folder / "a").chmod(0o664)
    (folder / LEFT_BEHIND).write_bytes(b"")
    assert count_calls(monkeypatch, lambda: replace(folder, "a"))[call] >= number
    (folder / LEFT_BEHIND).write_bytes(b"")
    fail(monkeypatch, call, number, code=code)
    replace(folder, "a")
    assert (folder / "a").read_bytes() == NEW["a"]


def test_a_full_disk_is_found_before_the_first_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "reserve", code=errno.ENOSPC)
    fail(monkeypatch, "write", code=errno.EIO)
    with pytest.raises(OSError, match=r"8 bytes are needed and [\d,]+ are free.*/a'"):
        replace(folder, "a")


@pytest.mark.parametrize("letter", ["a", "\u4e2d", "\udcff"], ids=["ASCII", "3 bytes", "no UTF-8"])
@pytest.mark.parametrize("ends", [("",), ("x", "y")], ids=["one file", "two files"])
def test_every_name_that_the_file_system_takes_is_taken(
    tmp_path: Path, letter: str, ends: tuple[str, ...]
) -> None:
    name = letter * (254 // len(os.fsencode(letter)))
    replace(tmp_path, *(name + end for end in ends))
    assert sorted(snapshot(tmp_path)) == [name + end for end in ends]


def test_what_was_left_of_a_long_name_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "a" * 250
    with monkeypatch.context() as patch:
        patch.setattr(system_calls.calls, "unlink", lambda path: None)
        with pytest.raises(RuntimeError), replace_files([tmp_path / name]):
            raise RuntimeError
    assert len(os.listdir(tmp_path)) == 1
    replace(tmp_path, name)
    assert os.listdir(tmp_path) == [name]


def test_the_target_of_a_link_is_replaced_and_the_link_remains(folder: Path) -> None:
    (folder / "link").symlink_to("a")
    replace(folder, "link")
    assert (folder / "link").is_symlink()
    assert (folder / "a").read_bytes() == b"new link..."


@pytest.mark.parametrize("mode", [None, 0o600, 0o640, 0o664, 0o666, 0o775])
def test_a_file_keeps_who_may_read_and_write_it_and_a_new_one_has_the_usual_mode(
    folder: Path, mode: int | None
) -> None:
    if mode is None:
        (folder / "a").unlink()
    else:
        (folder / "a").chmod(mode)
    before = os.umask(0o022)
    try:
        replace(folder, "a")
    finally:
        os.umask(before)
    assert (folder / "a").stat().st_mode & 0o777 == (0o644 if mode is None else mode)


@pytest.mark.slow
def test_a_killed_process_leaves_the_old_file_and_the_next_one_cleans_up(folder: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from speedtorch.files import system_calls\n"
        "from speedtorch.files.new_files import replace_files\n"
        "system_calls.calls.rename = lambda *names: os.kill(os.getpid(), signal.SIGKILL)\n"
        "with replace_files([sys.argv[1]]) as (file,):\n"
        "    file.write(b'new')\n"
    )
    run_warm("-c", script, folder / "a", status=-signal.SIGKILL)
    left = snapshot(folder)
    assert left.pop("a") == b"old a"
    assert b"new" in left.values()
    replace(folder, "a")
    assert snapshot(folder) == {"a": NEW["a"], "b": b"old b"}


def test_leftovers_of_another_file_remain_and_the_lock_goes(folder: Path) -> None:
    (folder / LEFT_BEHIND).write_bytes(b"")
    replace(folder, "b")
    assert LEFT_BEHIND in snapshot(folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def test_what_a_running_process_writes_is_left_alone(folder: Path) -> None:
    (folder / LEFT_BEHIND).write_bytes(b"")
    with replace_files([folder / "b"]) as (file,):
        file.write(b"new b...")
        replace(folder, "a")  # Another replacement in the same folder is at work.
        assert LEFT_BEHIND in snapshot(folder)
    replace(folder, "a")
    assert snapshot(folder) == NEW


@pytest.mark.parametrize("code", [errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, None])
def test_without_a_lock_everything_works_and_nothing_is_cleaned_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    (folder / LEFT_BEHIND).write_bytes(b"")
    descriptor = os.open(folder, os.O_RDONLY)
    if code is None:  # another process keeps it
        monkeypatch.setattr(system_calls, "_LOCK_SECONDS", 0.02)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    else:
        fail(monkeypatch, "lock", code=code)
    try:
        replace(folder, "a")
    finally:
        os.close(descriptor)
    assert snapshot(folder) == {LEFT_BEHIND: b"", "a": NEW["a"], "b": b"old b"}
