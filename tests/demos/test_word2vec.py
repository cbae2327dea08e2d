"""`demo word2vec` as a user runs it: files, comparison, repeatability, Ctrl-C, wrong settings."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from demo_commands import demo_file, facts, run_demo

from demos import report


def test_gensim_loads_the_text(tmp_path: Path) -> None:
    models = pytest.importorskip("gensim.models", reason="gensim is not installed")
    assert run_demo("word2vec", tmp_path) == 0
    loaded = models.KeyedVectors.load_word2vec_format(str(tmp_path / "vectors.txt"))
    assert np.array_equal(loaded.vectors, np.load(tmp_path / "vectors.npy"))


def test_without_held_out_text_there_is_no_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo("word2vec", tmp_path, "--held-out", "0", "--compare") == 0
    printed = capsys.readouterr().out
    assert "AUC" not in printed and "bitwise identical" in printed
    assert facts(tmp_path)["after"] is None


def test_a_gzip_corpus_gives_the_same_vectors_as_a_plain_one(tmp_path: Path) -> None:
    zipped = tmp_path / "topics.txt.gz"
    zipped.write_bytes(gzip.compress(demo_file("word2vec").read_bytes()))
    assert run_demo("word2vec", tmp_path / "plain") == 0
    assert run_demo("word2vec", tmp_path / "zipped", "--corpus", str(zipped)) == 0
    one, other = (tmp_path / name / "vectors.npy" for name in ("plain", "zipped"))
    assert one.read_bytes() == other.read_bytes()


def test_a_missing_gpu_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_demo("word2vec", tmp_path, device="cuda") == 2
    assert "device cuda cannot be used: torch sees no GPU" in capsys.readouterr().err


def test_peak_host_memory_is_unknown_where_nobody_counts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (report.peak_host_bytes() or 0) > 1_000_000
    monkeypatch.setitem(sys.modules, "resource", None)
    assert report.peak_host_bytes() is None
