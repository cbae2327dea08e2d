"""`demo word2vec` as a user runs it: files, comparison, repeatability, Ctrl-C, wrong settings."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEEDS_GPU
from topics import topic_passages

import speedtorch
from speedtorch.__main__ import main
from speedtorch.demo import report, skipgram, word2vec

SMALL = ("--dim", "8", "--batch", "256", "--min-count", "1")
FILES = ["report.json", "vectors.npy", "vectors.txt"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text("\n\n".join(topic_passages()))
    return path


def demo(text: Path, out: Path, *more: str, device: str = "cpu") -> int:
    given = ("--corpus", str(text), "--out", str(out), "--device", device)
    return main(["demo", "word2vec", *given, *SMALL, "--steps", "60", *more])


def facts(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "report.json").read_text())
    return found


def read_text_format(path: Path) -> tuple[list[str], np.ndarray[Any, np.dtype[np.float32]]]:
    """Reads word2vec's text format by its rules: a header, then a word and its numbers per line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    count, dim = map(int, lines[0].split())
    parts = [line.rstrip().split(" ") for line in lines[1:]]
    assert len(parts) == count and all(len(part) == dim + 1 for part in parts)
    return [p[0] for p in parts], np.array([p[1:] for p in parts], dtype=np.float32)


def test_vectors_are_saved_as_npy_and_as_text_with_the_same_bits(
    text: Path, tmp_path: Path
) -> None:
    assert demo(text, tmp_path / "new" / "folder") == 0
    out = tmp_path / "new" / "folder"
    assert sorted(os.listdir(out)) == FILES
    words, numbers = read_text_format(out / "vectors.txt")
    saved = np.load(out / "vectors.npy", allow_pickle=False)
    assert saved.dtype == np.float32 and saved.shape == (70, 8) and len(set(words)) == 70
    assert saved.tobytes() == numbers.tobytes() and np.isfinite(saved).all()


def test_gensim_loads_the_text(text: Path, tmp_path: Path) -> None:
    models = pytest.importorskip("gensim.models", reason="gensim is not installed")
    assert demo(text, tmp_path) == 0
    loaded = models.KeyedVectors.load_word2vec_format(str(tmp_path / "vectors.txt"))
    assert np.array_equal(loaded.vectors, np.load(tmp_path / "vectors.npy"))


def test_the_report_tells_all_that_was_promised(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(text, tmp_path) == 0
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


def test_compare_finds_the_same_bits_on_the_cpu(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(text, tmp_path, "--compare") == 0
    assert "agreement  bit for bit" in capsys.readouterr().out
    found = facts(tmp_path)
    assert found["plain_torch"]["identical"] and found["plain_torch"]["farthest"] == 0
    assert found["plain_torch"]["auc"] == found["held_out"]["auc"]
    assert found["plain_torch"]["log_likelihood"] == found["held_out"]["log_likelihood"]


@NEEDS_GPU
@pytest.mark.parametrize("memory", ["auto", "managed", "registered", "plain", "cuda"])
def test_compare_agrees_on_a_gpu(text: Path, tmp_path: Path, memory: str) -> None:
    assert demo(text, tmp_path, "--compare", "--memory", memory, device="cuda") == 0
    found = facts(tmp_path)
    assert found["device"] == "cuda" and found["plain_torch"]["same"]
    assert found["peak_gpu_bytes"] > 0 and found["memory"] != "auto"
    assert found["held_out"]["auc"] == pytest.approx(found["plain_torch"]["auc"], rel=0.01)


def test_compare_notices_a_difference(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original = word2vec.SkipGram.rows

    def rows(model: word2vec.SkipGram, side: str, ids: torch.Tensor) -> torch.Tensor:
        found = original(model, side, ids)
        plain = isinstance(model.u_embeddings, torch.nn.Embedding)
        return found.nextafter(torch.ones(8)) if plain else found

    monkeypatch.setattr(word2vec.SkipGram, "rows", rows)
    assert demo(text, tmp_path, "--compare") == word2vec.DIFFERENT == 1
    assert "MORE THAN THEY SHOULD" in capsys.readouterr().out
    assert not facts(tmp_path)["plain_torch"]["same"]


def test_without_held_out_text_there_is_no_score(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(text, tmp_path, "--held-out", "0", "--compare") == 0
    printed = capsys.readouterr().out
    assert "AUC" not in printed and "bit for bit" in printed
    assert facts(tmp_path)["held_out"] is None


@pytest.mark.slow
def test_the_seed_decides_everything(text: Path, tmp_path: Path) -> None:
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        assert demo(text, tmp_path / name, "--seed", seed) == 0
    a, b, c = ((tmp_path / name / "vectors.npy").read_bytes() for name in "abc")
    assert a == b and a != c


def test_a_gzip_corpus_gives_the_same_vectors_as_a_plain_one(text: Path, tmp_path: Path) -> None:
    zipped = tmp_path / "topics.txt.gz"
    zipped.write_bytes(gzip.compress(text.read_bytes()))
    assert demo(text, tmp_path / "plain") == demo(zipped, tmp_path / "zipped") == 0
    one, other = (tmp_path / name / "vectors.npy" for name in ("plain", "zipped"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_ctrl_c_saves_what_there_is(text: Path, tmp_path: Path) -> None:
    given = ("--corpus", str(text), "--out", str(tmp_path), "--device", "cpu", *SMALL)
    command = [sys.executable, "-m", "speedtorch", "demo", "word2vec", *given, "--epochs", "100000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stderr is not None
        seen = b""
        deadline = time.monotonic() + 120
        while b"loss" not in seen and time.monotonic() < deadline and process.poll() is None:
            seen += os.read(process.stderr.fileno(), 4096)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=120)
    assert process.returncode == word2vec.STOPPED == 130, errors.decode()
    assert b"stopping after this step" in errors and b"what was learnt until then" in out
    assert sorted(os.listdir(tmp_path)) == FILES
    words, numbers = read_text_format(tmp_path / "vectors.txt")
    assert np.array_equal(np.load(tmp_path / "vectors.npy"), numbers) and len(words) == 70
    assert facts(tmp_path)["training"]["steps"] > 0
    assert not facts(tmp_path)["training"]["finished"]


def interrupted(monkeypatch: pytest.MonkeyPatch, label: str, times: int) -> None:
    """Sends Ctrl-C to this process, in the second step of the training of that name."""
    original: Callable[..., Any] = skipgram.train

    def train(*args: Any, stop: Callable[[], bool], **options: Any) -> Any:
        asked = 0

        def stop_later() -> bool:
            nonlocal asked
            asked += 1
            for _ in range(times if asked == 2 and options["label"] == label else 0):
                signal.raise_signal(signal.SIGINT)
            return stop()

        return original(*args, stop=stop_later, **options)

    monkeypatch.setattr(word2vec, "train", train)


def test_ctrl_c_ends_training_after_a_whole_step_and_the_handler_is_put_back(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupted(monkeypatch, "training", times=1)
    assert demo(text, tmp_path, "--compare") == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert facts(tmp_path)["training"]["steps"] == 2


def test_ctrl_c_in_the_comparison_leaves_the_trained_vectors(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    interrupted(monkeypatch, "plain torch", times=1)
    assert demo(text, tmp_path, "--compare") == 130
    assert "before the comparison was done" in capsys.readouterr().out
    assert facts(tmp_path)["training"]["steps"] == 60


def test_a_second_ctrl_c_ends_at_once(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    interrupted(monkeypatch, "training", times=2)
    assert demo(text, tmp_path) == 130
    assert "ended by Ctrl-C" in capsys.readouterr().err and os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--optimizer", "Adamix"),
            "no optimizer 'Adamix' in torch.optim: ASGD, Ada",
        ),
        (("--optimizer", "Muon"), "Muon cannot be used"),
        (("--optimizer", "LBFGS"), "LBFGS cannot"),
        (("--lr", "-1"), "Invalid learning rate"),
        (("--held-out", "1"), "held_out is 1.0; it must be from 0 to below 1"),
        (("--min-count", "100000"), "give a longer text or a smaller minimum count"),
        (("--corpus", "/no/such/file"), "/no/such/file"),
        (("--optimizer", "SGD", "--lr", "1e30"), "choose a learning rate below 1e+30"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_setting_that_does_not_fit_is_told_in_one_line(
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    assert demo(text, tmp_path, *options) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("speedtorch: ") and message in last


def test_an_output_folder_that_is_a_file_is_told_before_training(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(text, text) == 2
    assert "training" not in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_told(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert demo(text, tmp_path, device="cuda") == 2
    assert "device cuda cannot be used: torch sees no GPU" in capsys.readouterr().err


def test_peak_host_memory_is_unknown_where_nobody_counts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (report.peak_host_bytes() or 0) > 1_000_000
    monkeypatch.setitem(sys.modules, "resource", None)
    assert report.peak_host_bytes() is None
