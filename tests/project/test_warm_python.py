"""The Python that has imported torch runs a program as any Python does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from warm_python import finished, warm_python

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


@pytest.mark.examples
def test_ctrl_c_reaches_a_program() -> None:
    status, errors = interrupted(warm_python())
    assert status == interrupted(sys.executable)[0] != 0
    assert "KeyboardInterrupt" in errors


# Starts itself in a session of its own, as torchrun starts ranks. Both print a number and wait.
FAMILY = """
import os, subprocess, sys, time
print(os.getpid(), flush=True)
if len(sys.argv) < 3:
    again = [sys.executable, "-m", "family", *sys.argv[1:], "child"]
    subprocess.Popen(again, start_new_session=True)
time.sleep(100)
"""


def assert_ended(numbers: list[str]) -> None:
    give_up = time.monotonic() + 10
    assert len(numbers) == 2
    for number in numbers:
        while Path("/proc", number).exists():
            assert time.monotonic() < give_up, number
            time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_all_that_a_program_has_started_ends_with_its_asker(tmp_path: Path) -> None:
    (tmp_path / "family.py").write_text(FAMILY)
    command = [warm_python(), "-m", "family", "parent"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        numbers = [process.stdout.readline().strip() for _ in range(2)]
        process.kill()
        assert process.stdout.read() == ""  # each process that had the stream has ended
    assert_ended(numbers)


@pytest.mark.examples
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    "warm", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["warm", "another"]
)
def test_a_program_that_hangs_fails_with_its_output(tmp_path: Path, warm: bool) -> None:
    (tmp_path / "family.py").write_text(FAMILY)
    python = warm_python() if warm else sys.executable
    begin = time.monotonic()
    command = [python, "-m", "family", "parent", *([] if warm else ["alone"])]
    with pytest.raises(AssertionError, match="has not ended in 4 s: -m family parent") as raised:
        finished(command, cwd=tmp_path, seconds=4)
    assert time.monotonic() - begin < 30
    message = str(raised.value)
    if warm:
        assert_ended(re.findall(r"^\d+$", message, re.MULTILINE))
        assert re.search(r"family.py\", line \d+ in <module>", message)
    else:
        assert re.search(r"^\d+$", message, re.MULTILINE)


def test_a_program_that_ends_in_time_returns_its_output() -> None:
    program = "import sys; print('out'); print('error', file=sys.stderr); sys.exit(3)"
    done = finished([warm_python(), "-c", program], seconds=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "error\n")
