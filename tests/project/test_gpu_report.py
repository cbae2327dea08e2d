"""Reports of runs on GPUs: assembled from several calls, and green only if each stage is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gather_rate, gpu_report
from benchmarks.gpu_report import CONTRIBUTING, ROOT, STAGES, Stage
from benchmarks.marked_text import between

MACHINE = {"gpu": "NVIDIA X", "driver": "1", "torch": "2", "cuda": "3", "date": "2026-11-29"}


class Report:
    """A folder, a page and a list of contributors' rules, with fake stages and a fake machine."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.records, self.page = folder / "records", folder / "gpu_report.md"
        self.contributing, self._monkeypatch = folder / "CONTRIBUTING.md", monkeypatch
        self.contributing.write_text(f"{gpu_report.BEGIN}\nnone\n{gpu_report.END}\n")
        self.move_to(1)

    def move_to(self, gpus: int, commit: str = "abc") -> None:
        """Another machine."""
        facts = {**MACHINE, "commit": commit}
        self._monkeypatch.setattr(gpu_report, "machine", lambda: facts)
        self._monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)

    def make(self, *names: str, **commands: str) -> int:
        """Runs the named stages; `commands` has the shell line of every stage."""
        return self.make_beside(1, float("inf"), names, commands)

    def make_beside(
        self, jobs: int, minutes: float, names: Sequence[str], commands: dict[str, str]
    ) -> int:
        """Runs so many stages beside each other."""
        stages = [
            Stage(
                name,
                ("sh", "-c", line),
                0.01 if name == "slow" else 1,
                runs_tests=name != "rows",
                alone=name == "rows",
            )
            for name, line in commands.items()
        ]
        return gpu_report.main(
            names,
            self.records,
            jobs=jobs,
            minutes=minutes,
            stages=stages,
            page=self.page,
            contributing=self.contributing,
        )

    def record(self, name: str) -> dict[str, Any]:
        """The record of a stage."""
        found: dict[str, Any] = json.loads((self.records / "abc" / f"{name}.json").read_text())
        return found


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    return Report(tmp_path, monkeypatch)


def test_calls_on_several_machines_make_one_report(report: Report, tmp_path: Path) -> None:
    count = tmp_path / "count"
    green = f"echo x >> {count}; echo '== 3 passed, 1 skipped in 0.10s (0:00:00) =='"
    commands = {"suite": green, "rows": "echo rows: 5.0 million a second on 2 GPUs"}
    assert report.make("suite", **commands) == 0
    assert report.make("suite", **commands) == 0  # is green, and does not run again
    assert count.read_text() == "x\n"
    assert not report.page.exists() and "none" in report.contributing.read_text()
    report.move_to(2)
    assert report.make("rows", **commands) == 0
    report.move_to(0)
    assert report.make(**commands) == 0
    lines = report.page.read_text().splitlines()
    assert lines[:3] == ["# Tests on GPUs", "", "Commit abc, 2026-11-29."]
    assert lines[4] == "## 1 x NVIDIA X, driver 1, torch 2, cuda 3"
    assert lines[8].startswith("| suite | `sh -c echo x")
    assert lines[8].endswith(" | 0 | 3 |  | 1 | 0 | abc |")
    assert lines[10] == "## 2 x NVIDIA X, driver 1, torch 2, cuda 3"
    assert lines[-1] == "- rows: 5.0 million a second on 2 GPUs"
    link = between(report.contributing.read_text(), gpu_report.BEGIN, gpu_report.END)
    assert link == "The last green report: [commit abc](gpu_report.md)."


def test_a_copied_record_keeps_its_commit_in_the_report(report: Report) -> None:
    commands = {"suite": "echo '3 passed in 0.10s'", "rows": "true"}
    report.make("suite", **commands)
    report.move_to(1, "def")
    report.make("rows", **commands)
    shutil.copy(report.records / "abc/suite-1.json", report.records / "def")
    assert report.make(**commands) == 0
    lines = report.page.read_text().splitlines()
    assert [line.rsplit("| ", 1)[1] for line in lines[8:10]] == ["abc |", "def |"]


def test_a_stage_that_fails_runs_again_and_replaces_no_report(report: Report) -> None:
    report.page.write_text("the last green one")
    failing = "echo '1 failed, 2 passed in 0.10s'; exit 1"
    assert report.make("suite", suite=failing) == 1
    assert report.record("suite-1")["counts"] == {"failed": 1, "passed": 2}
    assert report.page.read_text() == "the last green one"
    assert "| 1 | 2 | 1 |" in (report.records / "abc" / "report.md").read_text()
    assert report.make("suite", suite="echo '3 passed in 0.10s'") == 0
    assert report.page.read_text().startswith("# Tests on GPUs")


@pytest.mark.parametrize(
    ("line", "code"),
    [("echo no test ran: compute-sanitizer is not installed", 0), ("sleep 30", 124)],
)
def test_a_stage_without_tests_or_without_end_is_not_green(
    report: Report, line: str, code: int
) -> None:
    assert report.make("slow", slow=line) == 1
    assert report.record("slow-1")["code"] == code
    assert not report.page.exists()


PASSED = "echo '1 passed in 0.10s'"


def test_stages_beside_each_other_see_another_gpu_first(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "7")
    report.move_to(2)
    tell = 'echo "rows $CUDA_VISIBLE_DEVICES, $PYTEST_XDIST_AUTO_NUM_WORKERS"'
    meet = "touch {0}; until test -e {1}; do sleep 0.05; done; sleep 0.2; touch {0}-ended"
    both = (("memcheck", "racecheck"), ("racecheck", "memcheck"))
    commands = {"rows": f"cd {tmp_path}; test -e memcheck-ended && test -e racecheck-ended"}
    for pair in both:
        commands[pair[0]] = f"cd {tmp_path}; {meet.format(*pair)}; {tell}; {PASSED}"
    assert report.make_beside(3, 1, [*commands], commands) == 0  # rows begins when all have ended
    found = [report.record(f"{name}-2") for name in ("memcheck", "racecheck", "rows")]
    assert [record["visible"] for record in found] == ["0,1", "1,0", "0,1"]
    assert [record["rows"] for record in found[:2]] == [["rows 0,1, 7"], ["rows 1,0, 7"]]
    assert {record["gpus"] for record in found} == {2}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-3")
    named = dict.fromkeys(("initcheck", "synccheck", "soak"), f"{tell}; {PASSED}")
    report.make_beside(1, 1, [*named], {**commands, **named})
    visible = [report.record(f"{name}-2")["visible"] for name in named]
    assert visible == ["5,GPU-3", "GPU-3,5", "5,GPU-3"]


def test_stages_beside_each_other_share_the_cores(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    commands = dict.fromkeys("abcd", f"echo rows $PYTEST_XDIST_AUTO_NUM_WORKERS; {PASSED}")
    for jobs, names, share in ((1, "a", 32), (3, "bc", 16), (40, "d", 32)):
        report.make_beside(jobs, 1, names, commands)
        assert [report.record(f"{name}-1")["rows"] for name in names] == [
            [f"rows {share}"] for _ in names
        ]


def test_the_second_run_of_a_half_waits_for_the_first(report: Report, tmp_path: Path) -> None:
    commands = {
        "suite-step-1": f"sleep 0.3; touch {tmp_path}/first; {PASSED}",
        "suite-step-2": f"test -e {tmp_path}/first && {PASSED}",
    }
    assert report.make_beside(2, 1, [*commands], commands) == 0


def test_stages_end_with_the_minutes_of_the_call(report: Report) -> None:
    commands = {"suite-step-1": "sleep 30", "suite-step-2": PASSED}
    assert report.make_beside(2, 0.01, [*commands], commands) == 1
    assert report.record("suite-step-1-1")["code"] == 124
    assert not (report.records / "abc" / "suite-step-2-1.json").exists()


def test_records_of_another_commit_are_not_in_the_report(report: Report) -> None:
    green = "echo '3 passed in 0.10s'"
    report.make("suite", suite=green, rows="true")
    report.move_to(1, "def")
    assert report.make("rows", suite=green, rows="true") == 0
    assert not report.page.exists()


@pytest.mark.parametrize(
    ("gpus", "commit", "names", "message"),
    [
        (0, "abc", ("suite",), "no GPU here; run the stages on a machine with one"),
        (1, "unknown", ("suite",), "the commit is unknown; set SPEEDTORCH_COMMIT"),
    ],
)
def test_a_machine_that_cannot_run_stages_changes_nothing(
    report: Report, gpus: int, commit: str, names: tuple[str, ...], message: str
) -> None:
    report.move_to(gpus, commit)
    with pytest.raises(SystemExit, match=message):
        report.make(*names, suite="echo '3 passed in 0.10s'")
    assert not report.records.exists() and not report.page.exists()


def test_a_report_needs_a_record(report: Report) -> None:
    with pytest.raises(SystemExit, match=r"abc has no record of a stage; name stages to run"):
        report.make(suite="true")


def folders_of(kind: str) -> list[str]:
    """The folders that the stages of a kind run, as often as they run them."""
    commands = [" ".join(stage.command) for stage in STAGES if stage.name.startswith(kind)]
    return sorted(folder for command in commands for folder in re.findall(r"tests/(\w+)", command))


def test_the_stages_of_the_suite_run_each_folder_twice() -> None:
    every = sorted({file.parent.name for file in (ROOT / "tests").rglob("test_*.py")})
    assert folders_of("suite") == sorted(2 * every)


def test_a_second_run_in_random_order_continues_the_first() -> None:
    commands = {stage.name: stage.command for stage in STAGES}
    for part in ("step", "rest"):
        first, second = (commands[f"suite-{part}-{runs}"] for runs in (1, 2))
        assert [a for a, b in zip(first, second, strict=True) if a != b] == ["N=1"]


def test_the_processes_of_the_stress_test_run_for_20_minutes() -> None:
    (stage,) = (stage for stage in STAGES if stage.name == "stress")
    given = dict(part.split("=") for part in stage.command if re.match("[A-Z]+=[^-]", part))
    assert float(given["JOBS"]) * float(given["HOURS"]) * 60 == pytest.approx(20, abs=0.1)
    assert float(given["HOURS"]) * 60 < stage.minutes <= 10


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_each_stage_is_a_command_that_exists() -> None:
    for stage in STAGES:
        if stage.command[0] == "make":
            command = ["make", "-n", *stage.command[1:]]
            assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
        else:
            module = stage.command[stage.command.index("-m") + 1].replace(".", "/")
            assert any((ROOT / f"{module}{end}").is_file() for end in (".py", "/__main__.py"))


def test_the_contributors_rules_have_a_place_for_the_link() -> None:
    assert between(CONTRIBUTING.read_text(), gpu_report.BEGIN, gpu_report.END)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="its sizes are those of a benchmark there")
def test_processes_that_gather_at_once_have_a_rate_each() -> None:
    found = gather_rate.rates(2)
    assert len(found) == 2 and all(rate > 0 for rate in found)
    assert gather_rate.line_of([5e6, 6.25e6]) == "rows: 5.0, 6.2 million a second on 2 GPUs"
