"""The example of docs/layers.md runs, and what it saves is read by torch."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn, optim
from warm_python import warm_python

import speedtorch

PAGE = Path(speedtorch.__file__).parents[1] / "docs" / "layers.md"


def printed(program: str, folder: Path) -> str:
    done = subprocess.run(
        [warm_python(), "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PAGE.parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.examples
def test_the_example_trains_and_saves(tmp_path: Path) -> None:
    modules, state = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert "found their module loaded" in printed(modules, tmp_path)
    assert "buckets" in printed(state, tmp_path)
    saved = torch.load(tmp_path / "layers.pt", map_location="cpu")
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    layers.load_state_dict(saved["model"])
    optimizer = optim.AdamW([*layers.parameters(), *nn.Linear(64, 1).parameters()])
    optimizer.load_state_dict(saved["optimizer"])
    assert all(float(optimizer.state[each]["step"]) == 5 for each in layers.parameters())
