"""Repeats the tests in random order with random seeds, and names those that fail or change.

`python tests/flaky.py RUNS SEED ARGUMENTS` runs pytest with these arguments RUNS times, with the
seeds SEED, SEED + 1, ... A seed decides the order of the files and of the tests within each file,
and what the random generators return in each test. build/flaky/ keeps every outcome: an interrupted
call continues with the tests that have none. Changed files begin anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
Outcomes: TypeAlias = dict[str, dict[str, Any]]
"""What was recorded in one run, by the test."""

# Of pytest: all tests passed; no test is left to run. After a failure tests may be left, because
# pytest-xdist starts no process in place of one that crashed.
ENDED = (0, 5)


# ------------------------------------------------------------------------------------------------
# The plugin, in each process of a run


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of one run."""
    group = parser.getgroup("flaky")
    group.addoption("--order-seed", type=int, default=0, help="decides order and random numbers")
    group.addoption("--outcomes", type=Path, help="JSON lines; recorded tests are left out")


def pytest_configure(config: pytest.Config) -> None:
    """Records outcomes in the process that all reports are sent to."""
    if config.option.outcomes and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.option.outcomes))


@pytest.hookimpl(tryfirst=True)  # pytest then moves tests with the same large fixture together
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffles files, and the tests of each; leaves out the tests that have an outcome."""
    seed, files = config.option.order_seed, defaultdict(list)
    for item in items:
        files[str(item.path.relative_to(config.rootpath))].append(item)
    names = sorted(files)
    random.Random(seed).shuffle(names)
    for name in names:  # the order within a file is the same if the file runs by itself
        random.Random(f"{seed} {name}").shuffle(files[name])
    items[:] = [item for name in names for item in files[name]]
    if config.option.outcomes:
        recorded = outcomes(config.option.outcomes)
        config.hook.pytest_deselected(items=[each for each in items if each.nodeid in recorded])
        items[:] = [each for each in items if each.nodeid not in recorded]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seeds the random generators before the fixtures of a test."""
    seed = zlib.crc32(f"{item.config.option.order_seed} {item.nodeid}".encode())
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


class Recorder:
    """Appends a line for each test that has ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reports: defaultdict[str, list[pytest.TestReport]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes the reports of setup, call and teardown, or the one of a process that crashed."""
        self._reports[report.nodeid].append(report)
        if report.when in ("setup", "call"):
            return
        reports = self._reports.pop(report.nodeid)
        line: dict[str, Any] = {"test": report.nodeid, "outcome": "passed"}
        for outcome in ("skipped", "failed"):
            if found := [each for each in reports if each.outcome == outcome]:
                crash = getattr(found[0].longrepr, "reprcrash", None)
                message = crash.message if crash else found[0].longreprtext
                line |= {"outcome": outcome, "message": message.partition("\n")[0]}
                if outcome == "failed":  # an interrupted run prints no report
                    line["report"] = found[0].longreprtext[-8000:]
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


# ------------------------------------------------------------------------------------------------
# The runs


def outcomes(path: Path) -> Outcomes:
    """The recorded tests of a run."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["test"]: line for line in map(json.loads, lines)}


def folder_of(root: Path, arguments: tuple[str, ...]) -> Path:
    """Where the outcomes of these files are, with these arguments."""
    git = ["git", "-C", str(root)]
    state = [[*git, "rev-parse", "HEAD"], [*git, "diff", "HEAD"]]
    told = [subprocess.run(each, capture_output=True).stdout for each in state]
    commit = os.environ.get("SPEEDTORCH_COMMIT", "")  # of a copy that git does not know
    digest = hashlib.sha256(b"".join([*told, json.dumps([commit, *arguments]).encode()]))
    return root / "build" / "flaky" / digest.hexdigest()[:12]


def run(seed: int, path: Path, root: Path, *arguments: str) -> None:
    """One run, to its end; the tests after one that crashes its process run as well."""
    plugin = ["-p", "flaky", f"--order-seed={seed}", f"--outcomes={path}"]
    command = [sys.executable, "-m", "pytest", *plugin, f"--hypothesis-seed={seed}", *arguments]
    paths = [str(root), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ended = path.with_suffix(".ended")
    while not ended.exists():
        before = len(outcomes(path))
        code = subprocess.run(command, cwd=root, env=environment).returncode
        if code in ENDED:
            ended.touch()
        elif len(outcomes(path)) == before:
            raise SystemExit(f"flaky: seed {seed}: pytest ended with status {code}")


def summary(found: Outcomes, seconds: float) -> str:
    """The counts of a run, in the form of pytest's last line."""
    counts = Counter(each["outcome"] for each in found.values())
    parts = [f"{counts[name]} {name}" for name in ("failed", "passed", "skipped") if counts[name]]
    return f"{', '.join(parts) or 'no tests ran'} in {seconds:.2f}s"


def report(runs: dict[int, Outcomes]) -> list[str]:
    """A line for each test that failed or changed, with the command that repeats it."""
    lines = []
    for test in sorted({test for found in runs.values() for test in found}):
        seeds: defaultdict[str, list[int]] = defaultdict(list)
        messages: dict[str, str] = {}
        for seed, found in runs.items():
            told = found.get(test, {"outcome": "left out"})
            seeds[told["outcome"]].append(seed)
            messages.setdefault(told["outcome"], told.get("message", ""))
        if len(seeds) == 1 and "failed" not in seeds:
            continue
        parts = [f"{outcome} with {', '.join(map(str, seeds[outcome]))}" for outcome in seeds]
        rare = "failed" if "failed" in seeds else min(seeds, key=lambda each: len(seeds[each]))
        again = f"PYTHONPATH=.:tests python -m pytest -p flaky --order-seed={seeds[rare][0]}"
        again += f" --hypothesis-seed={seeds[rare][0]} {test.partition('::')[0]}"
        lines.append(f"{test}: {'; '.join(parts)}: {messages[rare]}\n    {again}")
    return lines


def main(runs: int, first: int, *arguments: str, root: Path = ROOT) -> int:
    """Runs what has not run; 1 if a test failed or changed in any of the runs."""
    folder = folder_of(root, arguments)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {seed: folder / f"{seed}.jsonl" for seed in range(first, first + runs)}
    begin = time.monotonic()
    try:
        for seed, path in paths.items():
            run(seed, path, root, *arguments)
    finally:  # also if a time limit ends this process
        for seed, path in paths.items():
            print(f"seed {seed}: {summary(outcomes(path), time.monotonic() - begin)}", flush=True)
    found = {seed: outcomes(path) for seed, path in paths.items()}
    lines = report(found)
    print("\n".join(lines))
    counts = ", ".join(str(len(each)) for each in found.values())
    print(f"flaky: {len(lines)} tests failed or changed; {runs} runs of {counts} tests: {folder}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
