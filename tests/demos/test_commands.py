"""What all demonstrations do alike as a user runs them: options, Ctrl-C, wrong settings."""

from __future__ import annotations

import copy
import fcntl
import io
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import NEEDS_GPU
from demo_commands import DEMOS, demo_file, demo_ratings, facts, run_demo
from safetensors.torch import load_file
from torch import nn

import speedtorch
from demos import command, loop, runner, session
from demos.batches import Outcome
from demos.settings import optimizer_names
from speedtorch.__main__ import main

ROOT = Path(__file__).parents[2]
EACH = pytest.mark.parametrize("name", DEMOS)
OF_TEXT = pytest.mark.parametrize("name", ["word2vec", "glove"])

# Settings that all have, and those of each.
GIVEN: dict[str, Any] = {"out": Path("b"), "batch": 5, "lr": 0.5, "seed": 7, "device": "cpu"}
OF_TABLES = {"dim": 3, "epochs": 4, "memory": "plain"}
OF_CORPUS = {"corpus": Path("a.gz"), "optimizer": "SGD", "steps": 6, "window": 8, "min_count": 9}
OF_CORPUS |= OF_TABLES
STORED = {**OF_TABLES, "stored": "float16", "rounding": "nearest", "held_out": 0.25}
OWN: dict[str, dict[str, Any]] = {
    "word2vec": {**OF_CORPUS, **STORED, "negatives": 11, "sample": 0.25},
    "glove": {**OF_CORPUS, "x_max": 6.5, "alpha": 0.25},
    "ncf": {**OF_TABLES, "ratings": Path("a.csv"), "negatives": 6},
    "dlrm": {**STORED, "clicks": Path("a.gz"), "lines": 2, "optimizer": "SGD", "rows": 10},
    "experts": {"experts": 9, "active": 3, "resident": 5, "width": 7, "steps": 6},
}
COMPARES = {"word2vec", "dlrm", "experts"}
COMPARED = pytest.mark.parametrize("name", sorted(COMPARES))


def compare_of(name: str) -> tuple[str, ...]:
    return ("--compare",) if name in COMPARES else ()


@EACH
def test_every_setting_has_an_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, made = GIVEN | OWN[name], command.DEMOS[name].settings_type
    names = [field.name for field in fields(made)]
    assert {*names} == {*given, *(["compare"] if name in COMPARES else [])}
    seen: list[Any] = []
    monkeypatch.setattr(command, "run", lambda kind, settings: seen.append((kind, settings)) or 7)
    options = [f"--{option.replace('_', '-')}={value}" for option, value in given.items()]
    assert main(["demo", name, *options]) == main(["demo", name, *compare_of(name)]) == 7
    compare = {"compare": True} if name in COMPARES else {}
    kind = command.DEMOS[name]
    assert seen == [(kind, made(**given)), (kind, made(**compare))]


# ------------------------------------------------------------------------------------------------
# The report


class Report(NamedTuple):
    """What a report tells: the first words of its lines, texts in them, and some of its facts."""

    lines: str
    text: str
    unit: str
    table_bytes: int
    training: dict[str, int]
    score: str | None = None


WORDS, ITEMS = 70, len(demo_ratings().item_ids)
REPORTS = {
    "word2vec": Report(
        "text time loss tables peak held nearest saved plain comparison",
        "AUC 0.5000 before training",
        "words",
        2 * WORDS * 3 * 8 * 4,  # two vectors of each word, and Adamax keeps two more of each
        {"steps": 60},
        "auc",
    ),
    "glove": Report(
        "text pairs time loss tables peak nearest saved",
        "1,900 unique pairs within 10 words",
        "pairs",
        # Adagrad keeps as many numbers as it trains: two vectors and two biases for each word.
        2 * WORDS * 2 * (8 + 1) * 4,
        {"steps": 60},
    ),
    "ncf": Report(
        "ratings time loss tables peak hit NDCG saved",
        f"{len(demo_ratings()):,} of 600 users for {ITEMS} items, from a file",
        "ratings",
        (600 + ITEMS) * 3 * (4 + 8) * 4,  # GMF's 4 and the MLP's 8, and Adam keeps two more of each
        {"examples": 2 * (len(demo_ratings()) - 600)},
        "hit_rate",
    ),
    "dlrm": Report(
        "clicks time loss tables peak AUC entropy saved plain comparison",
        "of 3,000 lines of",
        "steps",
        26 * 100 * 4 * 4 * 2,  # 26 tables, and Adagrad keeps one more of each number
        {"examples": 5400},
        "auc",
    ),
    "experts": Report(
        "time loss peak modules uses waited saved plain comparison",
        "found their module loaded",
        "steps",
        0,
        {"steps": 120, "examples": 120 * 2 * 32},
    ),
}


@EACH
@pytest.mark.usefixtures("on_a_terminal")
def test_the_report_tells_all_that_was_promised(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told, out = REPORTS[name], tmp_path / "new" / "folder"
    assert run_demo(name, out, *compare_of(name)) == 0
    assert sorted(os.listdir(out)) == [*DEMOS[name].files]
    printed = capsys.readouterr()
    starts = [line.split()[0] for line in printed.out.splitlines()]
    assert [start for start in starts if start in told.lines.split()] == told.lines.split()
    for text in (told.text, f"{told.unit}/s", "of host memory"):
        assert text in printed.out
    for text in ("training: 100%", f"{told.unit}/s", "loss"):
        assert text in printed.err
    found = facts(out)
    assert found["training"]["finished"] and found["device"] == "cpu"
    assert found["training"].items() >= told.training.items()
    assert found["memory"] == (speedtorch.info().default_memory if told.table_bytes else None)
    assert found["table_bytes"] == told.table_bytes
    assert found["peak_gpu_bytes"] is None and found["peak_host_bytes"] > told.table_bytes
    small = zip(DEMOS[name].small[::2], DEMOS[name].small[1::2], strict=True)
    assert all(str(found["settings"][key[2:].replace("-", "_")]) == value for key, value in small)
    if told.score:
        assert found["after"][told.score] > found["before"][told.score]
    assert ("plain_torch" in found) == (name in COMPARES)
    if name in COMPARES:
        assert "comparison bitwise identical" in printed.out and "plain torch: 100%" in printed.err
        plain, trained = found["plain_torch"], {"loss": found["training"]["losses"][-1]}
        trained |= found["after"] or {}
        assert plain["identical"] and plain["farthest"] == 0
        assert {key: plain[key] for key in trained if key in plain} == {
            key: value for key, value in trained.items() if isinstance(value, float)
        }


@COMPARED
def test_compare_notices_a_difference_of_a_last_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(model: nn.Module, *args: Any, label: str, **how: Any) -> Outcome:
        outcome = loop.train(model, *args, label=label, **how)
        if label == "plain torch":
            last = [*model.parameters()][-1].data.view(-1)[-1]
            last.copy_(last.nextafter(torch.ones(())))
        return outcome

    monkeypatch.setattr(runner, "train", train)
    assert run_demo(name, tmp_path, "--compare") == runner.DIFFERENT == 1
    assert "DIFFERENT RESULTS" in capsys.readouterr().out
    assert not facts(tmp_path)["plain_torch"]["same"]


REFUSED = ("Adafactor", "LBFGS", "Muon")
COMPARABLE = [("word2vec", name) for name in optimizer_names() if name not in REFUSED]
COMPARABLE += [("dlrm", "Adagrad"), ("dlrm", "SGD")]


@pytest.mark.slow
@pytest.mark.dealt("ahead", "dim")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("ahead", [True, False], ids=["prefetch", "no_prefetch"])
@pytest.mark.parametrize("dim", [1, 7, 32])
@pytest.mark.parametrize(("name", "optimizer"), COMPARABLE)
def test_the_numbers_are_the_very_ones_of_plain_torch(
    name: str,
    optimizer: str,
    dim: int,
    ahead: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train(*args: Any, **how: Any) -> Outcome:
        return loop.train(*args, **{"ahead": ahead, **how})

    monkeypatch.setattr(runner, "train", train)
    options = ("--compare", "--optimizer", optimizer, "--dim", str(dim))
    assert run_demo(name, tmp_path, *options) == 0
    found = facts(tmp_path)
    assert found["plain_torch"]["identical"]
    assert found["plain_torch"]["loss"] == found["training"]["losses"][-1]
    assert found["after"]["auc"] != found["before"]["auc"]


@pytest.mark.parametrize("name", [name for name in DEMOS if name != "experts"])
def test_prefetch_does_not_change_a_number(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    seen: list[tuple[list[float], Any]] = []

    def train(
        model: nn.Module, optimizer: torch.optim.Optimizer, *args: Any, **how: Any
    ) -> Outcome:
        outcome = loop.train(model, optimizer, *args, ahead=not seen, **how)
        states = (model.state_dict(), optimizer.state_dict()["state"])
        seen.append((outcome.losses, copy.deepcopy(states)))
        return outcome

    monkeypatch.setattr(runner, "train", train)
    assert run_demo(name, tmp_path, device=device) == run_demo(name, tmp_path, device=device) == 0
    (losses, states), (other_losses, other_states) = seen
    # On a GPU a sum is formed in another order in every run.
    assert losses == pytest.approx(other_losses, rel=0 if device == "cpu" else 1e-3)
    if device == "cpu":
        torch.testing.assert_close(states, other_states, rtol=0, atol=0)


def test_experts_learn_and_equal_the_run_with_all_experts_on_the_device(
    tmp_path: Path, device: str
) -> None:
    assert run_demo("experts", tmp_path, "--compare", device=device) == 0
    found = facts(tmp_path)
    assert found["plain_torch"]["identical"] and found["training"]["steps"] == 120
    losses = found["training"]["losses"]
    assert losses[-1] < 0.8 * losses[0]
    moved = found["units"]
    assert moved["hits"] > 100 > moved["misses"] and moved["bytes_in"] > 10 * moved["host_bytes"]
    assert moved["resident_bytes"] <= moved["budget_bytes"]
    saved = load_file(tmp_path / "model.safetensors")
    assert len(saved) == 6 * 4 and saved["experts.5.2.weight"].shape == (8, 32)


GPU_RUNS = [
    ("word2vec", "--compare --optimizer Adamax"),
    ("word2vec", "--compare --optimizer SparseAdam"),
    ("word2vec", "--compare --optimizer Adagrad"),
    ("word2vec", "--compare --optimizer SGD"),
    ("glove", ""),
    ("ncf", "--lr 0.02"),
    ("dlrm", "--compare"),
]


@NEEDS_GPU
@pytest.mark.parametrize("memory", ["auto", "managed", "registered", "plain", "cuda"])
@pytest.mark.parametrize(("name", "options"), GPU_RUNS)
def test_the_demonstration_runs_on_a_gpu(
    name: str, options: str, memory: str, tmp_path: Path
) -> None:
    assert run_demo(name, tmp_path, "--memory", memory, *options.split(), device="cuda") == 0
    found = facts(tmp_path)
    assert found["device"] == "cuda" and found["peak_gpu_bytes"] > 0 and found["memory"] != "auto"
    if "--compare" in options:
        assert found["plain_torch"]["same"]  # the loss and the score are within 1 %
    if name == "glove":
        assert found["training"]["losses"][-1] < found["training"]["losses"][0]
    if name == "ncf":
        assert found["after"]["hit_rate"] > found["before"]["hit_rate"]


@pytest.mark.examples
@OF_TEXT
def test_the_seed_decides_everything(name: str, tmp_path: Path) -> None:
    for folder, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        assert run_demo(name, tmp_path / folder, "--seed", seed) == 0
    a, b, c = ((tmp_path / folder / "vectors.npy").read_bytes() for folder in "abc")
    assert a == b and a != c


# ------------------------------------------------------------------------------------------------
# Ctrl-C


@pytest.mark.examples
@OF_TEXT
def test_ctrl_c_saves_what_there_is(name: str, tmp_path: Path) -> None:
    given = ("--corpus", str(demo_file(name)), "--out", str(tmp_path), "--device", "cpu")
    endless = ("--dim", "8", "--batch", "256", "--min-count", "1", "--epochs", "100000")
    line = [sys.executable, "-m", "speedtorch", "demo", name, *given, *endless]
    terminal, its_end = pty.openpty()  # a bar, which says that it trains, is for those alone
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    errors = b""
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=its_end, cwd=ROOT) as process:
        os.close(its_end)
        while b"loss" not in errors and select.select([terminal], [], [], 60)[0]:
            errors += os.read(terminal, 4096)
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # which Linux gives where the other end is closed
            while more := os.read(terminal, 4096):
                errors += more
        out, _ = process.communicate(timeout=120)
    os.close(terminal)
    assert process.returncode == 130, errors.decode()
    assert b"stopping after this step" in errors and b"the results so far" in out
    assert sorted(os.listdir(tmp_path)) == [*DEMOS[name].files]
    words, numbers = vectors_as_text(tmp_path / "vectors.txt")
    assert np.array_equal(np.load(tmp_path / "vectors.npy"), numbers) and len(words) == 70
    assert facts(tmp_path)["training"]["steps"] > 0
    assert not facts(tmp_path)["training"]["finished"]


def vectors_as_text(path: Path) -> tuple[list[str], np.ndarray[Any, np.dtype[np.float32]]]:
    """Reads word2vec's text format by its rules: a header, then a word and its numbers per line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    count, dim = map(int, lines[0].split())
    parts = [line.rstrip().split(" ") for line in lines[1:]]
    assert len(parts) == count and all(len(part) == dim + 1 for part in parts)
    return [p[0] for p in parts], np.array([p[1:] for p in parts], dtype=np.float32)


@OF_TEXT
def test_vectors_are_saved_as_npy_and_as_text_with_the_same_bits(name: str, tmp_path: Path) -> None:
    assert run_demo(name, tmp_path) == 0
    words, numbers = vectors_as_text(tmp_path / "vectors.txt")
    saved = np.load(tmp_path / "vectors.npy", allow_pickle=False)
    assert saved.dtype == np.float32 and saved.shape == (70, 8) and len(set(words)) == 70
    assert saved.tobytes() == numbers.tobytes() and np.isfinite(saved).all()
    found = facts(tmp_path)
    assert found["words"] == 70 and len(found["neighbours"]) == 8


def interrupt(monkeypatch: pytest.MonkeyPatch, times: int = 1, label: str = "training") -> None:
    """Sends Ctrl-C to this process, in the second step of the training of that label."""

    def train(*args: Any, stop: Callable[[], bool], **options: Any) -> Outcome:
        calls = 0

        def stop_later() -> bool:
            nonlocal calls
            calls += 1
            for _ in range(times if calls == 2 and options["label"] == label else 0):
                signal.raise_signal(signal.SIGINT)
            return stop()

        return loop.train(*args, stop=stop_later, **options)

    monkeypatch.setattr(runner, "train", train)


@EACH
def test_ctrl_c_ends_training_after_a_whole_step_and_saves_what_there_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupt(monkeypatch)
    assert run_demo(name, tmp_path, *compare_of(name)) == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert "the results so far are saved" in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == [*DEMOS[name].files]
    assert facts(tmp_path)["training"]["steps"] == 2
    assert not facts(tmp_path)["training"]["finished"]


@EACH
def test_a_second_ctrl_c_ends_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(monkeypatch, times=2)
    assert run_demo(name, tmp_path) == 130
    assert "interrupted by Ctrl-C" in capsys.readouterr().err and os.listdir(tmp_path) == []


@COMPARED
def test_ctrl_c_in_the_comparison_keeps_the_trained_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(monkeypatch, label="plain torch")
    assert run_demo(name, tmp_path, "--compare") == 130
    assert "before the comparison was complete" in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == [*DEMOS[name].files]
    assert facts(tmp_path)["training"]["finished"]


# ------------------------------------------------------------------------------------------------
# Wrong settings

ADAMIX = "optimizer must be one of ASGD, Ada"
BAD_SEED = "seed must be from 0 to 2^32 - 1, got -1"
LONGER_TEXT = "Choose a longer text or a lower minimum count"
PLAIN_16_BITS = "--compare requires 32-bit rows"
TOO_FAST = "Choose a learning rate below 1e+30"
WRONG = [
    *(
        (name, *setting)
        for name in ("word2vec", "glove")
        for setting in (
            ("--optimizer Adamix", ADAMIX),
            ("--optimizer Muon", "Muon cannot be used"),
            ("--optimizer LBFGS", "LBFGS cannot"),
            ("--min-count 100000", LONGER_TEXT),
            ("--optimizer SGD --lr 1e30", TOO_FAST),
        )
    ),
    *((name, "--lr -1", "Invalid learning rate") for name in DEMOS),
    *(
        (name, f"{d.option} /no/such/file", "/no/such/file")
        for name, d in DEMOS.items()
        if d.option
    ),
    *((name, "--seed -1", BAD_SEED) for name in DEMOS),
    ("glove", f"--seed {1 << 32}", "seed must be from 0 to 2^32 - 1, got 4294967296"),
    ("word2vec", "--held-out 1", "held_out must be at least 0 and below 1, got 1.0"),
    *((name, "--stored float16 --compare", PLAIN_16_BITS) for name in ("word2vec", "dlrm")),
    ("glove", "--x-max 0", "x_max must be above 0, got 0.0"),
    ("glove", "--alpha -1", "alpha must be 0 or more, got -1.0"),
    ("ncf", "--lr 1e30", TOO_FAST),
    (
        "ncf",
        f"--ratings {__file__}",
        "test_commands.py, line 1: expected numbers separated by tabs",
    ),
    ("experts", "--active 4", "active must be at most 3, got 4"),
    ("experts", "--resident 7", "resident must be at most 6, got 7"),
    ("dlrm", "--held-out 0", "held_out must be above 0 and below 1, got 0.0"),
    ("dlrm", "--optimizer Adam --compare", "--compare requires Adagrad or SGD, got Adam"),
    ("dlrm", f"--clicks {__file__}", "test_commands.py, line 1: expected 40 fields"),
]


@pytest.mark.parametrize(
    ("name", "options", "message"), WRONG, ids=[f"{name} {options}" for name, options, _ in WRONG]
)
def test_a_wrong_setting_is_reported_in_one_line(
    name: str, options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(name, tmp_path, *options.split()) == 2
    printed = capsys.readouterr().err
    last = printed.strip().splitlines()[-1]
    assert last.startswith("speedtorch: ") and message in last
    if options.startswith("--seed 4"):
        assert "counting" not in printed


@EACH
def test_an_output_folder_that_is_a_file_is_reported_before_training(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = demo_file(name)
    assert run_demo(name, file) == 2
    printed = capsys.readouterr().err
    assert f"--out {file}: cannot create the folder" in printed
    assert "counting" not in printed and "training" not in printed


class Interrupted(io.RawIOBase):
    """A stream that Ctrl-C interrupts within a write."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        signal.raise_signal(signal.SIGINT)
        return len(data)


def test_ctrl_c_within_a_write_of_a_bar_stops_after_the_step(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(Interrupted())))
    with session.interrupt() as stops:
        print("a bar", file=sys.stderr, flush=True)
        assert stops()
    monkeypatch.undo()
    assert "stopping after this step" in capfd.readouterr().err
