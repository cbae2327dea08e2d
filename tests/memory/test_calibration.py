"""The costs of a machine: measured, kept, read again; and what may go wrong with the file."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import NEEDS_GPU

import speedtorch
from speedtorch.memory import calibration, cost_model, host_memory
from speedtorch.ops.functions import _ops

GPU = "a GPU of these tests"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own; the costs that were there come back."""
    before, calibrated = _ops.costs(), cost_model._calibrated
    monkeypatch.setattr(cost_model, "_calibrated", False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if not torch.cuda.is_available():
        monkeypatch.setattr(calibration, "_gpu", lambda: GPU)
    yield tmp_path / "speedtorch"
    cost_model.use_costs(before, calibrated=calibrated)


def cache_file() -> Path:
    path = calibration.cache_file(calibration._gpu())
    assert path is not None
    return path


def written(text: str) -> Path:
    path = cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def figures(costs: object, **changes: object) -> str:
    known = {"gpu": calibration._gpu(), "costs": costs}
    return json.dumps(known | changes)


def assert_not_used(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Told once, and the costs are what they were."""
    before = _ops.costs()
    with caplog.at_level(logging.WARNING, logger="speedtorch"):
        assert not calibration.load_costs()
    (message,) = caplog.messages
    assert message.startswith(f"{path} is ignored (")
    assert message.endswith(". Call speedtorch.calibrate() to replace it.")
    assert torch.equal(_ops.costs(), before)
    assert not cost_model._calibrated


def test_the_file_lies_in_the_users_cache_folder(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache_file().parent == own_cache
    for relative in (None, "", "cache"):
        if relative is None:
            monkeypatch.delenv("XDG_CACHE_HOME")
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", relative)
        monkeypatch.setenv("HOME", "/somewhere")
        assert cache_file().parent == Path("/somewhere/.cache/speedtorch")


def test_each_gpu_of_a_machine_has_a_file_of_its_own() -> None:
    names = {calibration.cache_file(gpu) for gpu in ("NVIDIA H200", "A/B", "NVIDIA H100 80GB")}
    assert len(names) == 3
    assert {path.parent for path in names if path} == {cache_file().parent}


def test_without_a_home_folder_no_costs_are_saved_or_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    assert calibration.cache_file("any") is None
    assert not calibration.load_costs()
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING, logger="speedtorch"):
        calibration._store({"gpu": "any"})
    assert "there is no home folder; set XDG_CACHE_HOME to another folder" in caplog.text


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_kept_costs_are_used_whatever_device_is_the_default(device: str) -> None:
    costs = [float(k + 1) for k in range(30)]
    written(figures(costs))
    with torch.device(device):
        assert calibration.load_costs()
    assert _ops.costs().tolist() == costs
    assert cost_model._calibrated


def test_the_saved_link_speed_is_returned_without_applying_costs() -> None:
    gpu, before = calibration._gpu(), _ops.costs()
    assert calibration.saved_link_gbps(gpu) == (None, None)
    written(figures([1.0] * 28 + [50.5, 40.0]))
    assert calibration.saved_link_gbps(gpu) == (50.5, 40.0)
    assert torch.equal(_ops.costs(), before)
    assert not cost_model._calibrated


def test_costs_are_read_when_torch_turns_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[object] = []
    monkeypatch.setattr(calibration, "call_with_first_gpu", queued.append)
    calibration.load_costs_with_first_gpu()
    assert queued == [calibration.load_costs]


def test_without_a_file_the_defaults_serve() -> None:
    before = _ops.costs()
    assert not calibration.load_costs()
    assert torch.equal(_ops.costs(), before)


BROKEN = [
    *("", "[]", "{}", '{"gpu": 1}', "[" * 60_000, " " * 70_000, "\0" * 100),
    '{"gpu": ' + "9" * 5000 + "}",
    "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
]
NO_COSTS: list[object] = [
    *("x", [1, 2], [1.0] * 29 + ["1"], [1.0] * 29 + [None], [True] * 30, [0.0] * 30),
    *([-1.0] * 30, [1e308] * 30, [float("nan")] * 30, [float("inf")] * 30, [[1.0]] * 30),
    *([1.0] * 29 + [10**400], [1.0] * 29 + [0], [1.0] * 23 + [0.0] * 5 + [1.0] * 2),
]


@pytest.mark.parametrize(
    ("text", "costs", "gpu"),
    [
        *((text, None, None) for text in BROKEN),
        *((None, costs, None) for costs in NO_COSTS),
        (None, [1.0] * 30, "another"),
    ],
)
def test_a_file_that_is_not_believed_is_logged_and_ignored(
    text: str | None, costs: object, gpu: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"gpu": gpu} if gpu else {}
    path = written(figures(costs, **changes) if text is None else text)
    assert_not_used(path, caplog)
    assert not gpu or "costs measured on 'another', but this GPU is" in caplog.text


@pytest.mark.parametrize("what", ["pipe", "device", "folder", "link to itself", "huge file"])
def test_what_is_no_file_of_figures_neither_hangs_nor_takes_memory(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = written("")
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "huge file":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path.symlink_to("/dev/zero" if what == "device" else path)
    assert_not_used(path, caplog)


def test_figures_that_cannot_be_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _ops.costs()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(calibration, "_steps", lambda: iter([lambda costs: costs.zero_()]))
    with pytest.raises(RuntimeError, match=r"cost 0 must be from 0.001 to 1e\+06, got 0.0. M"):
        speedtorch.calibrate(progress=False)
    assert torch.equal(_ops.costs(), before)
    assert not cache_file().exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_there_is_nothing_to_measure() -> None:
    with pytest.raises(RuntimeError, match="calibrate: torch finds no GPU"):
        speedtorch.calibrate()
    calibration.calibrate_once(1 << 40)  # says nothing: paths matter only with a GPU
    assert not cache_file().exists()


@NEEDS_GPU
def test_a_calibration_is_kept_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "MOST_TABLE_BYTES", 256 << 20)
    figures = speedtorch.calibrate(progress=False)
    assert all(0 < cost < 1e6 for cost in figures["costs"][:24])
    assert all(1 < gbps < 1000 for gbps in figures["costs"][-2:])
    assert json.loads(cache_file().read_text())["costs"] == figures["costs"]
    assert _ops.costs().tolist() == figures["costs"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured of the GPU, which is pretended if there is none."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(calibration, "_steps", lambda: iter([lambda costs: costs.mul_(1.5)]))
    monkeypatch.setenv("SPEEDTORCH_CALIBRATE", "1")


@pytest.mark.usefixtures("quick")
def test_measured_costs_are_kept_and_used() -> None:
    before = _ops.costs()
    figures = speedtorch.calibrate(progress=False)
    assert torch.equal(_ops.costs(), before * 1.5)
    assert json.loads(cache_file().read_text()) == figures
    assert figures["costs"] == _ops.costs().tolist()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("what", ["no folder", "no home"])
def test_costs_that_cannot_be_saved_are_used_and_logged(
    what: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if what == "no folder":
        own_cache.write_text("a file where the folder belongs")
    else:
        monkeypatch.setattr(calibration, "cache_file", lambda _: None)
    with caplog.at_level(logging.WARNING, logger="speedtorch"):
        figures = speedtorch.calibrate(progress=False)
    assert "cannot write" in caplog.text
    assert _ops.costs().tolist() == figures["costs"]


@pytest.mark.usefixtures("quick")
def test_the_first_large_table_calibrates_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(calibration, "calibrate", lambda progress: calls.append(progress))
    calibration.calibrate_once(calibration.WORTH_BYTES - 1)
    assert calls == []
    calibration.calibrate_once(calibration.WORTH_BYTES)
    assert calls == [False]
    with cache_file().with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with caplog.at_level(logging.INFO, logger="speedtorch"):
            calibration.calibrate_once(calibration.WORTH_BYTES)
    assert caplog.messages == ["another process is calibrating this machine"]
    monkeypatch.setenv("SPEEDTORCH_CALIBRATE", "0")
    calibration.calibrate_once(calibration.WORTH_BYTES)
    earlier = written(figures([2.0] * 30))
    monkeypatch.setenv("SPEEDTORCH_CALIBRATE", "1")
    calibration.calibrate_once(calibration.WORTH_BYTES)
    assert calls == [False]
    # The next version neither uses nor replaces the results of this one.
    monkeypatch.setattr(calibration, "VERSION", calibration.VERSION + 1)
    assert not calibration.load_costs()
    calibration.calibrate_once(calibration.WORTH_BYTES)
    assert calls == [False, False]
    assert cache_file() != earlier


@pytest.mark.usefixtures("quick")
def test_results_that_another_process_has_just_saved_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = [2.0] * 30
    monkeypatch.setattr(fcntl, "flock", lambda *_: written(figures(costs)))
    calibration.calibrate_once(calibration.WORTH_BYTES)
    assert _ops.costs().tolist() == costs


@pytest.mark.parametrize(
    ("available", "table"), [(1 << 20, 256 << 20), (4 << 30, 1 << 30), (1 << 60, 8 << 30)]
)
def test_the_measured_table_is_a_quarter_of_the_available_memory(
    available: int, table: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = mock.Mock(side_effect=MemoryError)
    monkeypatch.setattr(host_memory, "empty", allocate)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: available)
    with pytest.raises(MemoryError):
        calibration._measure_moves(_ops.costs(), kind=1)
    assert allocate.call_args.args == (table,)


@pytest.mark.usefixtures("quick")
def test_a_table_is_made_although_its_machine_cannot_be_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(costs: object) -> None:
        raise MemoryError("pretended")

    monkeypatch.setattr(calibration, "_steps", lambda: iter([fail]))
    calibration.calibrate_once(calibration.WORTH_BYTES)
    assert caplog.messages == [
        "calibration failed (pretended). Call speedtorch.calibrate() to try again."
    ]
    assert not cache_file().exists()
