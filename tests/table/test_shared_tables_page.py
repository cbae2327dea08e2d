"""The examples of docs/shared_tables.md run, each as the file of a program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT, Block, blocks

EXAMPLES = blocks(ROOT / "docs" / "shared_tables.md", "python")


@pytest.mark.examples
@pytest.mark.parametrize("block", EXAMPLES, ids=str)
def test_an_example_runs(block: Block, tmp_path: Path) -> None:
    # Processes that it spawns read the file again.
    (tmp_path / "example.py").write_text(block.text)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
