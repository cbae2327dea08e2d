"""The example of docs/collections.md runs and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "collections.md"


def test_the_example_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(program, PAGE.name, "exec"), {})
    said = re.findall(r"^print.*\n# (.*)$", program, re.MULTILINE)
    assert len(said) == 3
    assert capsys.readouterr().out.splitlines() == said
