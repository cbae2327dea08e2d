"""What CONTRIBUTING.md, docs and CITATION.cff name is there, and says what the package says."""

from __future__ import annotations

import re

import pytest
from documents import ROOT

import speedtorch

# A file by its ending or a folder by its slash; one of a placeholder, `<op>`, is none.
ENDING = r"\.(?:py|cpp|cuh?|h|md|toml|cff)\b"
NAMED = re.compile(rf"(?<![\w<>/*.])[\w.]+(?:/[\w.]+)*(?:{ENDING}|/(?![\w<*]))")


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "docs/journeys.md"])
def test_every_file_named_is_there(document: str) -> None:
    text = (ROOT / document).read_text().partition("## Map")[0]  # which has a test of its own
    named = set(NAMED.findall(text))
    assert len(named) > 15
    missing = [
        name for name in named if not any((ROOT / at / name).exists() for at in ("", "speedtorch"))
    ]
    assert missing == []


def test_files_are_known_by_their_names() -> None:
    text = "`csrc/ops/<op>.cu`, `a/b.py`: c.cpp d/e.cuh, `tests/files/`: `x/y` and emb.table"
    assert NAMED.findall(text) == ["a/b.py", "c.cpp", "d/e.cuh", "tests/files/"]


def test_every_make_target_for_contributors_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document, some in {
        "CONTRIBUTING.md": {"check", "test", "nightly", "soak", "sanitize"},
        ".github/workflows/ci.yml": {"check", "test"},
        ".github/workflows/docs.yml": {"docs"},
        ".github/workflows/nightly.yml": {"nightly", "sanitize"},
        ".github/workflows/wheels.yml": {"wheel", "sdist"},
        "docs/releasing.md": {"wheel", "sdist"},
    }.items():
        named = set(re.findall(r"\bmake ([a-z]+)", (ROOT / document).read_text()))
        assert some <= named <= targets


def test_the_citation_is_of_this_version() -> None:
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    citation = dict(line.split(": ", 1) for line in lines if re.match(r"\w[\w-]*: ", line))
    project = (ROOT / "pyproject.toml").read_text()
    assert citation["version"] == speedtorch.__version__
    assert f'name = "{citation["title"]}"' in project
    assert f'license = "{citation["license"]}"' in project
    (author,) = re.findall(r"^  - name: (.*)$", "\n".join(lines), re.MULTILINE)
    assert f'authors = [{{ name = "{author}" }}]' in project
