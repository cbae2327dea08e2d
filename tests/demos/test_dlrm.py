"""DLRM: Criteo's format, plain torch's numbers bit for bit, and `demo dlrm` as a user runs it."""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from demo_commands import DEMOS, demo_file, facts, run_demo, written
from safetensors.torch import load_file

import speedtorch
from demos import dlrm
from demos.click_batches import ClickBatches
from demos.criteo import Clicks, read_clicks, write_clicks
from demos.dlrm import DLRM, held_out_score
from demos.loop import train
from speedtorch.__main__ import main

LINE = "1\t" + "\t".join(["", "-2", *"0" * 11]) + "\t" + "\t".join(["68fd1e64", "", *"f" * 24])


@pytest.fixture(scope="module")
def clicks() -> Clicks:
    return read_clicks(demo_file("dlrm"))


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
def test_fields_are_read_and_empty_ones_are_0(tmp_path: Path, zipped: bool, end: str) -> None:
    empty = "0" + "\t" * 39
    text = LINE + end + end + empty + end + LINE
    found = read_clicks(written(tmp_path / "clicks", text, zipped))
    assert found.clicked.tolist() == [1, 0, 1] and len(found) == 3
    assert found.numbers.shape == (3, 13) and not found.numbers.any()
    assert found.categories[0].tolist() == [0x68FD1E64, 0] + [15] * 24
    assert not found.categories[1].any()
    assert [array.dtype for array in vars(found).values()] == [np.float32, np.float32, np.uint32]


def test_numbers_become_logarithms_and_categories_remainders(tmp_path: Path) -> None:
    text = LINE.replace("\t\t-2\t0", "\t7\t-2\t100").replace("68fd1e64", "FFFFFFFF")
    found = read_clicks(written(tmp_path / "clicks", text))
    assert found.numbers[0, :3].tolist() == pytest.approx([np.log(8), 0, np.log(101)])
    (batch,) = ClickBatches(found, 1000, batch=5)
    assert batch.ids["C1"].tolist() == [(2**32 - 1) % 1000] and batch.ids["C3"].tolist() == [15]


def test_no_more_lines_are_read_than_requested(tmp_path: Path) -> None:
    path = written(tmp_path / "clicks", f"{LINE}\n{LINE}\nbroken\n")
    assert len(read_clicks(path, lines=2)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (LINE.removeprefix("1\t"), "got 39: '\\t-2\\t0"),
        (LINE.removeprefix("1\t"), "Use Criteo's train.txt; test.txt has no labels."),
        (LINE + "\t", "got 41: "),
        ("2" + LINE[1:], "a label, 0 or 1"),
        (LINE.replace("-2", "1.5"), "13 integers"),
        (LINE.replace("68fd1e64", "0x8fd1e6"), "26 categories of up to 8 hexadecimal digits"),
        (LINE.replace("68fd1e64", "168fd1e64"), "Correct the line."),
        ("x" * 100, "got 1: '" + "x" * 60 + "...'"),
    ],
    ids=lambda value: "",
)
def test_the_error_of_a_broken_line_has_its_number_and_a_remedy(
    tmp_path: Path, line: str, message: str
) -> None:
    path = written(tmp_path / "clicks", f"{LINE}\n\n{line}\n")
    with pytest.raises(ValueError) as error:
        read_clicks(path)
    assert str(error.value).startswith(f"{path}, line 3: expected 40 fields")
    assert message in str(error.value)


def test_what_is_made_up_depends_on_the_seed_alone(tmp_path: Path) -> None:
    for name, seed in (("same", 0), ("other", 1)):
        write_clicks(tmp_path / name, lines=3000, seed=seed)
    same, other = ((tmp_path / name).read_bytes() for name in ("same", "other"))
    assert same == demo_file("dlrm").read_bytes() != other
    found = read_clicks(demo_file("dlrm"))
    assert 0.2 < found.clicked.mean() < 0.35
    assert ((found.categories == 0).mean(0) > 0.02).all()
    assert ((found.categories == 0).mean(0) < 0.1).all()


def test_the_last_lines_are_held_out_and_must_have_both_kinds(clicks: Clicks) -> None:
    first, last = clicks.split(0.25)
    assert np.array_equal(np.concatenate([first.clicked, last.clicked]), clicks.clicked)
    assert len(last) == 750
    with pytest.raises(ValueError, match="the last 0 of 3,000, must include.*more lines"):
        clicks.split(1e-9)
    with pytest.raises(ValueError, match="held_out must be above 0 and below 1, got 1"):
        clicks.split(1)


def test_every_epoch_has_each_line_once_in_its_own_order(clicks: Clicks) -> None:
    batches = ClickBatches(clicks, 10**6, batch=1000, epochs=2, seed=3)
    found = [torch.stack([*batch.ids.values()], 1) for batch in batches]
    assert len(batches) == len(found) == 6
    first, second = torch.cat(found[:3]), torch.cat(found[3:])
    assert not torch.equal(first, second)
    assert sorted(first.tolist()) == sorted(second.tolist())


@pytest.mark.examples
@pytest.mark.usefixtures("one_thread")
def test_training_raises_the_auc_clearly_above_chance(tmp_path: Path) -> None:
    write_clicks(tmp_path / "clicks", lines=30_000)
    first, held = read_clicks(tmp_path / "clicks").split(0.2)
    model = DLRM(5000, 8)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    speedtorch.attach(optimizer, model)
    before = held_out_score(model, held)
    train(model, optimizer, ClickBatches(first, 5000, batch=256))
    after = held_out_score(model, held)
    assert 0.4 < before.auc < 0.6 and after.samples == 6000
    assert after.auc > 0.65 and after.normalised_entropy < min(0.98, before.normalised_entropy)


def test_the_saved_model_scores_as_the_report_says(clicks: Clicks, tmp_path: Path) -> None:
    assert run_demo("dlrm", tmp_path) == 0
    model = DLRM(100, 4)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert asdict(held_out_score(model, clicks.split(0.1)[1])) == facts(tmp_path)["after"]


def test_without_a_file_one_is_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlrm, "write_clicks", partial(write_clicks, lines=2000))
    options = ("--out", str(tmp_path), "--device", "cpu", "--seed", "3", "--lines", "1500")
    assert main(["demo", "dlrm", *options, *DEMOS["dlrm"].small]) == 0
    assert sorted(os.listdir(tmp_path)) == ["clicks.txt", *DEMOS["dlrm"].files]
    assert facts(tmp_path)["after"]["samples"] == 150
