"""Broken files are refused before anything changes, and a save that fails leaves the old one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from file_faults import Journal, fail, interrupt, of_one_save, restore, snapshot

from speedtorch.files import new_files, system_calls, table_files
from speedtorch.files.table_files import open_fields, save_fields


@pytest.mark.usefixtures("small_file_blocks")
@pytest.mark.parametrize("suffix", ["safetensors", "npy"])
@pytest.mark.parametrize("call", ["open", "write", "fsync", "rename"])
def test_a_torn_save_leaves_the_old_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, suffix: str
) -> None:
    path = tmp_path / f"t.{suffix}"
    save_fields(path, {"weight": torch.zeros(50), "exp_avg": torch.zeros(50)})
    before = snapshot(tmp_path)
    fail(monkeypatch, call, {"open": 2, "write": 4, "fsync": 1, "rename": 1}[call])
    with pytest.raises(OSError, match="Input/output error"):
        save_fields(path, {"weight": torch.ones(50), "exp_avg": torch.ones(50)})
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("suffix", ["safetensors", "npy"])
def test_a_power_loss_during_a_save_leaves_the_old_or_the_new_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    path = tmp_path / f"t.{suffix}"
    save_fields(path, {"weight": torch.zeros(4), "exp_avg": torch.zeros(4)})
    old = snapshot(tmp_path)
    with monkeypatch.context() as patch:
        journal = Journal(patch, tmp_path)
        save_fields(path, {"weight": torch.ones(4), "exp_avg": torch.ones(4)})
    new = snapshot(tmp_path)
    for end in range(len(journal.events) + 1):
        for state in journal.after_power_loss(journal.events[:end]):
            assert of_one_save(state, path.name, *old) in (old, new)
    for state in journal.after_power_loss(journal.events):
        assert {name: state[name] for name in new} == new


@pytest.mark.parametrize("there", [True, False], ids=["old files", "no old files"])
@pytest.mark.parametrize("suffix", ["safetensors", "npy"])
def test_an_interrupt_at_any_line_of_a_save_leaves_whole_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, there: bool
) -> None:
    monkeypatch.setattr(system_calls.calls, "fsync", lambda descriptor: None)
    path, states = tmp_path / f"t.{suffix}", []
    for values in (torch.zeros(4), torch.ones(4)):
        save_fields(path, {"weight": values, "exp_avg": values})
        states.append(snapshot(tmp_path))
    names, new = tuple(states[1]), states[1]
    old = states[0] if there else {}
    work = partial(save_fields, path, {"weight": torch.ones(4), "exp_avg": torch.ones(4)})
    number, interrupted = 0, True
    while interrupted:
        restore(tmp_path, names, old)
        interrupted = interrupt(work, number, new_files, table_files, system_calls, each="line")
        found = {name: data for name, data in snapshot(tmp_path).items() if name[0] != "."}
        assert found in (old, new), number
        number += 1
    assert number > 100


def test_a_read_that_fails_half_way_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_fields(tmp_path / "t.npy", {"weight": torch.zeros(50)})
    fail(monkeypatch, "read", 2)
    with (
        pytest.raises(OSError, match=r"old and new rows now. Load it again: '.*t.npy'"),
        open_fields(tmp_path / "t.npy") as stored,
    ):
        stored["weight"].read_into(torch.zeros(50))


@pytest.mark.parametrize("suffix", ["safetensors", "npy"])
def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t.{suffix}"
    save_fields(path, {"weight": torch.zeros(2, 3)})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=str(path)), open_fields(path):
            pass
