"""The stress test finds no difference, and would find a lost row and a torn row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stress.__main__ as command
from stress.modes import MODES
from stress.progress import Progress

from speedtorch.step.row_store import RowStore

PROGRAMS = {"training": 25}
"""Of each kind in the ordinary run."""


@pytest.fixture(autouse=True)
def as_a_run(one_thread: None) -> Iterator[None]:
    """Programs run as in a stress run."""
    yield


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MODES)
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

    def lossy(self: RowStore, names: Any, leaving: Any, arriving: Any) -> None:
        if leaving is None or not len(leaving.ids) or int(leaving.ids[-1]) % 5 != 3:
            exchange(self, names, leaving, arriving)
            return
        fields, last = self.fields(names), int(leaving.ids[-1])
        before = [each[last].clone() for each in fields]
        exchange(self, names, leaving, arriving)
        for field, row in zip(fields, before, strict=True):
            field[last] = row

    monkeypatch.setattr(RowStore, "exchange", lossy)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_lost_row_is_found_and_its_seed_finds_it_again(
    lost_rows: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(tmp_path / "progress.json", "cpu")
    count, failed = command.run_for(2.0, progress, 0)
    assert 0 < failed <= count
    said = capsys.readouterr().out
    seed = said.split(" found a fault")[0].rpartition("\n")[2]
    assert f"make stress SEED={seed} repeats it" in said
    found = said.partition("found a fault: ")[2].split("\n")[0]
    assert command.main(["--seed", seed]) == 1
    assert f"{seed} found a fault: {found}" in capsys.readouterr().out


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
