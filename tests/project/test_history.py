"""The history of all figures: a row for each, added once, with nothing that was not measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import history
from benchmarks.harness import RESULTS, Figure, figure_of

MACHINE = {"date": "2026-11-21", "commit": "abc", "gpu": "none", "driver": "none", "torch": "2.11"}


def result_of(*figures: Figure, **machine: str) -> dict[str, Any]:
    facts = {"cuda": "none", **MACHINE, **machine}
    return {"stem": "cpu", "machine": facts, "figures": [asdict(figure) for figure in figures]}


BOUND = figure_of("gather", "memcpy", [2.0], kind="bound")
OURS = figure_of("gather", "ours", [3.0, 1.0, 5.0, 2.0, 4.0, 6.0], bound=BOUND, kind="ours")
PEER = figure_of("gather", "of 10 rows", [8.0], kind="FBGEMM")


def test_a_row_has_the_machine_the_work_and_the_times(tmp_path: Path) -> None:
    history.append(tmp_path / "history.csv", [result_of(BOUND, OURS, PEER)])
    lines = (tmp_path / "history.csv").read_text().splitlines()
    assert lines == [
        "date,commit,gpu,driver,torch,work,p20_ms,p50_ms,p80_ms,bound_ms,peer",
        "2026-11-21,abc,none,none,2.11,cpu: gather: memcpy,2,2,2,,",
        "2026-11-21,abc,none,none,2.11,cpu: gather: ours,2,3.5,5,2,",
        "2026-11-21,abc,none,none,2.11,cpu: gather: of 10 rows,8,8,8,,FBGEMM",
    ]


def test_results_add_their_rows_once_in_the_order_of_dates(tmp_path: Path) -> None:
    path, first = tmp_path / "history.csv", result_of(OURS)
    history.append(path, [first])
    later, latest = result_of(PEER, date="2026-11-23"), result_of(OURS, date="2026-11-24")
    history.append(path, [latest, first, later])
    history.append(path, [first, later])
    assert [row["date"][-2:] for row in history.read(path)] == ["21", "23", "24"]


def test_times_that_a_result_has_not_are_empty() -> None:
    result = result_of(OURS)
    del result["figures"][0]["p20_ms"], result["figures"][0]["p80_ms"]
    (row,) = history.rows_of(result)
    assert (row["p20_ms"], row["p50_ms"], row["p80_ms"]) == ("", "3.5", "")


@pytest.mark.parametrize(
    ("name", "kind", "peer"),
    [
        ("1 rows, torch copy", "torch copy", "torch copy"),
        ("FBGEMM, Adam", None, "FBGEMM, Adam"),
        ("torchao, CPUOffloadOptimizer", "others", "torchao, CPUOffloadOptimizer"),
        ("memcpy", "bound", ""),
        ("speedtorch, Adam", "ours", ""),
    ],
)
def test_a_peer_is_a_way_of_another_library(name: str, kind: str | None, peer: str) -> None:
    (row,) = history.rows_of(result_of(figure_of("step", name, [1.0], kind=kind)))
    assert row["peer"] == peer


def test_each_committed_result_is_in_the_committed_history() -> None:
    known = history.read(history.PATH)
    for path in RESULTS.glob("*.json"):
        rows = history.rows_of(json.loads(path.read_text()))
        missing = [row for row in rows if row not in known]
        assert missing == [], "`python -m benchmarks.report` adds them"
