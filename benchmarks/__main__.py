"""Runs the benchmarks, then brings the pictures and the documents' tables up to date."""

from __future__ import annotations

import argparse
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tqdm import tqdm

from benchmarks import plots, report, targets
from benchmarks.harness import RESULTS
from benchmarks.processes import STEMS, run_stem
from benchmarks.sizes import DEVICE


def main() -> None:
    """Runs the named benchmarks, all of them if none is named, one process after another.

    With OUT set the results go to that folder, and the documents stay as they are.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("stems", nargs="*", help=f"of {', '.join(STEMS)}; all if none")
    parser.add_argument("--small", action="store_true", help="tiny sizes, on any CPU: a rehearsal")
    arguments = parser.parse_args()
    stems = arguments.stems or STEMS
    if unknown := set(stems) - set(STEMS):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(STEMS)}")
    if DEVICE == "cpu" and not arguments.small:
        raise SystemExit("benchmarks: no GPU here; they measure the link between the host and one")
    if arguments.small and "OUT" not in os.environ:
        raise SystemExit("benchmarks: --small needs a folder for its results in OUT")
    known = {}
    if "OUT" in os.environ:
        known["OUT"] = str(Path(os.environ["OUT"]).resolve())
    if arguments.small:
        known |= {"SPEEDTORCH_BENCH_SIZES": "small", "OMP_NUM_THREADS": "1"}
    run = partial(run_stem, **known)
    # A rehearsal measures nothing: its benchmarks may disturb each other.
    with ThreadPoolExecutor(os.cpu_count() if arguments.small else 1) as pool:
        errors = dict(zip(stems, tqdm(pool.map(run, stems), "benchmarks", len(stems)), strict=True))
    failed = {stem: error for stem, error in errors.items() if error is not None}
    for stem, error in failed.items():
        print(f"benchmarks: {stem} failed: {error}", flush=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"host memory: {peak:.1f} GiB at most were resident for one benchmark")
    print(targets.as_text(report.read_results()))
    plots.draw(report.read_results())
    if failed:
        raise SystemExit(f"benchmarks: {', '.join(failed)} failed")
    if "OUT" not in os.environ:
        report.write_documents()
        print(f"results: {RESULTS}")


if __name__ == "__main__":
    main()
