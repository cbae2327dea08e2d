"""Saves beside training: of the moment of the call, and whole or not there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from file_faults import fail
from reference import as_bytes
from test_deltas import SETTINGS, Run, size
from warm_python import warm_python

import speedtorch
from speedtorch.files import system_calls
from speedtorch.parallel import checkpoints
from speedtorch.parallel.background_saves import fitting


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
    then = run.tensors()
    random = torch.get_rng_state()
    saving = speedtorch.save(tmp_path, background=True, **run.parts, random=random)
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
    for one, other in zip(again.tensors(), then, strict=True):
        assert torch.equal(as_bytes(one.cpu()), as_bytes(other.cpu()))


def test_changes_after_the_call_are_in_the_next_delta(
    device: str, tmp_path: Path, disk: SlowDisk
) -> None:
    run = Run(device).train(3)
    run.table.track_changes()
    saving = speedtorch.save(tmp_path, background=True, **run.parts)
    run.train(1)
    disk.goes_on.set()
    whole = saving.result(60)
    run.train(1)
    saving = speedtorch.save(tmp_path, base=1, background=True, **run.parts)
    then = run.tensors()
    run.train(1)
    assert size(saving.result(60)) < size(whole) / 2
    again = Run(device, seed=7)
    speedtorch.load(tmp_path, **again.parts)
    for one, other in zip(again.tensors(), then, strict=True):
        assert torch.equal(one, other)


def test_the_folder_is_waited_for(tmp_path: Path, disk: SlowDisk) -> None:
    run = Run("cpu").train(1)
    saving = speedtorch.save(tmp_path, background=True, **run.parts, step=1)
    threading.Timer(0.3, disk.goes_on.set).start()
    assert speedtorch.load(tmp_path).get("step") == 1
    assert saving.done()
    disk.goes_on.clear()
    saving = speedtorch.save(tmp_path, background=True, **run.parts, step=2)
    threading.Timer(0.3, disk.goes_on.set).start()
    assert speedtorch.save(tmp_path, **run.parts, step=3).generation == 3
    assert saving.result().generation == 2


@pytest.mark.parametrize(("share", "before"), [(0.0, 4), (0.6, 2), (2.0, 0)])
def test_what_has_no_room_is_written_before(
    share: float, before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "SHARD_BYTES", 1000)  # a file for each large tensor
    goes_on, real = threading.Event(), system_calls.calls.make_folder
    written: list[str] = []

    def make_folder(path: str) -> None:
        real(path)
        written.append(path)

    monkeypatch.setattr(system_calls.calls, "make_folder", make_folder)
    monkeypatch.setattr(checkpoints, "remember", lambda *given: goes_on.wait(60))
    tensors = {name: torch.full((300,), float(n)) for n, name in enumerate("abcd")}
    most = max(1, int(share * 4 * 1200))
    saving = speedtorch.save(tmp_path, background=True, max_memory=most, tensors=tensors)
    waits = [each for each in threading.enumerate() if each.name == "speedtorch save"]
    assert len(waits) == 1 and len(written) == 1
    for each in tensors.values():
        each.fill_(9.0)
    goes_on.set()
    assert len(list(Path(saving.result(60).path).glob("*.safetensors"))) == 4
    found = speedtorch.load(tmp_path)["tensors"]
    assert [float(each[0]) for each in found.values()] == [0.0, 1.0, 2.0, 3.0]
    assert fitting([{n: t} for n, t in tensors.items()], most) == 4 - before


def test_an_error_is_told_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("cpu").train(1)
    speedtorch.save(tmp_path, **run.parts, step=1)
    with monkeypatch.context() as patch:
        fail(patch, "write")
        with pytest.warns(RuntimeWarning, match="in the background, to .* has failed: OSError"):
            saving = speedtorch.save(tmp_path, background=True, **run.parts, step=2)
            with pytest.raises(OSError, match="Input/output error"):
                saving.result(60)
    assert os.listdir(tmp_path) == ["generation-00000001"]
    assert speedtorch.load(tmp_path, **run.parts) == {"step": 1}
    assert speedtorch.save(tmp_path, background=True, **run.parts).result(60).generation == 2


@pytest.mark.slow
def test_the_end_of_the_process_waits(tmp_path: Path) -> None:
    program = """
import sys, time, torch, speedtorch
from speedtorch.files import system_calls
from speedtorch.parallel import checkpoints
from speedtorch.parallel.background_saves import fitting
real = system_calls.calls.write
def write(*args):
    time.sleep(0.2)
    return real(*args)
system_calls.calls.write = write
table = speedtorch.HostTable(1000, 8, memory="plain").fill_(3)
speedtorch.save(sys.argv[1], background=True, rows=table["weight"], step=5)
"""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120)
    assert time.perf_counter() - begin > 0.6
    found = speedtorch.load(tmp_path)
    assert found["step"] == 5 and bool((found["rows"] == 3).all())


@pytest.mark.slow
def test_training_that_is_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    root = Path(system_calls.__file__).parents[2]
    path = f"{root}{os.pathsep}{root / 'tests'}"
    # Managed memory is none for the forks that it trains in.
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command = [warm_python(), "-m", "killed_training", str(tmp_path / "runs"), "20", "1"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    killed, resumed = map(int, done.stdout.split())
    assert killed >= 10 and resumed >= 10


def test_wrong_arguments_are_told(tmp_path: Path) -> None:
    for wrong, error in ((0, ValueError), ("many", ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="max_memory: expected"):
            speedtorch.save(tmp_path, background=True, max_memory=wrong, step=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot hold"):
        speedtorch.save(tmp_path, background=True, what=object())
    assert not list(tmp_path.iterdir())
