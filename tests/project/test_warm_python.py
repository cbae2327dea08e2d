"""The Python that has imported torch runs a program as any Python does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from warm_python import warm_python

pytestmark = pytest.mark.slow


def run(*arguments: str, **options: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm_python(), *arguments],
        cwd=options.pop("cwd", None),
        input=str(options.pop("input", "")),
        env={**os.environ, **{name: str(value) for name, value in options.items()}},
        capture_output=True,
        text=True,
    )


def test_a_program_has_its_own_arguments_folder_environment_and_streams(tmp_path: Path) -> None:
    program = (
        "import json, os, sys\n"
        "print(json.dumps([sys.argv, sys.path[:2], os.getcwd(), sys.stdin.read(), __name__]))\n"
        "print(sorted(set(os.environ) & {'OWN'}), file=sys.stderr)"
    )
    done = run("-c", program, "a b", cwd=tmp_path, input="text", PYTHONPATH="/own", OWN="")
    assert done.returncode == 0 and done.stderr == "['OWN']\n"
    arguments, path, folder, text, name = json.loads(done.stdout)
    assert (arguments, path, text, name) == (["-c", "a b"], ["", "/own"], "text", "__main__")
    assert Path(folder).samefile(tmp_path)


def test_a_module_of_its_folder_runs(tmp_path: Path) -> None:
    (tmp_path / "of_a_test.py").write_text("import sys; print(sys.argv[1:], __name__)")
    assert run("-m", "of_a_test", "x", cwd=tmp_path).stdout == "['x'] __main__\n"


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("", 0),
        ("import sys; sys.exit(3)", 3),
        ("raise ValueError('last words')", 1),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os.kill(os.getppid(), 0); os.abort()", -signal.SIGABRT),
    ],
    ids=["end", "exit", "error", "killed", "aborted"],
)
def test_a_program_ends_as_it_would(program: str, status: int) -> None:
    done = run("-c", program)
    assert done.returncode == status
    assert ("ValueError: last words" in done.stderr) == (status == 1)


def interrupted(python: str) -> tuple[int, str]:
    """How a program ends that Ctrl-C interrupts, and what it says of it."""
    # At its end a Python may do what torch asked for when it was imported: its status tells.
    # One long sleep would sleep on after a signal that comes just before it.
    program = (
        "import time, torch, torch._dynamo\nprint('begun', flush=True)\n"
        "for _ in range(6_000):\n    time.sleep(0.01)"
    )
    with subprocess.Popen(
        [python, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def test_ctrl_c_reaches_a_program() -> None:
    status, errors = interrupted(warm_python())
    assert status == interrupted(sys.executable)[0] != 0
    assert "KeyboardInterrupt" in errors
