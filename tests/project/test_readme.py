"""README.md is short, what it shows runs, and what it names is there."""

from __future__ import annotations

import re

import pytest
from documents import README, ROOT, blocks

TEXT = README.read_text()
LINES, COLUMNS, WORDS = 200, 100, 1500


def test_it_is_read_in_a_few_minutes() -> None:
    lines = TEXT.splitlines()
    made = TEXT.partition("<!-- steps -->")[2].partition("<!-- /steps -->")[0].splitlines()
    assert len(lines) <= LINES
    assert len(TEXT.split()) <= WORDS
    assert [line for line in lines if len(line) > COLUMNS and line not in made] == []


def test_the_first_example_has_fifteen_lines_at_most() -> None:
    (first,) = blocks(README, "python")
    assert len(first.text.splitlines()) <= 15


def test_every_make_target_named_is_one() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)(?= +#|`)", TEXT))
    assert {"demo", "test"} <= named <= targets


@pytest.mark.parametrize("begin", ["<!-- steps -->"])
def test_the_markers_that_the_benchmarks_fill_stand_once_and_in_order(begin: str) -> None:
    end = begin.replace("<!-- ", "<!-- /")
    assert TEXT.count(begin) == TEXT.count(end) == 1
    assert TEXT.index(begin) < TEXT.index(end)
