"""A sanitizer that a machine cannot run is left out with the reason."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import sanitized
import torch
from sanitized import GPU_TOOLS, GpuTool, Sanitizer

NEEDS_GCC = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@NEEDS_GCC
@pytest.mark.parametrize(
    ("runtime", "started_by", "lack"),
    [
        ("libnone.so", (), "gcc has no libnone.so"),
        ("libgcc_s.so.1", ("no-program", "-R"), "no-program is not installed"),
        ("libgcc_s.so.1", ("false", "-R"), "false -R is not permitted"),
        ("libgcc_s.so.1", ("env",), None),
    ],
)
def test_what_a_machine_lacks_is_named(
    runtime: str, started_by: tuple[str, ...], lack: str | None
) -> None:
    assert Sanitizer("thread", runtime, {}, started_by).lacks() == lack


@NEEDS_GCC
def test_tests_that_cannot_run_are_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    none = Sanitizer("thread", "libnone.so", {})
    monkeypatch.setitem(sanitized.SANITIZERS, "thread", none)
    assert sanitized.main("thread") == 0
    message = "speedtorch: no test ran with -fsanitize=thread: gcc has no libnone.so\n"
    assert capsys.readouterr().err == message


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pretended GPU, and the folder of a toolkit's programs, of which there is none yet."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    real = shutil.which

    def which(name: str, path: str) -> str | None:
        return real(name, path=os.pathsep.join({str(tmp_path / "bin")} & {*path.split(os.pathsep)}))

    monkeypatch.setattr(shutil, "which", which)
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def test_what_a_machine_lacks_for_a_gpus_tool_is_named(
    toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert GPU_TOOLS[0].lacks() == "compute-sanitizer is not installed"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert GPU_TOOLS[0].lacks() == "there is no GPU"


@pytest.mark.parametrize("tool", GPU_TOOLS, ids=[tool.tool for tool in GPU_TOOLS])
def test_what_a_gpus_tool_finds_is_a_failure(tool: GpuTool, toolkit: Path) -> None:
    program = toolkit / "compute-sanitizer"
    program.write_text(f'#!/bin/sh\necho "$@" > {toolkit}/said\nexit 9\n')
    program.chmod(0o755)
    assert sanitized.main(tool.tool, "tests/ops") == 9
    arguments = (toolkit / "said").read_text()
    assert arguments.startswith(f"--tool {tool.tool} --error-exitcode 9 ")
    assert arguments.endswith(f" -k {tool.left_out} tests/ops\n")
