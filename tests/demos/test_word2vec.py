"""`demo word2vec` as a user runs it: files, comparison, repeatability, Ctrl-C, wrong settings."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import NEEDS_GPU
from demo_commands import demo_file, facts, run_demo

import speedtorch
from demos import report, word2vec


def test_gensim_loads_the_text(tmp_path: Path) -> None:
    models = pytest.importorskip("gensim.models", reason="gensim is not installed")
    assert run_demo("word2vec", tmp_path) == 0
    loaded = models.KeyedVectors.load_word2vec_format(str(tmp_path / "vectors.txt"))
    assert np.array_equal(loaded.vectors, np.load(tmp_path / "vectors.npy"))


@pytest.mark.usefixtures("on_a_terminal")
def test_the_report_tells_all_that_was_promised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo("word2vec", tmp_path) == 0
    printed = capsys.readouterr()
    for start in ("text ", "time ", "loss ", "tables ", "peak ", "held out ", "near"):
        assert f"\n{start}" in f"\n{printed.out}"
    assert "words/s" in printed.out and "host memory" in printed.out and "AUC 0." in printed.out
    assert "training: 100%" in printed.err and "words/s" in printed.err and "loss" in printed.err
    found = facts(tmp_path)
    assert found["training"]["steps"] == 60 and found["training"]["finished"]
    assert found["memory"] == speedtorch.info().default_memory and found["device"] == "cpu"
    assert found["settings"]["dim"] == 8
    assert found["peak_gpu_bytes"] is None and found["peak_host_bytes"] > found["table_bytes"]
    assert len(found["neighbours"]) == 8 and "plain_torch" not in found
    assert found["held_out_before"]["auc"] == 0.5 < found["held_out"]["auc"]
    assert "AUC 0.5000 before training" in printed.out


def test_compare_finds_the_same_bits_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo("word2vec", tmp_path, "--compare") == 0
    assert "comparison bitwise identical" in capsys.readouterr().out
    found = facts(tmp_path)
    assert found["plain_torch"]["identical"] and found["plain_torch"]["farthest"] == 0
    assert found["plain_torch"]["auc"] == found["held_out"]["auc"]
    assert found["plain_torch"]["log_likelihood"] == found["held_out"]["log_likelihood"]


@NEEDS_GPU
@pytest.mark.parametrize("memory", ["auto", "managed", "registered", "plain", "cuda"])
def test_compare_agrees_on_a_gpu(tmp_path: Path, memory: str) -> None:
    assert run_demo("word2vec", tmp_path, "--compare", "--memory", memory, device="cuda") == 0
    found = facts(tmp_path)
    assert found["device"] == "cuda" and found["plain_torch"]["same"]
    assert found["peak_gpu_bytes"] > 0 and found["memory"] != "auto"
    assert found["held_out"]["auc"] == pytest.approx(found["plain_torch"]["auc"], rel=0.01)


def test_compare_notices_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = word2vec.SkipGram.rows

    def rows(model: word2vec.SkipGram, side: str, ids: torch.Tensor) -> torch.Tensor:
        found = original(model, side, ids)
        plain = isinstance(model.u_embeddings, torch.nn.Embedding)
        return found.nextafter(torch.ones(8)) if plain else found

    monkeypatch.setattr(word2vec.SkipGram, "rows", rows)
    assert run_demo("word2vec", tmp_path, "--compare") == word2vec.DIFFERENT == 1
    assert "DIFFERENT RESULTS" in capsys.readouterr().out
    assert not facts(tmp_path)["plain_torch"]["same"]


def test_without_held_out_text_there_is_no_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo("word2vec", tmp_path, "--held-out", "0", "--compare") == 0
    printed = capsys.readouterr().out
    assert "AUC" not in printed and "bitwise identical" in printed
    assert facts(tmp_path)["held_out"] is None


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
