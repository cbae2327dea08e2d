"""Figures that are written by hand in tables are those of benchmarks/results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from documents import PAGES, README, ROOT

FILES = (ROOT / "benchmarks" / "results").glob("*.json")
RESULTS = {file.stem: json.loads(file.read_text()) for file in FILES}
GENERATED = re.compile(r"<!-- (\w+) -->.*?<!-- /\1 -->", re.DOTALL)


class Section(NamedTuple):
    """The text below a heading, without generated tables."""

    prose: str
    rows: list[str]

    @property
    def stems(self) -> list[str]:
        """The benchmarks whose files the prose names."""
        named = re.findall(r"`(?:benchmarks/results/)?(\w+)\.json`", self.prose)
        return [stem for stem in named if stem in RESULTS]

    def stems_of(self, row: str) -> list[str]:
        """The benchmarks that a row names, as in (`word2vec`), or else those of the section."""
        return [stem for stem in re.findall(r"\(`(\w+)`\)", row) if stem in RESULTS] or self.stems


def sections(document: Path) -> Iterator[Section]:
    text = GENERATED.sub("", document.read_text())
    for part in re.split(r"^#+ .*$", text, flags=re.MULTILINE):
        lines = part.splitlines()
        rows = [line for line in lines if line.startswith("|")]
        yield Section("\n".join(line for line in lines if line not in rows), rows)


def figures(stem: str) -> list[float]:
    """Milliseconds, seconds and GB/s of a benchmark."""
    found = RESULTS[stem]["figures"]
    times = [figure["median_ms"] for figure in found]
    return [*times, *(ms / 1e3 for ms in times), *(each["gigabytes_per_s"] for each in found)]


@pytest.mark.parametrize("document", [README, *PAGES], ids=lambda document: document.stem)
def test_figures_of_tables_are_rounded_results(document: Path) -> None:
    for section in sections(document):
        for row in section.rows:
            known = [figure for stem in section.stems_of(row) for figure in figures(stem)]
            shown = re.findall(r"(?<=\| )\d[\d,]*\.\d+|\d+\.\d+(?= (?:ms|GB/s))", row)
            for text in shown if known else ():
                digits = len(text.partition(".")[2])
                rounded = {round(figure, digits) for figure in known}
                assert float(text.replace(",", "")) in rounded, f"{text} in {row}"


@pytest.mark.parametrize("document", [README, *PAGES], ids=lambda document: document.stem)
def test_dates_of_tables_are_those_of_the_results(document: Path) -> None:
    for section in sections(document):
        dates = {RESULTS[stem]["machine"]["date"] for stem in section.stems}
        shown = set(re.findall(r"\d{4}-\d\d-\d\d", section.prose))
        assert not dates or shown <= dates, section.prose


def test_pages_with_figures_are_found() -> None:
    pages = (README, *PAGES)
    found = {
        page.stem for page in pages for part in sections(page) if any(map(part.stems_of, part.rows))
    }
    assert {"README", "cache", "collections", "layers", "performance", "prefetch"} <= found
