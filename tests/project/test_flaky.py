"""Tests that depend on chance or on their order are found, and an interrupted search continues."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import flaky
import pytest
from warm_python import warm_python

CHANCE = """
import os, random, numpy, torch

def test_depends_on_chance():
    assert random.random() < 0.5

def test_seeds_of_torch_and_numpy():
    with open("numbers", "a") as file:
        print(torch.rand(()).item(), numpy.random.rand(), file=file)

def test_always_passes():
    assert True
"""
ORDER = """
import pytest

state = []

def test_leaves_something():
    state.append(1)

def test_depends_on_order():
    assert not state

@pytest.mark.parametrize("way", range(3))
def test_is_skipped(way):
    pytest.skip("not here")
"""
CRASH = """
import os

def test_ends_the_process():
    if not os.path.exists("crashed"):
        open("crashed", "w").close()
        os._exit(3)

def test_passes():
    assert True
"""
RUNS = 4


@pytest.fixture(autouse=True)
def torch_is_imported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs start without waiting for it."""
    monkeypatch.setattr(sys, "executable", warm_python())


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A folder with tests of which one depends on chance and one on its order."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_chance.py").write_text(CHANCE)
    (tmp_path / "test_order.py").write_text(ORDER)
    return tmp_path


@pytest.mark.slow
def test_chance_and_order_are_found_with_the_seed_that_repeats_them(
    suite: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flaky.main(RUNS, 0, "-q", root=suite) == 1
    printed = capsys.readouterr().out
    found = [line for line in printed.splitlines() if line.startswith("test_")]
    assert [line.partition(":: ")[0].split(": ")[0] for line in found] == [
        "test_chance.py::test_depends_on_chance",
        "test_order.py::test_depends_on_order",
    ]
    assert all("passed with " in line and "failed with " in line for line in found)
    numbers = (suite / "numbers").read_text().splitlines()
    assert len(set(numbers)) == len(numbers) == RUNS
    recorded = [*map(flaky.outcomes, flaky.folder_of(suite, ("-q",)).glob("*.jsonl"))]
    by_chance = [run["test_chance.py::test_depends_on_chance"] for run in recorded]
    reports = [line["report"] for line in by_chance if line["outcome"] == "failed"]
    assert all("assert random.random() < 0.5" in report for report in reports)
    first_files = {next(iter(run)).partition("::")[0] for run in recorded}
    assert first_files == {"test_chance.py", "test_order.py"}
    for line in printed.splitlines():
        if "--order-seed" in line:
            options = line.split("pytest ")[1].split()
            environment = {"PYTHONPATH": str(Path(flaky.__file__).parent)}
            again = [sys.executable, "-m", "pytest", *options]
            assert subprocess.run(again, cwd=suite, env=environment).returncode == 1


@pytest.mark.slow
def test_an_interrupted_run_continues_and_other_arguments_begin_anew(suite: Path) -> None:
    flaky.main(1, 7, "-q", root=suite)
    folder = flaky.folder_of(suite, ("-q",))
    assert flaky.folder_of(suite, ("-v",)) != folder
    whole = (folder / "7.jsonl").read_text().splitlines()
    (folder / "7.jsonl").write_text("".join(f"{line}\n" for line in whole[:2]))
    (folder / "7.ended").unlink()
    flaky.main(1, 7, "-q", root=suite)
    again = (folder / "7.jsonl").read_text().splitlines()
    assert again[:2] == whole[:2]
    tests = [[json.loads(line)["test"] for line in lines] for lines in (whole, again)]
    assert sorted(tests[0]) == sorted(tests[1])


def test_the_counts_of_a_run_have_the_form_of_pytests() -> None:
    told = {"a": "passed", "b": "skipped", "c": "failed", "d": "passed"}
    found = {test: {"test": test, "outcome": outcome} for test, outcome in told.items()}
    assert flaky.summary(found, 3.456) == "1 failed, 2 passed, 1 skipped in 3.46s"
    assert flaky.summary({}, 0) == "no tests ran in 0.00s"


@pytest.mark.slow
def test_an_interrupted_search_says_how_far_it_went(
    suite: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = flaky.run

    def interrupted(seed: int, *arguments: Any) -> None:
        if seed == 1:
            raise KeyboardInterrupt
        run(seed, *arguments)

    monkeypatch.setattr(flaky, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        flaky.main(2, 0, "-q", root=suite)
    counts = [line.partition(" in ")[0] for line in capsys.readouterr().out.splitlines()]
    assert re.fullmatch(r"seed 0: (\d failed, )?\d passed, 3 skipped", counts[-2])
    assert counts[-1] == "seed 1: no tests ran"


def test_outcomes_belong_to_the_commit_and_the_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = [("-n", "auto", "tests/nn"), ("-n", "auto", "tests/table")]
    found = set()
    for commit in ("abc", "def"):  # as of a copy without git
        monkeypatch.setenv("SPEEDTORCH_COMMIT", commit)
        found |= {flaky.folder_of(tmp_path, half) for half in halves}
    assert len(found) == 4


@pytest.fixture
def crashing(tmp_path: Path) -> Path:
    """A folder with a test that ends its process the first time."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_crash.py").write_text(CRASH)
    return tmp_path


@pytest.mark.slow
def test_a_crash_is_a_failure_and_the_tests_after_it_run(
    crashing: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flaky.main(2, 1, "-n", "1", "--max-worker-restart", "0", root=crashing) == 1
    printed = capsys.readouterr().out
    assert "test_ends_the_process: failed with 1; passed with 2: " in printed
    assert "1 tests failed or changed; 2 runs of 2, 2 tests" in printed


@pytest.mark.slow
def test_a_crash_of_the_process_that_records_ends_the_search(crashing: Path) -> None:
    with pytest.raises(SystemExit, match="seed 1: pytest ended with status 3"):
        flaky.main(1, 1, root=crashing)
