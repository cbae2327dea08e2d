"""Runs the benchmarks, then brings the pictures and README.md's tables up to date."""

from __future__ import annotations

import argparse
import importlib
import os

from tqdm import tqdm

from benchmarks import plots, report, tables, targets
from benchmarks.harness import RESULTS
from benchmarks.sizes import DEVICE


def main() -> None:
    """Runs the named benchmarks, all of them if none is named.

    With OUT set the results go to that folder, and README.md stays as it is.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("stems", nargs="*", help=f"of {', '.join(report.STEMS)}; all if none")
    parser.add_argument("--small", action="store_true", help="tiny sizes, on any CPU: a rehearsal")
    arguments = parser.parse_args()
    stems = arguments.stems or report.STEMS
    if unknown := set(stems) - set(report.STEMS):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(report.STEMS)}")
    if DEVICE == "cpu" and not arguments.small:
        raise SystemExit("benchmarks: no GPU here; they measure the link between the host and one")
    if arguments.small and "OUT" not in os.environ:
        raise SystemExit("benchmarks: --small needs a folder for its results in OUT")
    for stem in tqdm(stems, desc="benchmarks", unit="stem"):
        importlib.import_module(f"benchmarks.bench_{stem}").main()
    tables.release()
    print(targets.as_text(report.read_results()))
    plots.draw(report.read_results())
    if "OUT" not in os.environ:
        report.write_readme()
        print(f"results: {RESULTS}")


if __name__ == "__main__":
    main()
