"""The history of all figures: results/history.csv, to which each result adds its rows once."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.compare import names_of, peer_of
from benchmarks.harness import RESULTS

PATH = RESULTS / "history.csv"
COLUMNS = (
    *("date", "commit", "gpu", "driver", "torch", "work"),
    *("p20_ms", "p50_ms", "p80_ms", "bound_ms", "peer"),
)
"""`peer` names the way of another library that a row measures; an unknown value is empty."""


def rows_of(result: dict[str, Any]) -> Iterator[dict[str, str]]:
    """A row for each figure of a benchmark's result."""
    for name, figure in zip(names_of(result), result["figures"], strict=True):
        share = figure["share_of_bound"]
        times = {
            "p20_ms": figure.get("p20_ms"),
            "p50_ms": figure["median_ms"],
            "p80_ms": figure.get("p80_ms"),
            "bound_ms": share and share * figure["median_ms"],
        }
        yield {
            **{column: result["machine"][column] for column in COLUMNS[:5]},
            "work": f"{result['stem']}: {name}",
            **{column: f"{time:.6g}" if time else "" for column, time in times.items()},
            "peer": peer_of(figure),
        }


def read(path: Path) -> list[dict[str, str]]:
    """The rows that a history has."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, results: Iterable[dict[str, Any]]) -> None:
    """Adds the rows that the history has not, in the order of their dates."""
    known = read(path)
    rows = [row for result in results for row in rows_of(result) if row not in known]
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not known:
            writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: row["date"]))
