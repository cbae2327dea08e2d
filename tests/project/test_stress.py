"""The stress test finds no difference, and would find a lost row and a torn row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import stress.__main__ as command
import torch
from rank_processes import in_processes
from stress.histories import History, check_histories, run_shared_table
from stress.jobs import run_jobs
from stress.kills import run_killed_training
from stress.modes import MODES
from stress.progress import Progress
from warm_python import warm_python

from speedtorch import HostTable
from speedtorch.step.row_store import RowStore

PROGRAMS = {"training": 12, "kills": 6, "readers": 2}
"""Of each kind in the ordinary run; tests/parallel runs those of ranks."""


@pytest.fixture(autouse=True)
def as_a_run(one_thread: None) -> Iterator[None]:
    """Programs run as in a stress run."""
    yield


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", PROGRAMS)
def test_programs_find_no_difference(kind: str, tmp_path: Path) -> None:
    features = set[str]()
    for seed in range(PROGRAMS[kind]):
        folder = tmp_path / str(seed)
        folder.mkdir()
        features |= MODES[kind].run(seed, folder)
    assert features


@pytest.fixture
def lost_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange loses the last of the rows that it writes back, if that is row 3, 8, 13 ..."""
    exchange = RowStore.exchange

    def lossy(self: RowStore, names: Any, outgoing: Any, incoming: Any) -> None:
        if outgoing is None or not len(outgoing.ids) or int(outgoing.ids[-1]) % 5 != 3:
            exchange(self, names, outgoing, incoming)
            return
        fields, last = self.fields(names), int(outgoing.ids[-1])
        before = [field[last].clone() for field in fields]
        exchange(self, names, outgoing, incoming)
        for field, row in zip(fields, before, strict=True):
            field[last] = row

    monkeypatch.setattr(RowStore, "exchange", lossy)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_lost_row_is_found_and_its_seed_finds_it_again(
    lost_rows: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(tmp_path / "progress.json", "cpu")
    seeds = (f"training-{n}" for n in range(6, 40))  # the first of them finds it
    seed = next(seed for seed in seeds if not command.run_program(seed, progress))
    output = capsys.readouterr().out
    assert f"make stress SEED={seed} repeats it" in output
    found = output.partition("found a fault: ")[2].split("\n")[0]
    assert command.main(["--seed", seed]) == 1
    assert f"{seed} found a fault: {found}" in capsys.readouterr().out


def test_a_torn_row_of_a_reader_is_found(tmp_path: Path) -> None:
    first, last = np.zeros((3, 2), np.float32), np.float32([[0, 0], [1, 1], [2, 2]])
    writer = History(tmp_path, "writer")
    writer.add("write", 2, torch.tensor([1, 2]), torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    reader = History(tmp_path, "reader")
    reader.add("read", 0, torch.tensor([1]), torch.zeros(1, 2))
    reader.add("read", 2, torch.tensor([1, 0]), torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    check_histories(tmp_path, first, last)
    reader.add("read", 2, torch.tensor([0, 2]), torch.tensor([[0.0, 0.0], [2.0, 0.0]]))
    with pytest.raises(AssertionError, match=r"reader: rows \[2\] are not those of version 2"):
        check_histories(tmp_path, first, last)


def test_rows_and_blocks_that_are_lost_are_found(tmp_path: Path) -> None:
    rows = np.zeros((3, 2), np.float32)
    writer = History(tmp_path, "writer")
    writer.add("train", 2, torch.tensor([1, 1]), torch.full((2, 2), 4.0))
    with pytest.raises(AssertionError, match=r"the table: rows \[1\]"):
        check_histories(tmp_path, rows, rows)
    writer.add("write", 6, torch.tensor([1]), torch.zeros(1, 2))
    with pytest.raises(AssertionError, match="version 4 is missing"):
        check_histories(tmp_path, rows, rows)


def test_reads_before_earlier_ones_are_found(tmp_path: Path) -> None:
    rows = np.zeros((3, 2), np.float32)
    History(tmp_path, "writer").add("write", 2, torch.tensor([1]), torch.zeros(1, 2))
    reader = History(tmp_path, "reader")
    for version in (2, 0):
        reader.add("read", version, torch.tensor([1]), torch.zeros(1, 2))
    with pytest.raises(AssertionError, match="reader: version 0 after 2"):
        check_histories(tmp_path, rows, rows)


def changed_runs(
    name: str, change: Callable[..., Any], run: Callable[..., Any], seeds: range, folder: Path
) -> None:
    """Runs programs with another method of HostTable."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(HostTable, name, change)
        for seed in seeds:
            own = folder / str(seed)
            own.mkdir()
            run(seed, own)


def read_without_lock(table: HostTable, read: Callable[[], Any]) -> Any:
    return read()


def first_row_alone(table: HostTable, since: object) -> torch.Tensor:
    return torch.arange(1)


# Forks of this process could not train on the CPU once a test has run a backward on a GPU.
@pytest.mark.slow
def test_a_torn_row_is_found_in_a_run(tmp_path: Path) -> None:
    """Readers that take no lock read blocks that are half written."""
    arguments = ("read_consistently", read_without_lock, run_shared_table, range(50), tmp_path)
    with pytest.raises(AssertionError, match=r"reader-\d: (rows|version)"):
        in_processes(1, changed_runs, *arguments)


@pytest.mark.slow
def test_a_save_that_is_lost_is_found(tmp_path: Path) -> None:
    """Rows that a save leaves out are missing in the life that loads them."""
    seeds = range(6, 30)  # the first of them finds it
    arguments = ("changed", first_row_alone, run_killed_training, seeds, tmp_path)
    with pytest.raises(AssertionError, match="life [1-9]"):
        in_processes(1, changed_runs, *arguments)


def test_figures_of_a_copy_without_git_have_the_given_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEEDTORCH_COMMIT", "abc1234")
    progress = Progress(tmp_path / "progress.json", "cpu")
    progress.add({"cache"}, 2.0)
    progress.save()
    assert progress.read()["cpu"]["cache"].commit == "abc1234"


def test_features_of_a_fault_begin_anew(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "progress.json", "cpu")
    progress.add({"cache", "sleep"}, 2.0)
    progress.add({"cache"}, 1.5, "training-7")
    progress.add({"cache"}, 0.25)
    progress.save()
    found = json.loads(progress.path.read_text())["cpu"]
    assert found["cache"]["seconds"] == 0.25 and found["cache"]["fault"] == "training-7"
    assert found["sleep"]["seconds"] == 2.0 and found["sleep"]["fault"] == ""


def test_runs_of_several_machines_add_up(tmp_path: Path) -> None:
    for machine, seconds in (("cpu", 2.0), ("gpu", 1.0), ("cpu", 3.0)):
        progress = Progress(tmp_path / "progress.json", machine)
        progress.add({"cache"}, seconds)
        progress.save()
    every = progress.read()
    assert [every[machine]["cache"].seconds for machine in ("cpu", "gpu")] == [5.0, 1.0]
    assert "cpu cache" in str(progress)


def test_a_program_that_ended_the_process_is_run_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Crash:
        share = 1

        def run(self, seed: int, folder: Path) -> set[str]:
            os._exit(9)

    class Passes:
        share = 1

        def run(self, seed: int, folder: Path) -> set[str]:
            seeds.append(seed)
            return {"crashes"}

    seeds, progress = list[int](), Progress(tmp_path / "progress.json", "cpu")
    monkeypatch.setattr(command, "MODES", {"training": Crash()})
    if (child := os.fork()) == 0:
        try:
            command.run_for(60.0, progress, 5)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    monkeypatch.setattr(command, "MODES", {"training": Passes()})
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: len(seeds)))
    command.run_for(2.0, progress, 70)
    assert seeds == [5, 71]
    assert "training-5 did not end in the run before" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [progress.path]


def file_of(path: Path, **features: tuple[float, str]) -> Path:
    """A progress file with a program of each feature, or a fault and then a program."""
    progress = Progress(path, "cpu")
    for name, (seconds, fault) in features.items():
        if fault:
            progress.add({name}, 9.0, fault)
        progress.add({name}, seconds)
    progress.save()
    return path


def test_files_of_processes_add_up(tmp_path: Path) -> None:
    whole = Progress(file_of(tmp_path / "progress.json", cache=(1.0, ""), sleep=(1.0, "")), "cpu")
    parts = [
        file_of(tmp_path / "progress-1.json", cache=(2.0, "training-7"), sleep=(2.0, "")),
        file_of(tmp_path / "progress-2.json", cache=(4.0, ""), resize=(4.0, "")),
    ]
    whole.take(parts)
    found = whole.read()["cpu"]
    assert {name: (figures.seconds, figures.programs) for name, figures in found.items()} == {
        "cache": (2.0, 1),  # of the process of the fault, since then
        "resize": (4.0, 1),
        "sleep": (3.0, 2),
    }
    assert [name for name, figures in found.items() if figures.fault] == ["cache"]
    assert list(tmp_path.iterdir()) == [whole.path]
    other = file_of(tmp_path / "other.json", sleep=(5.0, ""))
    assert command.main(["--progress", str(whole.path), "--add", str(other)]) == 0
    assert whole.read()["cpu"]["sleep"].seconds == 8.0


JOB = """
import os, signal, sys, time
from pathlib import Path
import stress.__main__ as command

class Mode:
    share, is_first = 1, True
    def run(self, seed, folder):
        if job == END:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
        (Path(__file__).parent / f"{job}.{'first' if self.is_first else 'later'}").touch()
        self.is_first = False
        return {f"job {job}"}

job = sys.argv[-1]
command.MODES = {"training": Mode()}
sys.exit(command.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["", "2"])
def test_processes_run_in_parallel(
    killed: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "of a run"
    (tmp_path / "job.py").write_text(JOB.replace("END", repr(killed)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    progress = Progress(own / "progress.json", "cpu")
    code = run_jobs(2, progress, [warm_python(), "-m", "job", "--hours", "0.0001"])
    assert code == (9 if killed else 0)
    found = progress.read()["cpu"]
    assert sorted(found) == (["job 1"] if killed else ["job 1", "job 2"])
    assert all(figures.programs > 1 for figures in found.values())
    left = sorted(path.name for path in own.iterdir())
    assert left == (["progress-2.running", "progress.json"] if killed else ["progress.json"])
    if killed:
        name = (own / "progress-2.running").read_text()
        expected = f"signal 9 ended process 2 within {name}; make stress SEED={name} repeats it"
        assert expected in capfd.readouterr().out


@pytest.mark.slow
def test_an_interrupted_run_adds_what_its_processes_have_done(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    (tmp_path / "job.py").write_text(JOB.replace("END", "''"))
    parent = f"""
import signal, sys
from pathlib import Path
from stress.jobs import run_jobs
from stress.progress import Progress
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
command = [sys.executable, "-m", "job", "--hours", "1"]
run_jobs(2, Progress(Path({str(path)!r}), "cpu"), command)
"""
    known = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen([warm_python(), "-c", parent], env=os.environ | known)
    until = time.monotonic() + 60
    while len(list(tmp_path.glob("*.later"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 1
    assert sorted(Progress(path, "cpu").read()["cpu"]) == ["job 1", "job 2"]
    assert [file.name for file in tmp_path.glob("progress*")] == ["progress.json"]
