"""DLRM on several processes: what they train, score and save is what one process does."""

from __future__ import annotations

import copy
import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_processes import in_processes
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.nn.parallel import DistributedDataParallel
from warm_python import finished, warm_python

import speedtorch
from demos import dlrm, runner
from demos.click_batches import ClickBatches
from demos.criteo import Clicks, read_clicks, write_clicks
from demos.dlrm import DLRM, held_out_score
from demos.loop import train
from demos.processes import SINGLE_PROCESS, Processes, join_torchrun
from speedtorch.__main__ import main

ROWS, DIM, BATCH = 100, 4, 51
CHOICES = ["--rows", str(ROWS), "--dim", str(DIM), "--batch", str(BATCH), "--epochs", "1"]
# It keeps something of each row, and does not divide gradients near 0, of any sign, by their size.
CHOICES += ["--optimizer", "ASGD", "--lr", "0.1"]
# Sums of float32 in another order differ in the last of 24 bits, and 46 steps add to that: losses
# are within 1e-6 of each other, and rows, which go a thousandth of their length, go the same way
# within 1e-4 of that. Were the means of uneven shares to count as much as each other, the second
# loss would differ by 5e-4, and most of what was learnt by 1e-2.
CLOSE, CLOSE_WAYS = 1e-5, 1e-3


def made(processes: Processes = SINGLE_PROCESS) -> tuple[DLRM, torch.optim.Optimizer, Any]:
    model = DLRM(ROWS, DIM)
    loss_of = processes.distribute(model, model.loss)
    optimizer = torch.optim.ASGD(model.parameters(), lr=0.1)
    speedtorch.attach(optimizer, model)
    return model, optimizer, loss_of


def numbers(model: DLRM, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All that was learnt, and what the optimizer keeps."""
    found = model.state_dict()
    for parameter, entries in optimizer.state_dict()["state"].items():
        found |= {f"{name} of {parameter}": value for name, value in entries.items()}
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_clicks_are_read_after_the_first_process_has_written_them(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    clicks = Clicks(np.float32([0, 1, 1, 0]), np.zeros((4, 13)), np.zeros((4, 26)))

    def read(*_: Any, **__: Any) -> Clicks:
        calls.append("read")
        return clicks

    monkeypatch.setattr(dlrm, "write_clicks", lambda *_, **__: calls.append("write"))
    monkeypatch.setattr(dlrm, "read_clicks", read)
    monkeypatch.setattr(Processes, "wait", lambda _: calls.append("wait"))
    monkeypatch.setattr(Processes, "distribute", lambda _, model, loss: loss)
    settings = dlrm.Settings(out=tmp_path, rows=ROWS, dim=DIM, held_out=0.5)
    demo = dlrm.DLRMDemo(settings, torch.device("cpu"), Processes(rank, 2))
    assert demo.batches().examples == 2
    assert calls == ["write", "wait", "read"][rank:]


@pytest.mark.examples
@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torchrun_trains_scores_and_saves_what_one_process_does(tmp_path: Path) -> None:
    # 2,296 are trained on: each batch is uneven, and of the last, which is of one, a process has
    # none.
    write_clicks(tmp_path / "clicks", lines=2551)
    torchrun = "-m torch.distributed.run --nproc-per-node 2 --standalone -m speedtorch demo dlrm"
    command = [warm_python(), *torchrun.split(), "--device", "cpu", *CHOICES]
    command += ["--clicks", str(tmp_path / "clicks"), "--out", str(tmp_path / "out")]
    run = finished(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("saved ") == 1 and "on 2 processes" in run.stdout
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint", "report.json"]

    training, held = read_clicks(tmp_path / "clicks").split(0.1)
    batches = ClickBatches(training, ROWS, batch=BATCH)
    assert len([*batches][-1]) == 1
    model, optimizer, _ = made()
    first = copy.deepcopy(model.state_dict())
    outcome = train(model, optimizer, batches)
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert found["processes"] == 2 and found["training"]["examples"] == outcome.examples
    assert found["table_bytes"] == sum(embedding.table.nbytes for embedding in model.embeddings())
    assert found["training"]["losses"] == pytest.approx(outcome.losses, rel=CLOSE)
    expected = held_out_score(model, held)
    # Two lines whose logits are about the same may change places.
    assert found["after"]["auc"] == pytest.approx(expected.auc, abs=1e-3)
    assert found["after"]["normalised_entropy"] == pytest.approx(
        expected.normalised_entropy, rel=CLOSE
    )

    trained = copy.deepcopy(numbers(model, optimizer))
    train(model, optimizer, batches)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    load(states, checkpoint_id=tmp_path / "out" / "checkpoint")
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    loaded = numbers(model, optimizer)
    assert loaded.keys() == trained.keys()
    for name, value in trained.items():
        far, went = loaded[name] - value, value - first.get(name, torch.zeros(()))
        assert far.norm() <= CLOSE_WAYS * went.norm() and went.any(), name
    score = held_out_score(model, held)
    assert score.auc == found["after"]["auc"]


def few_clicks() -> Clicks:
    random = np.random.default_rng(0)
    categories = random.integers(0, 1 << 32, (11, 26), np.uint32)
    clicked = (np.arange(11) % 3 == 0).astype(np.float32)
    return Clicks(clicked, random.random((11, 13), np.float32), categories)


def check_score_and_stop() -> None:
    processes = Processes(dist.get_rank(), dist.get_world_size())
    clicks, calls = few_clicks(), 0
    model, optimizer, loss_of = made(processes)
    dlrm._SCORED_AT_ONCE = 4  # three parts, and for two processes a fourth one, of none
    assert held_out_score(model, clicks, processes) == held_out_score(DLRM(ROWS, DIM), clicks)

    def stop() -> bool:
        nonlocal calls
        calls += 1
        return processes.rank == 1 and calls == 3

    batches = ClickBatches(clicks, ROWS, batch=2, processes=processes)
    outcome = train(model, optimizer, batches, loss_of=loss_of, processes=processes, stop=stop)
    assert (outcome.steps, outcome.examples, outcome.finished) == (3, 6, False)


@pytest.mark.examples
def test_processes_score_as_one_does_and_one_of_them_stops_all() -> None:
    in_processes(2, check_score_and_stop)


def check_no_model_at_the_end_of_the_group(folder: Path) -> None:
    processes, found = Processes(dist.get_rank(), dist.get_world_size()), []

    @contextmanager
    def join(device: torch.device) -> Iterator[Processes]:
        yield processes
        found.append(sum(type(each) is DistributedDataParallel for each in gc.get_objects()))

    settings = dlrm.Settings(
        clicks=folder / "clicks", out=folder, rows=ROWS, dim=DIM, batch=BATCH, epochs=1
    )
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "join_torchrun", join)
            runner.run(dlrm.DLRMDemo, settings)
    finally:
        gc.enable()
    assert found == [0]


@pytest.mark.examples
def test_a_model_ends_before_the_process_group(tmp_path: Path) -> None:
    # The last reference to a group, held by DistributedDataParallel, waits for gloo's threads with
    # the GIL, and these may need the GIL.
    write_clicks(tmp_path / "clicks", lines=200)
    in_processes(2, check_no_model_at_the_end_of_the_group, tmp_path)


def test_the_shares_of_a_batch_are_the_batch() -> None:
    clicks = few_clicks()
    shares = [ClickBatches(clicks, ROWS, batch=5, processes=Processes(k, 3)) for k in range(3)]
    sizes = []
    for whole, *parts in zip(ClickBatches(clicks, ROWS, batch=5), *shares, strict=True):
        assert torch.equal(torch.cat([part.numbers for part in parts]), whole.numbers)
        assert {len(part) for part in parts} == {len(whole)}
        sizes.append([len(part.clicked) for part in parts])
    assert sizes == [[2, 2, 1], [2, 2, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("options", "what"), [("dlrm --compare", "--compare"), ("glove", "this demonstration")]
)
def test_what_is_for_one_process_is_refused_for_two(
    options: str,
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(runner, "join_torchrun", lambda device: nullcontext(Processes(0, 2)))
    assert main(["demo", *options.split(), "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert f"{what} requires one process, got 2. Omit torchrun" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_each_process_needs_a_gpu_and_a_single_one_joins_no_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("TORCHELASTIC_RUN_ID", "a"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = "have its own GPU, got 2 processes and 1 GPUs. Use torchrun --nproc"
    with pytest.raises(ValueError, match=message), join_torchrun(torch.device("cuda")):
        pass
    monkeypatch.setenv("WORLD_SIZE", "1")
    with join_torchrun(torch.device("cpu")) as processes:
        assert processes is SINGLE_PROCESS
