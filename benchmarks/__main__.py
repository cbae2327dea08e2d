"""`python -m benchmarks [stem ...]`: runs them, then brings README.md's tables up to date."""

from __future__ import annotations

import argparse
import importlib

import torch

from benchmarks import report


def main() -> None:
    """Runs the named benchmarks, all of them if none is named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("stems", nargs="*", help=f"of {', '.join(report.STEMS)}; all if none")
    stems = parser.parse_args().stems or report.STEMS
    if unknown := set(stems) - set(report.STEMS):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(report.STEMS)}")
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks: no GPU here; they measure the link between the host and one")
    for stem in stems:
        print(f"\n{stem}", flush=True)
        importlib.import_module(f"benchmarks.bench_{stem}").main()
    report.write_readme()


if __name__ == "__main__":
    main()
