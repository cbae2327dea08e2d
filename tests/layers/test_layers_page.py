"""The example of docs/layers.md runs, and what it saves is read by torch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn, optim
from warm_python import run_warm

import speedtorch

PAGE = Path(speedtorch.__file__).parents[1] / "docs" / "layers.md"


@pytest.mark.examples
def test_the_example_trains_and_saves(tmp_path: Path) -> None:
    modules, state = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert "found their module loaded" in run_warm("-c", modules, cwd=tmp_path).stdout
    assert "buckets" in run_warm("-c", state, cwd=tmp_path).stdout
    saved = torch.load(tmp_path / "layers.pt", map_location="cpu")
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    layers.load_state_dict(saved["model"])
    optimizer = optim.AdamW([*layers.parameters(), *nn.Linear(64, 1).parameters()])
    optimizer.load_state_dict(saved["optimizer"])
    assert all(float(optimizer.state[each]["step"]) == 5 for each in layers.parameters())
