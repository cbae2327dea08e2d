"""Two libraries measured in turns: which figures count as worse, and calls that are cut short."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT
from warm_python import finished

from benchmarks import compare
from benchmarks.harness import RESULTS
from benchmarks.processes import STEMS


def runs_of(old: list[float], new: list[float], *, peer: bool = False) -> list[compare.Run]:
    """Rounds of one figure."""
    return [
        {
            "stem": "cpu",
            "round": number,
            "library": library,
            "seconds": 1.0,
            "error": None,
            "figures": {"gather": {"ms": ms, "peer": peer}},
        }
        for library, rounds in (("old", old), ("new", new))
        for number, ms in enumerate(rounds)
    ]


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ([1.0, 1.0, 1.0], [1.02, 1.03, 1.03], "as before"),
        ([1.0, 1.0, 1.0], [1.02, 1.05, 1.06], "WORSE"),
        ([0.9, 1.0, 1.2], [1.0, 1.15, 1.3], "as before"),
        ([0.9, 1.0, 1.2], [1.1, 1.21, 1.3], "WORSE"),
        ([0.9, 1.0, 1.2], [0.8, 0.85, 1.3], "better"),
        ([0.9, 1.0, 1.2], [0.8, 0.91, 1.3], "as before"),
        ([1.0], [], "MISSING"),
        ([], [1.0], "new only"),
    ],
)
def test_worse_is_what_is_beyond_three_per_cent_and_beyond_the_old_spread(
    old: list[float], new: list[float], verdict: str
) -> None:
    (line,) = compare.lines_of(runs_of(old, new))
    assert line.verdict == verdict
    assert compare.as_text(runs_of(old, new)).splitlines()[2].endswith(f"| {verdict} |")


def test_slower_peers_are_reported_but_not_counted() -> None:
    (line,) = compare.lines_of(runs_of([1.0, 1.0], [2.0, 2.0], peer=True))
    assert line.verdict == "not ours: slower"
    assert "0 of 1 figures worse" in compare.as_text(runs_of([1.0], [2.0], peer=True))


@pytest.mark.parametrize("stem", [s for s in STEMS if (RESULTS / f"{s}.json").exists()])
def test_every_figure_of_a_benchmark_has_a_name_of_its_own(stem: str) -> None:
    result: dict[str, Any] = json.loads((RESULTS / f"{stem}.json").read_text())
    figures = compare.figures_of(result)
    issued = sum("issued_us" in figure["parameters"] for figure in result["figures"])
    timed = sum("seconds" in facts for facts in result["extra"].values() if type(facts) is dict)
    assert len(figures) == len(result["figures"]) + issued + timed
    if stem in ("pinned_gather", "embedding", "word2vec"):
        assert {figure["peer"] for figure in figures.values()} == {True, False}


class Rounds:
    """Takes 10 s for each library, and notes what it did."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, int]] = []

    def __call__(self, stem: str, first: int) -> list[dict[str, Any]]:
        self.ran.append((stem, first))
        return [{"figures": {}, "error": None, "seconds": 10.0}] * 2


def test_a_call_that_is_cut_short_goes_on_where_it_was(tmp_path: Path) -> None:
    path, wanted = tmp_path / "runs.json", list(itertools.product("ab", range(2)))
    first, second = Rounds(), Rounds()
    # The first round of a stem may take whatever it takes; the second is known to take 10 s.
    assert not compare.compare(path, {}, wanted, first, seconds=5)
    assert first.ran == [("a", 0)]
    assert compare.compare(path, {"sizes": "full"}, wanted, second)
    assert first.ran + second.ran == wanted  # the libraries take turns in beginning
    assert len(json.loads(path.read_text())["runs"]) == 8
    assert path.with_suffix(".md").exists()


def test_a_failed_run_is_reported_and_the_other_counts(tmp_path: Path) -> None:
    def run(stem: str, first: int) -> list[dict[str, Any]]:
        figures = {"gather": {"ms": 1.0, "peer": False}}
        return [
            {"figures": {}, "error": "out of memory", "seconds": 1.0},
            {"figures": figures, "error": None, "seconds": 1.0},
        ]

    path = tmp_path / "runs.json"
    assert compare.compare(path, {}, [("a", 0)], run)
    text = path.with_suffix(".md").read_text()
    assert "1 runs failed" in text and "| new only |" in text
    assert "old a, round 0: out of memory" in text


@pytest.mark.examples
@pytest.mark.parametrize("fails", [False, True])
def test_two_processes_take_turns_until_one_ends(fails: bool) -> None:
    program = (
        "import sys; from benchmarks.harness import take_turn; take_turn(begins=True)\n"
        "for each in range(3): print(sys.argv[1], flush=True); take_turn(); each / int(sys.argv[2])"
    )
    ends = socket.socketpair()
    ends[1].send(b".")  # the first one's turn
    with tempfile.TemporaryFile("w+") as output:
        started = [
            subprocess.Popen(
                [sys.executable, "-c", program, name, str(divisor)],
                cwd=ROOT,
                env={**os.environ, "SPEEDTORCH_BENCH_OTHER": str(end.fileno())},
                pass_fds=[end.fileno()],
                stdout=output,
                stderr=subprocess.DEVNULL,
            )
            for name, divisor, end in (("a", 1 - fails, ends[0]), ("b", 1, ends[1]))
        ]
        for end in ends:
            end.close()
        assert [process.wait(60) for process in started] == [int(fails), 0]
        output.seek(0)
        assert output.read().split() == list("abbb" if fails else "ababab")


def run_compare(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    # A Python that is a fork of another has not its sockets.
    command = [sys.executable, "-m", "benchmarks.compare", *map(str, arguments)]
    return finished(command, cwd=ROOT, seconds=240)


@pytest.mark.slow
def test_a_checkout_without_a_built_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "speedtorch").mkdir()
    done = run_compare("--old", tmp_path, "--out", tmp_path / "runs.json")
    assert done.returncode == 1
    assert "has no built library; run `python setup.py build_ext --inplace` in" in done.stderr


@pytest.mark.examples
def test_two_checkouts_are_compared_on_the_benchmarks_of_one(tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(ROOT / "speedtorch", old / "speedtorch")
    # The old library tells itself apart by being unable to plan.
    (old / "speedtorch" / "__init__.py").open("a").write("\ndel plan_rows\n")
    out = tmp_path / "runs.json"
    done = run_compare("--old", old, "--out", out, "--rounds", "1", "--stems", "plan_rows")
    runs = {run["library"]: run for run in json.loads(out.read_text())["runs"]}
    assert "has no attribute 'plan_rows'" in runs["old"]["error"]
    assert runs["new"]["error"] is None and len(runs["new"]["figures"]) > 2
    assert "new only" in done.stdout and "old plan_rows, round 0: " in done.stdout
