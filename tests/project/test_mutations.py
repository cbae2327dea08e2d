"""Faults drawn at random: the same for a seed, spread over subpackages, with their near tests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from mutants import PACKAGE
from mutations import ROOT, Fault, draw, nearest_tests


@pytest.fixture(scope="module")
def faults() -> list[Fault]:
    return draw(5, 40)


def test_a_seed_draws_the_same_distinct_faults_again(faults: list[Fault]) -> None:
    assert draw(5, 40) == faults and draw(6, 40) != faults
    assert len({(fault.file, fault.line, fault.after) for fault in faults}) == 40


def test_each_subpackage_has_as_many_faults(faults: list[Fault]) -> None:
    counts = Counter(Path(fault.file).parent.name for fault in faults if "csrc" not in fault.file)
    assert counts == {path.parent.name: 3 for path in PACKAGE.glob("*/__init__.py")}


def test_a_fault_changes_one_line_to_what_compiles(faults: list[Fault]) -> None:
    for fault in faults:
        lines = (ROOT / fault.file).read_text().splitlines()
        assert lines[fault.line - 1] == fault.before != fault.after
        if fault.file.endswith(".py"):
            lines[fault.line - 1] = fault.after
            assert fault.mutant().changed(PACKAGE).splitlines() == lines


def test_a_draw_that_changes_no_behaviour_is_replaced_by_the_next(faults: list[Fault]) -> None:
    replaced = frozenset({"step-2"})
    names = {fault.name for fault in faults}
    assert {fault.name for fault in draw(5, 40, replaced)} == names - replaced | {"step-4"}


def test_tests_with_the_modules_name_are_first(faults: list[Fault]) -> None:
    fault = Fault("table-1", "shift", "speedtorch/table/record_layout.py", 1, "", "")
    order, near = nearest_tests(fault)
    assert order[0] == "tests/table/test_record_layout.py" and 0 < near < len(order)
    for fault in faults:
        assert all((ROOT / name).is_file() for name in nearest_tests(fault)[0])
