"""The examples of docs/examples train as plain torch does, on one rank or two."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from documents import ROOT

FOLDER = ROOT / "docs" / "examples"
pytestmark = pytest.mark.slow


def example(name: str) -> Any:
    """The module of that file."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _same_sums_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_word2vec_trains_as_torch_alone() -> None:
    options = ["--words", "20000", "--epochs", "2", "--columns", "16"]
    (losses, rows), (plain_losses, plain_rows) = (
        example("word2vec").main([*options, *more]) for more in ([], ["--plain"])
    )
    assert losses == plain_losses and torch.equal(rows, plain_rows)
    assert losses[1] < losses[0]


def test_transe_trains_as_torch_alone_and_finds_tails(tmp_path: Path) -> None:
    (hits, rows), (plain_hits, plain_rows) = (
        example("transe").main(["--epochs", "15", *more]) for more in ([], ["--plain"])
    )
    if torch.cuda.is_available():  # last bits differ: docs/embedding.md, sums of gradients
        assert abs(hits - plain_hits) < 0.02
        torch.testing.assert_close(rows, plain_rows, rtol=1e-3, atol=1e-3)
    else:
        assert hits == plain_hits and torch.equal(rows, plain_rows)
    assert hits > 0.2  # 0.017 by chance
    (tmp_path / "wrong.tsv").write_text("a\tb\tc\na b c\n")
    with pytest.raises(SystemExit, match="line 2 has no three columns"):
        example("transe").main(["--file", str(tmp_path / "wrong.tsv")])


def test_a_model_within_its_budget_trains_as_one_that_stays() -> None:
    options = ["--width", "32", "--blocks", "6", "--steps", "4"]
    within, plain = (example("swapper").main([*options, *more]) for more in ([], ["--plain"]))
    assert within == plain


def test_two_ranks_train_and_save_the_rows_of_one_process(tmp_path: Path) -> None:
    known = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    known["CUDA_VISIBLE_DEVICES"] = ""  # two ranks need two GPUs
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for start, folder in (([sys.executable], "one"), (torchrun, "two")):
        command = [*start, FOLDER / "two_ranks.py", "--steps", "5", "--out", tmp_path / folder]
        done = subprocess.run(command, env=known, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    found = []
    for folder in ("one", "two"):
        rows = {"model": {"items.weight": torch.empty(10_000, 64)}}
        checkpoint.load(rows, checkpoint_id=tmp_path / folder, no_dist=True)
        found.append(rows["model"]["items.weight"])
    assert torch.equal(*found)
