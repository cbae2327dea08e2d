"""A table in several .npy files is old or new as a whole, whatever else happens to it."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest
import torch
from file_faults import fail
from killed_saves import FIELDS, TURNS, Table
from warm_python import run_warm

from speedtorch.files import system_calls, table_files
from speedtorch.files.table_files import open_fields, save_fields


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("turn", range(TURNS))
@pytest.mark.parametrize("kind", ["table", "first table"])
def test_a_save_that_is_killed_at_any_call_leaves_the_old_or_the_new_table(
    tmp_path: Path, kind: str, turn: int
) -> None:
    done = run_warm("-m", "killed_saves", kind, tmp_path / "t", str(turn))
    kills, switched = map(int, done.stdout.split())
    assert kills > 30 and 10 < switched < kills - 10


@pytest.mark.slow
def test_processes_that_load_beside_others_that_save_see_one_save(tmp_path: Path) -> None:
    for line in run_warm("-m", "saves_beside_loads", tmp_path / "t").stdout.splitlines():
        opened, steps = map(int, line.split())
        assert opened > steps > 1


def test_threads_that_load_beside_others_that_save_see_one_save(tmp_path: Path) -> None:
    table = Table(tmp_path / "t", anew=False)
    table.save(0)
    ended = threading.Event()

    def save(first: int) -> None:
        for step in range(first, first + 40):
            table.save(step)

    def load(names: tuple[str, ...] | None) -> None:
        while not ended.is_set():
            table.opened(names)

    with ThreadPoolExecutor(4) as threads:
        writers = [threads.submit(save, first) for first in (1, 1001)]
        readers = [threads.submit(load, names) for names in (None, FIELDS)]
        wait(writers)
        ended.set()
    for work in writers + readers:
        work.result()
    table.check_files(table.step())


def test_a_save_that_switches_between_two_openings_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(tmp_path / "t", anew=False)
    table.save(0)
    real, opened = system_calls.calls.open, []

    def open_file(path: str, *flags: int) -> int:
        if path.endswith("t.weight.npy") and ".switch" not in path and not opened:
            opened.append(path)
            table.save(1)
        return real(path, *flags)

    monkeypatch.setattr(system_calls.calls, "open", open_file)
    assert table.opened(FIELDS[::-1]) == 1


def test_a_table_that_is_replaced_at_each_try_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(tmp_path / "t", anew=False)
    table.save(0)
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(table_files, "_TRIES", 3)
    monkeypatch.setattr(os.path, "samestat", lambda *files: False)
    with pytest.raises(
        OSError, match=r"other saves replaced the file during each of 3 tries: .*t.npy"
    ):
        table.step()
    assert set(os.listdir("/proc/self/fd")) <= set(before)


def test_a_killed_save_with_a_field_more_is_read_whole_and_then_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.npy"
    save_fields(path, {"m": torch.zeros(2), "v": torch.zeros(2)})
    (tmp_path / ".t.npy.switch").mkdir()
    for name in ("m", "v", "weight"):
        np.save(tmp_path / ".t.npy.switch" / f"t.{name}.npy", np.ones(2))
    os.replace(tmp_path / ".t.npy.switch" / "t.v.npy", tmp_path / "t.v.npy")
    with open_fields(path) as stored:
        assert list(stored) == ["weight", "m", "v"]
        for field in stored.values():
            field.read_into(rows := torch.zeros(2, dtype=torch.float64))
            assert rows.tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"/t.weight.npy would be read as part of this table"):
        save_fields(path, {"m": torch.zeros(2), "v": torch.zeros(2)})
    fail(monkeypatch, "write")
    with pytest.raises(OSError, match="Input/output error"):
        save_fields(path, {name: torch.zeros(2) for name in ("m", "v", "weight")})
    names = ["t.m.npy", "t.v.npy", "t.weight.npy"]
    assert sorted(os.listdir(tmp_path)) == names
    assert all(np.load(tmp_path / name).tolist() == [1, 1] for name in names)


def test_a_file_that_numpy_has_replaced_is_read(tmp_path: Path) -> None:
    save_fields(tmp_path / "t.npy", {"m": torch.zeros(2), "v": torch.zeros(2)})
    np.save(tmp_path / "t.m.npy", np.ones(2, np.float32))
    with open_fields(tmp_path / "t.npy") as stored:
        stored["m"].read_into(rows := torch.zeros(2))
    assert rows.tolist() == [1, 1]
