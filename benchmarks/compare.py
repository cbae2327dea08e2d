"""Two checkouts of the library against each other: the same benchmarks, stem by stem, in turns.

    python -m benchmarks.compare --old /path/to/old/checkout --out comparison.json

Each stem runs in every round with the old and the new library at once, in two processes that take
turns at each repetition: what the machine does beside them changes from second to second. Both see
the benchmarks of this checkout. Whose memory comes first alternates from round to round, because it
is the better: an even number of rounds is fair. A figure counts as worse where the median over the
rounds is more than 3 % above the old one's, and above every old round. What is done stands in the
JSON file at once: cut short, the same call goes on where it was.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT, STEMS, commit_of, run_stem

LIBRARIES = ("old", "new")
TOLERANCE = 1.03
OTHERS = ("torch", "cupy", "fbgemm")
# Beside ways of others what bounds ours: they tell how much the machine itself has changed.
BOUNDS = ("bound", "alone")

Run = dict[str, Any]
"""What one process did: stem, round, library, seconds, figures by name, error."""


@dataclass(frozen=True)
class Line:
    """A figure of both libraries, over all rounds."""

    stem: str
    figure: str
    old_ms: list[float]
    new_ms: list[float]
    peer: bool

    @property
    def verdict(self) -> str:
        """Worse and better only beyond both the tolerance and the old library's own spread."""
        if not self.old_ms:
            return "new only"
        if not self.new_ms:
            return "MISSING"
        old, new = statistics.median(self.old_ms), statistics.median(self.new_ms)
        if new / old > TOLERANCE and new > max(self.old_ms):
            return "not ours: slower" if self.peer else "WORSE"
        if new / old < 1 / TOLERANCE and new < min(self.old_ms):
            return "not ours: faster" if self.peer else "better"
        return "as before"


def names_of(result: dict[str, Any]) -> list[str]:
    """A name for each figure of the result, which no other of its figures has."""
    names: list[str] = []
    for each in result["figures"]:
        # Numbers that were measured cannot name a figure.
        known = {k: v for k, v in each["parameters"].items() if not isinstance(v, float)}
        name = f"{each['section']}: {each['name']}"
        if name in names or each["section"].startswith("curve"):
            name += "".join(f", {key} {value}" for key, value in known.items() if key != "kind")
        names.append(name)
    return names


def peer_of(figure: dict[str, Any]) -> str:
    """The way of another library that a figure measures; empty for a way of ours."""
    ways = (str(figure["parameters"].get("kind", "")), figure["name"])
    return next((way for way in ways if way.lower().startswith(OTHERS)), "")


def figures_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Milliseconds by a name that no other figure of the result has."""
    figures: dict[str, dict[str, Any]] = {}
    for name, each in zip(names_of(result), result["figures"], strict=True):
        kind = str(each["parameters"].get("kind", ""))
        peer = kind.startswith(BOUNDS) or bool(peer_of(each))
        figures[name] = {"ms": each["median_ms"], "peer": peer}
        if "issued_us" in each["parameters"]:
            issued = each["parameters"]["issued_us"] / 1e3
            figures[f"{name}, issued"] = {"ms": issued, "peer": peer}
    for name, facts in result["extra"].items():
        if isinstance(facts, dict) and "seconds" in facts:
            figures[name] = {"ms": facts["seconds"] * 1e3, "peer": name.startswith(OTHERS)}
    return figures


def lines_of(runs: Sequence[Run]) -> list[Line]:
    """Every figure once, those that matter first."""
    known: dict[tuple[str, str], Line] = {}
    for run in runs:
        for figure, told in run["figures"].items():
            fresh = Line(run["stem"], figure, [], [], told["peer"])
            line = known.setdefault((run["stem"], figure), fresh)
            (line.old_ms if run["library"] == "old" else line.new_ms).append(told["ms"])
    ranks = {"WORSE": 0, "MISSING": 1}
    return sorted(known.values(), key=lambda line: (ranks.get(line.verdict, 2), line.peer))


def as_text(runs: Sequence[Run]) -> str:
    """A table of all figures, and what to know of the whole."""
    rows = [
        "| stem | figure | old, ms | lowest to highest | new, ms | new / old | |",
        "|---|---|---|---|---|---|---|",
    ]
    lines = lines_of(runs)
    for line in lines:
        old, new = (statistics.median(each or [0]) for each in (line.old_ms, line.new_ms))
        spread = f"{min(line.old_ms):.4g} to {max(line.old_ms):.4g}" if old else ""
        ratio = f"{new / old:.3f}" if old and new else ""
        middles = [f"{each:.4g}" if each else "" for each in (old, new)]
        told = (line.stem, line.figure, middles[0], spread, middles[1], ratio, line.verdict)
        rows.append(f"| {' | '.join(told)} |")
    failed = [
        f"{run['library']} {run['stem']}, round {run['round']}: {run['error']}"
        for run in runs
        if run["error"]
    ]
    told = [line.verdict for line in lines]
    rows += ["", f"{told.count('WORSE')} of {len(lines)} figures worse, {len(failed)} runs failed."]
    return "\n".join([*rows, *failed])


def folder_of(library: Path, where: Path) -> Path:
    """A folder in which `speedtorch` is this library and `benchmarks` are those of here."""
    package = library / "speedtorch"
    if not list(package.glob("_C*.so")):
        raise SystemExit(
            f"compare: {package} has no built library; run `python setup.py build_ext --inplace`"
            f" in {library}"
        )
    where.mkdir()
    (where / "speedtorch").symlink_to(package.resolve())
    (where / "benchmarks").symlink_to((ROOT / "benchmarks").resolve())
    ask = "import speedtorch; print(speedtorch.__file__)"
    known = {**os.environ, "PYTHONPATH": str(where)}
    told = subprocess.run(
        [sys.executable, "-c", ask], cwd=where, env=known, capture_output=True, text=True
    )
    if told.stdout.strip() != str(where / "speedtorch" / "__init__.py"):
        raise SystemExit(f"compare: {library} is not what is imported: {told.stdout}{told.stderr}")
    return where


def one_round(folders: Sequence[Path], sizes: str, stem: str, first: int) -> list[dict[str, Any]]:
    """Figures, error and seconds of a stem in both folders, with uncalibrated paths, in turns."""

    def run(folder: Path, other: socket.socket) -> dict[str, Any]:
        begin = time.monotonic()
        known = {"SPEEDTORCH_BENCH_SIZES": sizes, "SPEEDTORCH_CALIBRATE": "0"}
        known["SPEEDTORCH_BENCH_OTHER"] = str(other.fileno())
        with other, tempfile.TemporaryDirectory() as out:
            known |= {"OUT": out, "XDG_CACHE_HOME": out}
            error = run_stem(stem, folder, quiet=True, sockets=[other.fileno()], **known)
            result = "{}" if error else (Path(out) / f"{stem}.json").read_text()
        figures = {} if error else figures_of(json.loads(result))
        return {"figures": figures, "error": error, "seconds": time.monotonic() - begin}

    ends = socket.socketpair()
    ends[1 - first].send(b".")
    with ThreadPoolExecutor() as both:
        return list(both.map(run, folders, ends))


def compare(
    path: Path,
    about: dict[str, Any],
    wanted: Iterable[tuple[str, int]],
    run: Callable[[str, int], Sequence[dict[str, Any]]],
    seconds: float = math.inf,
) -> bool:
    """Does of the wanted (stem, round) what is not in the JSON file yet; whether all is done.

    `run` is called with the stem and which library begins. None begins that would last beyond
    `seconds`, by the longest of its stem so far. `about` stands in the file beside the runs.
    """
    begin = time.monotonic()
    runs: list[Run] = json.loads(path.read_text())["runs"] if path.exists() else []
    done = {(each["stem"], each["round"]) for each in runs}
    for stem, number in wanted:
        if (stem, number) in done:
            continue
        longest = max((each["seconds"] for each in runs if each["stem"] == stem), default=0.0)
        if time.monotonic() - begin + longest > seconds:
            return False
        for library, told in zip(LIBRARIES, run(stem, number % 2), strict=True):
            runs.append({"stem": stem, "round": number, "library": library, **told})
        fresh = path.with_suffix(".partial")  # then it is replaced as a whole
        fresh.write_text(json.dumps({**about, "runs": runs}, indent=1) + "\n")
        fresh.replace(path)
        path.with_suffix(".md").write_text(as_text(runs) + "\n")
        print(f"{stem}, round {number + 1}: {runs[-1]['seconds']:.1f} s", flush=True)
    return True


def main() -> None:
    """Compares two libraries, and fails if one figure got worse."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--old", type=Path, required=True, help="a checkout, built in place")
    parser.add_argument("--new", type=Path, default=ROOT, help="another; this one if not given")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file, of this or of an"
                        " earlier call that was cut short; a table goes beside it")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--stems", nargs="+", choices=STEMS, default=STEMS, metavar="STEM")
    parser.add_argument("--quick", action="store_true", help="tables that fit in 64 GiB twice")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round beyond")
    given = parser.parse_args()
    sizes = "quick" if given.quick else "full"
    roots = dict(zip(LIBRARIES, (given.old, given.new), strict=True))
    about: dict[str, Any] = {"sizes": sizes}
    about |= {name: {"path": str(r), "commit": commit_of(r)} for name, r in roots.items()}
    if given.out.exists() and json.loads(given.out.read_text())["sizes"] != sizes:
        raise SystemExit(f"compare: {given.out} holds runs of other sizes; choose another --out")
    with tempfile.TemporaryDirectory() as scratch:
        folders = [folder_of(root, Path(scratch) / name) for name, root in roots.items()]
        wanted = itertools.product(given.stems, range(given.rounds))
        run = partial(one_round, folders, sizes)
        finished = compare(given.out, about, wanted, run, given.seconds)
    runs = json.loads(given.out.read_text())["runs"] if given.out.exists() else []
    print(as_text(runs))
    if not finished:
        raise SystemExit("compare: not all is done; the same call goes on")
    if any(line.verdict in ("WORSE", "MISSING") for line in lines_of(runs)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
