"""The examples of docs/ops.md run, and its lists are those of the library."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from warm_python import run_warm

import speedtorch
from speedtorch.ops import functions

PAGE = Path(speedtorch.__file__).parents[1] / "docs" / "ops.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.examples
@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_an_example_runs(number: int, tmp_path: Path) -> None:
    if "torch.jit" in PROGRAMS[number] and sys.version_info >= (3, 14):
        pytest.skip("torch refuses TorchScript on Python 3.14")
    file = tmp_path / "example.py"  # torch.jit.script reads its source
    file.write_text(PROGRAMS[number])
    program = f"import runpy; runpy.run_path({str(file)!r}, run_name='__main__')"
    run_warm("-c", program, cwd=tmp_path)


def test_the_page_has_examples() -> None:
    assert len(PROGRAMS) == 3


def test_the_page_names_every_op_that_no_graph_can_hold() -> None:
    (named,) = re.findall(r"names them: (.*?)\. Without", PAGE.read_text(), re.DOTALL)
    assert re.findall(r"`(\w+)`", named) == list(functions._OF_THE_PROCESS)
