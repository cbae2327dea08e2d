"""Coverage: lines and branches of the package, and lines of csrc's host code, that tests run.

`python tests/covered.py package ARGUMENTS` runs pytest with these arguments and prints what of the
package no test has run, child processes included. `python tests/covered.py csrc ARGUMENTS` builds
the library in a folder of its own, for the CPU alone, and prints the lines of csrc that no test has
run. Each prints one line with its figures at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from sanitized import Sanitizer

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"


def package(*arguments: str) -> int:
    """Runs pytest with coverage; returns what it returned."""
    coverage = [sys.executable, "-m", "coverage"]
    os.environ["COVERAGE_FILE"] = str(BUILD / ".coverage")  # also for those in another folder
    subprocess.run([*coverage, "erase"], cwd=ROOT, check=True)
    code = subprocess.run([*coverage, "run", "-m", "pytest", *arguments], cwd=ROOT).returncode
    subprocess.run([*coverage, "combine", "--quiet"], cwd=ROOT, check=True)
    subprocess.run([*coverage, "report", "--show-missing"], cwd=ROOT, check=True)
    told = subprocess.check_output([*coverage, "json", "--quiet", "-o", "/dev/stdout"], cwd=ROOT)
    totals = json.loads(told)["totals"]
    lines = totals["covered_lines"] / totals["num_statements"]
    branches = totals["covered_branches"] / totals["num_branches"]
    print(f"package: {lines:.1%} of lines, {branches:.1%} of branches")
    return code


def csrc(*arguments: str) -> int:
    """Runs pytest with a library that counts its lines; returns what it returned."""
    counting = Sanitizer("coverage", "", {})
    for count in BUILD.glob("cpp.*-coverage/**/*.gcda"):
        count.unlink()
    pytest = [sys.executable, "-m", "pytest", *counting.prepared(), *arguments]
    code = subprocess.run(pytest, cwd=ROOT).returncode
    runs: defaultdict[tuple[str, int], int] = defaultdict(int)
    for counts in _counts():
        for file in counts["files"]:
            if (name := file["file"].removeprefix("./")).startswith("csrc/"):
                for line in file["lines"]:
                    runs[name, line["line_number"]] += line["count"]
    missing: defaultdict[str, list[str]] = defaultdict(list)
    for name, line in sorted(each for each, count in runs.items() if count == 0):
        missing[name].append(str(line))
    for name, lines in missing.items():
        print(f"{name}: {', '.join(lines)}")
    share = 1 - sum(map(len, missing.values())) / max(1, len(runs))
    print(f"csrc, host code without CUDA: {share:.1%} of {len(runs)} lines")
    return code


def _counts() -> Iterator[dict[str, list[dict[str, list[dict[str, int]]]]]]:
    """What gcov has counted, object by object."""
    gcov = shutil.which("gcov")
    if gcov is None:
        raise SystemExit("speedtorch: gcov is not installed")
    for count in sorted(BUILD.glob("cpp.*-coverage/**/*.gcda")):
        told = subprocess.check_output([gcov, "--json-format", "--stdout", str(count)], cwd=ROOT)
        yield from map(json.loads, told.splitlines())


if __name__ == "__main__":
    sys.exit({"package": package, "csrc": csrc}[sys.argv[1]](*sys.argv[2:]))
