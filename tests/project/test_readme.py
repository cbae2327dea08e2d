"""What README.md shows runs, and what it names is there."""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path

import pytest
import torch
from readme import README, Block, blocks
from warm_python import warm_python

import speedtorch

ROOT = README.parent
TEXT = README.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: f"line-{block.line}")
def test_a_block_of_python_runs_by_itself(block: Block, tmp_path: Path) -> None:
    if block.needs_gpu and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{block.text}"
    done = subprocess.run(
        [warm_python(), "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_first_example_has_twelve_lines_at_most() -> None:
    assert len(blocks("python")[0].text.splitlines()) <= 12


def test_every_make_target_named_is_one() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)(?= +#|`)", TEXT))
    assert {"demo", "test"} <= named <= targets


def test_every_file_of_the_map_is_there() -> None:
    tree = TEXT.partition("## Map")[2].partition("```\n")[2].partition("```")[0]
    above = place = ROOT
    named = set()
    for line in tree.splitlines():
        depth, (name, *told) = len(line) - len(line.lstrip()), line.split()
        if depth > 2:  # more about the line before
            told.insert(0, name)
        else:
            above = above if depth else ROOT / name
            place = above / name if depth else above
            assert place.exists(), name
            named.add(place)
        for file in re.findall(r"\b\w+\.py\b", " ".join(told)):
            assert (place / file).exists(), f"{file} is not in {place}"
    sources = [*(ROOT / "speedtorch").rglob("*.py"), *(ROOT / "csrc").rglob("*.*")]
    assert {file.parent for file in sources} <= named


def test_every_function_of_the_ops_block_has_the_signature_shown() -> None:
    block = TEXT.partition("## Ops")[2].partition("```\n")[2].partition("```")[0]
    for line in block.splitlines():
        name, _, rest = line.partition("(")
        arguments = re.findall(r"(\w+)(?:=[^,)]*)?(?=[,)])", rest.partition(" ->")[0])
        assert list(inspect.signature(getattr(speedtorch, name)).parameters) == arguments


def test_the_markers_that_the_benchmarks_fill_stand_once_and_in_order() -> None:
    assert TEXT.count("<!-- bench -->") == TEXT.count("<!-- /bench -->") == 1
    assert TEXT.index("<!-- bench -->") < TEXT.index("<!-- /bench -->")
