"""The experts: what they learn, and `demo experts` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from speedtorch.__main__ import main

SMALL = ["--experts", "6", "--resident", "3", "--width", "8", "--batch", "32", "--steps", "120"]


def test_a_run_learns_and_equals_the_run_with_all_experts_on_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    command = ["demo", "experts", *SMALL, "--out", str(tmp_path), "--device", device, "--compare"]
    assert main(command) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["plain"]["identical"] and report["training"]["steps"] == 120
    losses = report["training"]["losses"]
    assert losses[-1] < 0.8 * losses[0]
    moved = report["units"]
    assert moved["hits"] > 100 > moved["misses"] and moved["bytes_in"] > 10 * moved["host_bytes"]
    assert moved["resident_bytes"] <= moved["budget_bytes"]
    saved = load_file(tmp_path / "model.safetensors")
    assert len(saved) == 6 * 4 and saved["experts.5.2.weight"].shape == (8, 32)
    printed = capsys.readouterr().out
    assert "bitwise identical" in printed and "found their module loaded" in printed


def test_more_experts_than_find_room_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["demo", "experts", *SMALL, "--out", str(tmp_path), "--active", "4"]
    assert main(command) == 2
    assert "active must be at most 3, got 4" in capsys.readouterr().err
