"""The costs of a machine: measured, kept, read again; and what may go wrong with the file."""

from __future__ import annotations

import fcntl
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import NEEDS_GPU

import speedtorch
from speedtorch import calibration, cost_model
from speedtorch.ops import _ops


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own; the costs that were there come back."""
    before, calibrated = _ops.costs(), cost_model._calibrated
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path / "speedtorch"
    cost_model.use_costs(before, calibrated=calibrated)


def kept(costs: list[float]) -> Path:
    path = calibration.cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"version": calibration.VERSION, "costs": costs}))
    return path


def test_the_file_lies_in_the_users_cache_folder(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert calibration.cache_file().parent == own_cache
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somewhere")
    assert calibration.cache_file().parent == Path("/somewhere/.cache/speedtorch")


def test_kept_costs_are_used() -> None:
    kept([float(k) for k in range(30)])
    assert calibration.load_costs()
    assert _ops.costs().tolist() == list(range(30))
    assert cost_model._calibrated


def test_without_a_file_the_defaults_serve() -> None:
    before = _ops.costs()
    assert not calibration.load_costs()
    assert torch.equal(_ops.costs(), before)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 1}',
        '{"version": 1, "costs": [1, 2]}',
        '{"version": 1, "costs": "x"}',
        json.dumps({"version": 1, "costs": [-1.0] * 30}),
        '{"version": 1, "costs": [' + "NaN, " * 29 + "1]}",
    ],
)
def test_a_broken_file_is_told_and_changes_nothing(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = _ops.costs()
    path = kept([])
    path.write_text(text)
    with caplog.at_level(logging.WARNING, logger="speedtorch"):
        assert not calibration.load_costs()
    assert f"{path} is not used" in caplog.text
    assert torch.equal(_ops.costs(), before)


def test_a_file_of_another_version_is_left_alone() -> None:
    path = kept([])
    path.write_text(json.dumps({"version": calibration.VERSION + 1}))
    assert not calibration.load_costs()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_there_is_nothing_to_measure() -> None:
    with pytest.raises(RuntimeError, match="calibrate: there is no GPU"):
        speedtorch.calibrate()
    calibration.calibrate_once(1 << 40)  # says nothing: paths matter only with a GPU
    assert not calibration.cache_file().exists()


@NEEDS_GPU
def test_a_calibration_is_kept_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "MOST_TABLE_BYTES", 256 << 20)
    figures = speedtorch.calibrate(progress=False)
    assert all(0 < each < 1e6 for each in figures["costs"][:24])
    assert all(1 < gbps < 1000 for gbps in figures["costs"][-2:])
    assert json.loads(calibration.cache_file().read_text())["costs"] == figures["costs"]
    assert _ops.costs().tolist() == figures["costs"]


@NEEDS_GPU
def test_a_folder_that_cannot_be_written_is_told(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own_cache.write_text("a file where the folder belongs")
    monkeypatch.setattr(calibration, "MOST_TABLE_BYTES", 256 << 20)
    with caplog.at_level(logging.WARNING, logger="speedtorch"):
        figures = speedtorch.calibrate(progress=False)
    assert "cannot be written" in caplog.text
    assert _ops.costs().tolist() == figures["costs"]


@NEEDS_GPU
def test_the_first_large_table_calibrates_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setenv("SPEEDTORCH_CALIBRATE", "1")
    monkeypatch.setattr(calibration, "calibrate", lambda progress: calls.append(progress))
    calibration.calibrate_once(calibration.WORTH_BYTES - 1)
    assert calls == []
    calibration.calibrate_once(calibration.WORTH_BYTES)
    assert calls == [False]
    with calibration.cache_file().with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        calibration.calibrate_once(calibration.WORTH_BYTES)  # another process is at it
    monkeypatch.setenv("SPEEDTORCH_CALIBRATE", "0")
    calibration.calibrate_once(calibration.WORTH_BYTES)
    kept([])
    monkeypatch.setenv("SPEEDTORCH_CALIBRATE", "1")
    calibration.calibrate_once(calibration.WORTH_BYTES)
    assert calls == [False]
