"""The example of docs/several_gpus.md runs as the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from documents import ROOT
from warm_python import run_warm

import speedtorch

PROCESSES = ["--nproc-per-node", "2"]
PAGE = ROOT / "docs" / "several_gpus.md"


@pytest.mark.examples
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_example_trains_and_saves_all_rows(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    hidden = {} if torch.cuda.device_count() > 1 else {"CUDA_VISIBLE_DEVICES": ""}
    command = ("-m", "torch.distributed.run", "--standalone", *PROCESSES, "-m", "train")
    run_warm(*command, cwd=tmp_path, OMP_NUM_THREADS="1", **hidden)
    torch.manual_seed(12345)
    module = speedtorch.EmbeddingBag(100_000, 16, mode="sum")
    first = module.table["weight"].clone()
    state = {"model": {"items.weight": module.state_dict()["weight"]}}
    checkpoint.load(state, checkpoint_id=tmp_path / "checkpoint")
    module.load_state_dict({"weight": state["model"]["items.weight"]})
    loaded = module.table["weight"]
    assert bool(loaded.isfinite().all()) and not bool((loaded == first).all(1).any())
