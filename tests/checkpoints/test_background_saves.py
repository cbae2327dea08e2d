"""Saves beside training: of the moment of the call, and whole or not there."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from file_faults import fail
from reference import assert_same_content
from saved_runs import SETTINGS, Run, size, tracked_table
from warm_python import run_warm

import speedtorch
from speedtorch.checkpoints import background_saves, generation_writer
from speedtorch.checkpoints.background_saves import begin, fitting
from speedtorch.files import system_calls


class SlowDisk:
    """Takes no byte until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_reached, self.goes_on = threading.Event(), threading.Event()
        real = system_calls.calls.write

        def write(*args: Any) -> Any:
            self.is_reached.set()
            assert self.goes_on.wait(60)
            return real(*args)

        monkeypatch.setattr(system_calls.calls, "write", write)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    slow = SlowDisk(monkeypatch)
    yield slow
    slow.goes_on.set()


@pytest.mark.parametrize("how", SETTINGS)
def test_what_there_was_at_the_call_is_saved(
    how: str, device: str, tmp_path: Path, disk: SlowDisk
) -> None:
    run = Run(device, **SETTINGS[how]).train(3)
    then, random = run.state(), torch.get_rng_state()
    saving = speedtorch.async_save(tmp_path, **run.parts, random=random)
    assert disk.is_reached.wait(60)
    run.train(4)
    random.zero_()
    run.table["weight"].fill_(0.5)
    assert not saving.done() and not (tmp_path / "generation-00000001").exists()
    disk.goes_on.set()
    saved = saving.result(60)
    assert saved.generation == 1 and saved.waited is not None and saved.waited < saved.seconds
    again = Run(device, seed=9, **SETTINGS[how])
    assert speedtorch.load(tmp_path, **again.parts)["random"].any()
    assert_same_content(again.state(), then)


def test_changes_after_the_call_are_in_the_next_delta(
    device: str, tmp_path: Path, disk: SlowDisk
) -> None:
    run, again = Run(device).train(3).tracked(), Run(device, seed=7)
    saving = speedtorch.async_save(tmp_path, **run.parts)
    run.train(1)
    disk.goes_on.set()
    whole = saving.result(60)
    run.train(1)
    saving = speedtorch.async_save(tmp_path, base=1, **run.parts)
    then = run.state()
    run.train(1)
    assert size(saving.result(60)) < size(whole) / 2
    speedtorch.load(tmp_path, **again.parts)
    assert_same_content(again.state(), then)


def test_the_folder_is_waited_for(tmp_path: Path, disk: SlowDisk) -> None:
    saving = speedtorch.async_save(tmp_path, rows=torch.ones(9), step=1)
    threading.Timer(0.3, disk.goes_on.set).start()
    assert speedtorch.load(tmp_path).get("step") == 1
    assert saving.done()
    disk.goes_on.clear()
    saving = speedtorch.async_save(tmp_path, rows=torch.ones(9), step=2)
    threading.Timer(0.3, disk.goes_on.set).start()
    assert speedtorch.save(tmp_path, step=3).generation == 3
    assert saving.result().generation == 2


def test_two_saves_that_began_at_once_are_both_waited_for(tmp_path: Path) -> None:
    goes_on = threading.Event()
    first = begin(str(tmp_path), lambda: goes_on.wait(60), ExitStack())
    second = begin(str(tmp_path), lambda: 2, ExitStack())
    assert second.result(60) == 2
    ended(1)
    threading.Timer(0.3, goes_on.set).start()
    assert speedtorch.save(tmp_path, step=1).generation == 1
    assert first.done()


@pytest.mark.parametrize(("share", "before"), [(0.0, 4), (0.6, 2), (2.0, 0)])
def test_what_has_no_room_is_written_before(
    share: float, before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_writer, "SHARD_BYTES", 1000)  # a file for each large tensor
    goes_on, real = threading.Event(), system_calls.calls.make_folder
    written: list[str] = []

    def make_folder(path: str) -> None:
        real(path)
        written.append(path)

    monkeypatch.setattr(system_calls.calls, "make_folder", make_folder)
    monkeypatch.setattr(generation_writer, "remember", lambda *given: goes_on.wait(60))
    tensors = {name: torch.full((300,), float(n)) for n, name in enumerate("abcd")}
    most = max(1, int(share * 4 * 1200))
    saving = speedtorch.async_save(tmp_path, max_memory=most, tensors=tensors)
    waits = [each for each in threading.enumerate() if each.name == "speedtorch save"]
    assert len(waits) == 1 and len(written) == 1
    for each in tensors.values():
        each.fill_(9.0)
    goes_on.set()
    assert len(list(Path(saving.result(60).path).glob("*.safetensors"))) == 4
    found = speedtorch.load(tmp_path)["tensors"]
    assert [float(each[0]) for each in found.values()] == [0.0, 1.0, 2.0, 3.0]
    assert fitting([{name: each} for name, each in tensors.items()], most) == 4 - before


def test_copies_beyond_the_available_memory_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_saves.host_memory, "available_bytes", lambda: 99)
    with pytest.raises(MemoryError, match="the copies need 100 bytes of host memory, but 99 are"):
        speedtorch.async_save(tmp_path, max_memory="1TiB", tensor=torch.zeros(25))
    assert [*tmp_path.iterdir()] == []
    saving = speedtorch.async_save(tmp_path, max_memory="1TiB", tensor=torch.zeros(24))
    assert saving.result(60).generation == 1


def test_an_error_raises_keeps_earlier_checkpoints_and_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[weakref.ref[Any]] = []
    real = generation_writer.copies

    def copies(shards: Any) -> Any:
        made = real(shards)
        copied.extend(weakref.ref(each) for shard in made for each in shard.values())
        return made

    speedtorch.save(tmp_path, step=1)
    with monkeypatch.context() as patch:
        patch.setattr(generation_writer, "copies", copies)
        fail(patch, "write")
        with pytest.warns(RuntimeWarning, match="the background save to .* has failed: OSError"):
            saving = speedtorch.async_save(tmp_path, rows=torch.ones(3))
            assert isinstance(saving.exception(60), OSError)
            ended()
    assert [each() for each in copied] == [None]
    assert os.listdir(tmp_path) == ["generation-00000001"]
    assert speedtorch.load(tmp_path) == {"step": 1}
    assert speedtorch.async_save(tmp_path, step=2).result(60).generation == 2


def ended(left: int = 0) -> None:
    """Waits until no more threads save than are left."""
    until = time.monotonic() + 60
    while sum(each.name == "speedtorch save" for each in threading.enumerate()) > left:
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_warnings_that_are_errors_hold_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "write")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        saving = speedtorch.async_save(tmp_path, rows=torch.ones(3))
        assert isinstance(saving.exception(60), OSError)
        ended()
    monkeypatch.undo()
    assert speedtorch.save(tmp_path, step=1).generation == 1


def test_a_thread_that_cannot_begin_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            speedtorch.async_save(tmp_path, rows=torch.ones(3))
        assert os.listdir(tmp_path) == []
    assert speedtorch.save(tmp_path, step=1).generation == 1
    assert os.listdir(tmp_path) == ["generation-00000001"]


def test_a_signal_before_the_thread_begins_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, saved = threading.Thread.start, list[int]()

    def start(thread: threading.Thread) -> None:
        if thread.name == "speedtorch save":
            signal.raise_signal(signal.SIGUSR1)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    before = signal.signal(
        signal.SIGUSR1, lambda *_: saved.append(speedtorch.save(tmp_path, step=2).generation)
    )
    try:
        saving = speedtorch.async_save(tmp_path, step=1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (saving.result(60).generation, saved) == (1, [2])


def test_a_signal_while_a_waiting_thread_writes_saves(tmp_path: Path) -> None:
    found: list[int] = []

    def run() -> None:
        found.append(speedtorch.save(tmp_path, step=2).generation)  # as in a signal's handler

    save = background_saves._Save(Future(), os.path.realpath(tmp_path), run)
    background_saves._pending[save.done] = save
    try:
        save.wait()
    finally:
        del background_saves._pending[save.done]
    assert found == [1]


def test_another_working_folder_is_no_matter(
    tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = tracked_table()
    disk.goes_on.set()
    speedtorch.save("run", keep=1, rows=table["weight"])
    disk.goes_on.clear()
    saving = speedtorch.async_save("run", keep=1, base=1, rows=table["weight"])
    monkeypatch.chdir("/")
    disk.goes_on.set()
    assert saving.result(60).path == str(tmp_path / "run" / "generation-00000002")
    assert sorted(speedtorch.load(tmp_path / "run")) == ["rows"]


@pytest.mark.slow
def test_a_fork_waits_for_no_save(tmp_path: Path) -> None:
    program = """
import os, sys, threading, torch, speedtorch
from speedtorch.files import system_calls
goes_on, real = threading.Event(), system_calls.calls.write
def write(*args):
    goes_on.wait(60)
    return real(*args)
system_calls.calls.write = write
speedtorch.async_save(sys.argv[1], rows=torch.ones(3))
if not os.fork():
    try:
        speedtorch.load(sys.argv[1])
    except FileNotFoundError:
        sys.exit()
assert os.wait()[1] == 0
goes_on.set()
"""
    run_warm("-c", program, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert speedtorch.load(tmp_path)["rows"].tolist() == [1, 1, 1]


@pytest.mark.slow
def test_the_end_of_the_process_waits(tmp_path: Path) -> None:
    program = """
import sys, time, torch, speedtorch
from speedtorch.files import system_calls
real = system_calls.calls.write
def write(*args):
    time.sleep(0.2)
    return real(*args)
system_calls.calls.write = write
table = speedtorch.HostTable(1000, 8, memory="plain").fill_(3)
speedtorch.async_save(sys.argv[1], rows=table["weight"], step=5)
"""
    begin = time.perf_counter()
    run_warm("-c", program, tmp_path)
    assert time.perf_counter() - begin > 0.6
    found = speedtorch.load(tmp_path)
    assert found["step"] == 5 and bool((found["rows"] == 3).all())


def test_wrong_arguments_raise(tmp_path: Path) -> None:
    for wrong, error in ((0, ValueError), ("many", ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="max_memory: expected"):
            speedtorch.async_save(tmp_path, max_memory=wrong, step=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot hold"):
        speedtorch.async_save(tmp_path, what=object())
    assert not list(tmp_path.iterdir())
