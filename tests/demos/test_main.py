"""The command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from warm_python import warm_python

import speedtorch
from demos import command as demo_command
from demos.settings import make_optimizer, optimizer_names
from speedtorch import __main__ as command
from speedtorch.__main__ import main

ROOT = Path(__file__).parents[2]


def test_info_prints_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["info"]) == 0
    assert torch.__version__ in capsys.readouterr().out


def test_info_prints_json_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["torch"] == torch.__version__ and "gpus" in facts
    assert facts["host"]["memory_bytes"] > 1 << 20


def test_a_command_runs_without_a_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as Python sets it after `speedtorch info >&-`
    assert command.main(["info"]) == 0


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"speedtorch {speedtorch.__version__}\n"


def test_calibrate_prints_what_it_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "calibrate", lambda: {"gpu": "one", "costs": [1.5]})
    assert main(["calibrate"]) == 0
    assert json.loads(capsys.readouterr().out) == {"gpu": "one", "costs": [1.5]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_calibrate_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate"]) == 1
    assert "torch finds no GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_the_module_runs_as_a_command() -> None:
    line = [warm_python(), "-m", "speedtorch", "info"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "kernels" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "demo"),
        (["demo"], "glove"),
        (["demo", "word2vec"], "--optimizer"),
        (["demo", "glove"], "--x-max"),
    ],
    ids=["speedtorch", "demo", "word2vec", "glove"],
)
def test_help_names_what_may_follow(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    assert ended.value.code == 0
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["fly"], "invalid choice: 'fly'"),
        (["info", "--more"], "unrecognized arguments: --more"),
        (["demo"], "required: demo"),
        (["demo", "glove", "--window", "0"], "expected an integer of at least 1, got '0'"),
        (["demo", "word2vec", "--dim", "0"], "expected an integer of at least 1, got '0'"),
        (["demo", "word2vec", "--steps", "-3"], "expected an integer of at least 1, got '-3'"),
        (["demo", "word2vec", "--batch", "1.5"], "expected an integer of at least 1, got '1.5'"),
        (["demo", "word2vec", "--lr", "fast"], "invalid float value: 'fast'"),
        (["demo", "word2vec", "--memory", "tape"], "invalid choice: 'tape'"),
        (["demo", "word2vec", "--device", "tpu"], "invalid choice: 'tpu'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_argument_is_reported(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("no such"), 2, "no such"),
        (OSError("no such"), 2, "no such"),
        (MemoryError("no such"), 2, "no such"),
        (KeyboardInterrupt(), 130, "interrupted by Ctrl-C"),
    ],
    ids=repr,
)
def test_what_ends_a_demonstration_is_one_line_and_a_status(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    message: str,
) -> None:
    def run(kind: object, settings: object) -> int:
        raise error

    monkeypatch.setattr(demo_command, "run", run)
    assert command.main(["demo", "word2vec"]) == status
    assert capsys.readouterr().err == f"speedtorch: {message}\n"


def test_optimizer_names_are_those_of_torch() -> None:
    names = optimizer_names()
    assert {"SGD", "Adam", "Adamax", "SparseAdam", "Rprop", "ASGD"} <= set(names)
    assert "Optimizer" not in names and "lr_scheduler" not in names


def test_the_error_of_an_unknown_optimizer_lists_all_names() -> None:
    with pytest.raises(ValueError, match="optimizer must be one of .*, got 'adamax'") as error:
        make_optimizer("adamax", None, [])
    assert all(name in str(error.value) for name in optimizer_names())


def test_without_a_rate_an_optimizer_gets_a_good_one() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    for name in optimizer_names():
        made = make_optimizer(name, None, [parameter])
        assert type(made).__name__ == name
        assert make_optimizer(name, 0.125, [parameter]).defaults["lr"] == 0.125


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("memory", ["managed", "registered", "cuda"])
def test_memory_that_needs_a_gpu_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], memory: str
) -> None:
    assert main(["demo", "word2vec", "--memory", memory]) == 2
    assert f"memory {memory} cannot be used: torch sees no GPU" in capsys.readouterr().err
