"""What all demonstrations do alike as a user runs them: options, Ctrl-C, wrong settings."""

from __future__ import annotations

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
from typing import Any

import numpy as np
import pytest
from conftest import NEEDS_GPU
from demo_commands import DEMOS, demo_file, facts, run_demo

from demos import session
from speedtorch.__main__ import main

ROOT = Path(__file__).parents[2]
EACH = pytest.mark.parametrize("name", DEMOS)
OF_TEXT = pytest.mark.parametrize("name", ["word2vec", "glove"])

# Settings that all have, and those of each.
GIVEN: dict[str, Any] = {"out": Path("b"), "dim": 3, "epochs": 4, "batch": 5, "lr": 0.5, "seed": 7}
GIVEN |= {"device": "cpu", "memory": "plain"}
OF_CORPUS = {"corpus": Path("a.gz"), "optimizer": "SGD", "steps": 6, "window": 8, "min_count": 9}
STORED = {"stored": "float16", "rounding": "nearest"}
OWN: dict[str, dict[str, Any]] = {
    "word2vec": {**OF_CORPUS, "negatives": 11, "sample": 0.25, "held_out": 0.125, **STORED},
    "glove": {**OF_CORPUS, "x_max": 6.5, "alpha": 0.25},
    "ncf": {"ratings": Path("a.csv"), "negatives": 6},
    "dlrm": {
        "clicks": Path("a.gz"),
        "lines": 2,
        "optimizer": "SGD",
        "rows": 10,
        "held_out": 0.25,
        **STORED,
    },
}
COMPARES = {"word2vec", "dlrm"}


@EACH
def test_every_setting_has_an_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, module = GIVEN | OWN[name], DEMOS[name].module
    compare = {"compare": True} if name in COMPARES else {}
    assert {field.name for field in fields(module.Settings)} == {*given, *compare}
    seen: list[Any] = []
    monkeypatch.setattr(module, "run", lambda settings: seen.append(settings) or 7)
    options = [f"--{option.replace('_', '-')}={value}" for option, value in given.items()]
    options += [f"--{option}" for option in compare]
    assert main(["demo", name, *options]) == main(["demo", name]) == 7
    assert seen == [module.Settings(**given, **compare), module.Settings()]


GPU_OPTIONS = {"glove": (), "ncf": ("--lr", "0.02"), "dlrm": ("--compare",)}


@NEEDS_GPU
@pytest.mark.parametrize("memory", ["auto", "managed", "registered", "plain", "cuda"])
@pytest.mark.parametrize("name", GPU_OPTIONS)
def test_the_demonstration_runs_on_a_gpu(name: str, memory: str, tmp_path: Path) -> None:
    assert run_demo(name, tmp_path, "--memory", memory, *GPU_OPTIONS[name], device="cuda") == 0
    found = facts(tmp_path)
    assert found["device"] == "cuda" and found["peak_gpu_bytes"] > 0
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
    command = [sys.executable, "-m", "speedtorch", "demo", name, *given, *endless]
    terminal, its_end = pty.openpty()  # a bar, which says that it trains, is for those alone
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    errors = b""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=its_end, cwd=ROOT) as process:
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
    out = tmp_path / "new" / "folder"
    assert run_demo(name, out) == 0
    assert sorted(os.listdir(out)) == [*DEMOS[name].files]
    words, numbers = vectors_as_text(out / "vectors.txt")
    saved = np.load(out / "vectors.npy", allow_pickle=False)
    assert saved.dtype == np.float32 and saved.shape == (70, 8) and len(set(words)) == 70
    assert saved.tobytes() == numbers.tobytes() and np.isfinite(saved).all()


def interrupt(
    monkeypatch: pytest.MonkeyPatch, name: str, times: int = 1, label: str = "training"
) -> None:
    """Sends Ctrl-C to this process, in the second step of the training of that label."""
    module = DEMOS[name].module
    original: Callable[..., Any] = module.train

    def train(*args: Any, stop: Callable[[], bool], **options: Any) -> Any:
        calls = 0

        def stop_later() -> bool:
            nonlocal calls
            calls += 1
            interrupts = calls == 2 and options.get("label", "training") == label
            for _ in range(times if interrupts else 0):
                signal.raise_signal(signal.SIGINT)
            return stop()

        return original(*args, stop=stop_later, **options)

    monkeypatch.setattr(module, "train", train)


@EACH
def test_ctrl_c_ends_training_after_a_whole_step_and_saves_what_there_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupt(monkeypatch, name)
    compare = ["--compare"] if name in COMPARES else []
    assert run_demo(name, tmp_path, *compare) == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert "the results so far are saved" in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == [*DEMOS[name].files]
    assert facts(tmp_path)["training"]["steps"] == 2
    assert not facts(tmp_path)["training"]["finished"]


@EACH
def test_a_second_ctrl_c_ends_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(monkeypatch, name, times=2)
    assert run_demo(name, tmp_path) == 130
    assert "interrupted by Ctrl-C" in capsys.readouterr().err and os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", sorted(COMPARES))
def test_ctrl_c_in_the_comparison_keeps_the_trained_vectors(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(monkeypatch, name, label="plain torch")
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
    *((name, f"{DEMOS[name].option} /no/such/file", "/no/such/file") for name in DEMOS),
    *((name, "--seed -1", BAD_SEED) for name in ("glove", "ncf", "dlrm")),
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
