"""Runs the stages of a report on a machine with GPUs, and writes the report.

`python -m benchmarks.gpu_report --stages suite-step-1,memcheck --jobs 2` runs these stages beside
each other. A stage that is green for this commit and this number of GPUs does not run again. A
subfolder of `--folder`, named after the commit, keeps a record and a log of each stage, so that
several calls make one report. Copy the records of other machines to that subfolder; `--stages ''`
reports them without running a stage. The report names the commit of each record. A report with all
stages, all green, replaces tests/gpu_report.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from benchmarks.harness import machine
from benchmarks.marked_text import replaced
from benchmarks.processes import ROOT

PAGE, CONTRIBUTING = ROOT / "tests/gpu_report.md", ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- gpu -->", "<!-- /gpu -->"
COUNTS = ("passed", "failed", "skipped")
_SUMMARY = re.compile(r"\d+ (?:passed|failed|skipped|error).* in \d+\.\d+s")
Record: TypeAlias = dict[str, Any]
"""Keys: stage, command, machine, gpus, visible, code, seconds, counts, rows, green, log."""


class Stage(NamedTuple):
    """A command and its time limit. `alone`: no other stage runs beside it, because it measures."""

    name: str
    command: tuple[str, ...]
    minutes: float
    runs_tests: bool = True
    alone: bool = False


_SMOKE = ("env", "OUT=build/gpu/benchmarks", sys.executable, "-m", "benchmarks", "--small")
_STEP = ("nn", "ops", "optim", "plan", "step")
_REST = sorted({file.parent.name for file in ROOT.glob("tests/*/test_*.py")} - {*_STEP})
# A stage of all tests would take longer than a stage may.
_PARTS = {
    part: "ARGS=" + " ".join(f"tests/{folder}" for folder in folders)
    for part, folders in (("step", _STEP), ("rest", _REST))
}
_STRESS = ("JOBS=8", f"HOURS={2.5 / 60:.4f}", "ARGS=--progress build/gpu/stress.json")
STAGES = (
    # The second continues with the outcomes of the first, and compares them.
    *(
        Stage(f"suite-{part}-{runs}", ("make", "flaky", f"N={runs}", folders), 10)
        for part, folders in _PARTS.items()
        for runs in (1, 2)
    ),
    Stage("memcheck", ("make", "memcheck"), 10),
    Stage("racecheck", ("make", "racecheck"), 10),
    Stage("initcheck", ("make", "initcheck"), 10),
    Stage("synccheck", ("make", "synccheck"), 10),
    Stage("soak", ("make", "soak", "SHARE=0.001"), 10),
    Stage("stress", ("make", "stress", *_STRESS), 10, False),
    Stage("benchmarks", _SMOKE, 10, False),
    Stage("rows", (sys.executable, "-m", "benchmarks.gather_rate"), 5, False, alone=True),
)


def run(stage: Stage, folder: Path, gpus: int, environment: dict[str, str], most: float) -> Record:
    """Runs a stage on this machine with `gpus` GPUs, for at most so many seconds; its record."""
    path = folder / f"{stage.name}-{gpus}.json"
    if path.exists() and (known := json.loads(path.read_text()))["green"]:
        return dict(known)
    log = path.with_suffix(".log")
    limit = ("timeout", "--signal=INT", "--kill-after=30", f"{min(stage.minutes * 60, most):g}")
    begin = time.monotonic()
    with log.open("w") as file:
        command = [*limit, *stage.command]
        env = {**os.environ, **environment}
        code = subprocess.run(command, cwd=ROOT, env=env, stdout=file, stderr=file).returncode
    seconds = time.monotonic() - begin
    lines = log.read_text(errors="replace").splitlines()
    summary = next((line for line in reversed(lines) if _SUMMARY.search(line)), "")
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", summary)}
    record = {
        "stage": stage.name,
        "command": " ".join(stage.command).replace(sys.executable, "python"),
        "machine": machine(),
        "gpus": gpus,
        "visible": environment["CUDA_VISIBLE_DEVICES"],
        "code": code,
        "seconds": round(seconds, 1),
        "counts": counts,
        "rows": [line for line in lines if line.startswith("rows")],
        # Without compute-sanitizer no test runs, and the exit code is 0.
        "green": code == 0 and (counts.get("passed", 0) > 0 or not stage.runs_tests),
        "log": log.name,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return record


def run_beside(chosen: Sequence[Stage], folder: Path, gpus: int, jobs: int, minutes: float) -> None:
    """Runs stages, `jobs` of them beside each other; none begins after so many minutes.

    The first GPU that a stage sees is another one than the next stage's: most tests use only that.
    Stages whose names differ in a last number run one after the other, and those that measure run
    alone in the end.
    """
    end = time.monotonic() + minutes * 60
    chains: defaultdict[str, list[Stage]] = defaultdict(list)
    for stage in chosen:
        if not stage.alone:
            chains[re.sub(r"-\d$", "", stage.name)].append(stage)
    given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    ids = given.split(",")[:gpus]
    share = len(os.sched_getaffinity(0)) // max(1, min(jobs, len(chains)))
    workers = os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS") or str(max(1, share))

    def run_chain(first: int, chain: Sequence[Stage]) -> None:
        visible = ",".join(ids[first:] + ids[:first])
        environment = {"CUDA_VISIBLE_DEVICES": visible, "PYTEST_XDIST_AUTO_NUM_WORKERS": workers}
        for stage in chain:
            if (most := end - time.monotonic()) > 0:
                record = run(stage, folder, gpus, environment, most)
                print(f"{stage.name}: exit code {record['code']}, {record['counts']}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run_chain, cycle(range(gpus)), chains.values()))
    run_chain(0, [stage for stage in chosen if stage.alone])


def machines(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each machine."""
    found: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        facts = record["machine"]
        versions = ", ".join(f"{name} {facts[name]}" for name in ("driver", "torch", "cuda"))
        found[f"{record['gpus']} x {facts['gpu']}, {versions}"].append(record)
    return dict(sorted(found.items()))


def report(records: Sequence[Record], name: str) -> str:
    """The report in Markdown."""
    dates = sorted({record["machine"]["date"] for record in records})
    parts = [
        "# Tests on GPUs",
        f"Commit {name}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}.",
    ]
    for name, found in machines(records).items():
        table = [f"| stage | command | exit code | {' | '.join(COUNTS)} | seconds | commit |"]
        table.append("|---|" + "---|" * (len(COUNTS) + 4))
        for record in found:
            counts = (str(record["counts"].get(count, "")) for count in COUNTS)
            cells = (record["stage"], f"`{record['command']}`", str(record["code"]), *counts)
            commit = record["machine"]["commit"]
            table.append(f"| {' | '.join(cells)} | {record['seconds']:.0f} | {commit} |")
        parts += [f"## {name}", "\n".join(table)]
        rates = [f"- {line}" for record in found for line in record["rows"]]
        parts += ["\n".join(rates)] if rates else []
    return "\n\n".join(parts) + "\n"


def main(
    names: Sequence[str],
    folder: Path,
    *,
    jobs: int = 1,
    minutes: float = float("inf"),
    stages: Sequence[Stage] = STAGES,
    page: Path = PAGE,
    contributing: Path = CONTRIBUTING,
) -> int:
    """Runs the named stages and writes the report; 1 if a recorded stage is not green."""
    gpus, commit = torch.cuda.device_count(), machine()["commit"]
    if names and not gpus:
        raise SystemExit("gpu_report: no GPU here; run the stages on a machine with one")
    if commit == "unknown":
        raise SystemExit("gpu_report: the commit is unknown; set SPEEDTORCH_COMMIT to its id")
    folder = folder / commit
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [stage for stage in stages if stage.name in names]
    run_beside(chosen, folder, gpus, jobs, minutes)
    order = [stage.name for stage in stages]
    records = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    records.sort(key=lambda record: order.index(record["stage"]))
    if not records:
        raise SystemExit(f"gpu_report: {folder} has no record of a stage; name stages to run")
    text = report(records, commit)
    (folder / "report.md").write_text(text)
    print(text)
    if not all(record["green"] for record in records):
        return 1
    if {record["stage"] for record in records} == set(order):
        page.write_text(text)
        link = f"The last green report: [commit {commit}]({page.relative_to(contributing.parent)})."
        contributing.write_text(replaced(contributing.read_text(), BEGIN, END, link))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_report", description=__doc__)
    known = [stage.name for stage in STAGES]
    parser.add_argument("--stages", default="all", help=f"of {', '.join(known)}; or all")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/gpu", help="of the records")
    parser.add_argument("--jobs", type=int, default=1, help="stages that run beside each other")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="of this call")
    arguments = parser.parse_args()
    chosen = known if arguments.stages == "all" else [*filter(None, arguments.stages.split(","))]
    if unknown := set(chosen) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    limits = {"jobs": arguments.jobs, "minutes": arguments.minutes}
    sys.exit(main(chosen, arguments.folder, **limits))
