"""Broken files are refused before anything changes, and a save that fails leaves the old one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from file_faults import Journal, fail, interrupt, of_one_save, snapshot
from safetensors.torch import save_file

from speedtorch import DataGadget, Embedding, HostTable
from speedtorch.files import new_files, system_calls, table_files
from speedtorch.files.npy_format import npy_header
from speedtorch.files.safetensors_format import safetensors_header
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
        for name in names:
            (tmp_path / name).unlink(missing_ok=True)
        for name, content in old.items():
            (tmp_path / name).write_bytes(content)
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


HEADERS = {
    "beyond the file": (9).to_bytes(8, "little") + b"{}      ",
    "beyond the limit": (1 << 40).to_bytes(8, "little") + b"{}",
    "without a field": (2).to_bytes(8, "little") + b"{}",
    "a number without rows": b"@\0\0\0\0\0\0\0"
    + b'{"weight":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}'.ljust(64)
    + b"x",
}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("beyond the file", "header length is 9 bytes. The file has 16 bytes"),
        ("beyond the limit", "header length is 1,099,511,627,776 bytes"),
        ("without a field", "has no field"),
        ("a number without rows", "need the same number of rows"),
    ],
)
def test_hostile_safetensors_files_are_refused(tmp_path: Path, case: str, message: str) -> None:
    (tmp_path / "t.safetensors").write_bytes(HEADERS[case])
    with (
        pytest.raises(ValueError, match=rf"t.safetensors: .*{message}"),
        open_fields(tmp_path / "t.safetensors"),
    ):
        pass


@pytest.mark.parametrize("suffix", ["safetensors", "npy"])
def test_a_shape_beyond_all_strides_is_refused_though_it_holds_nothing(
    tmp_path: Path, suffix: str
) -> None:
    shape = (0, 1 << 40, 1 << 40)
    header = {
        "safetensors": safetensors_header({"weight": (shape, torch.float32)}),
        "npy": npy_header(shape, torch.float32),
    }[suffix]
    (tmp_path / f"t.{suffix}").write_bytes(header)
    message = rf"t.{suffix}: 'weight': rows of \[0, 10995.*\] span more than 2\^63 - 1 bytes"
    with pytest.raises(ValueError, match=message):
        HostTable.open(tmp_path / f"t.{suffix}", "plain")


def test_fields_of_different_row_counts_are_no_table(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2), "b": torch.zeros(3)}, tmp_path / "t.safetensors")
    with (
        pytest.raises(ValueError, match="need the same number of rows"),
        open_fields(tmp_path / "t.safetensors"),
    ):
        pass


def test_an_error_lists_some_of_many_fields(tmp_path: Path) -> None:
    fields = {f"f{number}": torch.zeros(1) for number in range(50)}
    save_fields(tmp_path / "t.safetensors", fields)
    with pytest.raises(ValueError, match=r"Its fields are f0, f1, .*, and 30 more. Pass the rows"):
        Embedding.from_pretrained(tmp_path / "t.safetensors")
    with pytest.raises(ValueError, match=r"must be one of the file's f0, f1, .*, and 30 more"):
        DataGadget(tmp_path / "t.safetensors")


def test_a_save_in_a_folder_that_is_gone_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError, match=r"t\.npy"):
        save_fields("t.npy", {"weight": torch.zeros(2)})


def test_other_names_than_those_of_the_table_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "t.safetensors")
    message = r"t.safetensors: the file has the fields \['a'\], but the table has \['weight'\]"
    with pytest.raises(ValueError, match=message):
        HostTable(2, 1, memory="plain").load(tmp_path / "t.safetensors")


def test_missing_npy_files_are_named(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError, match=r"neither this file nor .*t.<field>.npy exists"),
        open_fields(tmp_path / "t.npy"),
    ):
        pass
    save_fields(tmp_path / "t.npy", {"a": torch.zeros(2)})
    with (
        pytest.raises(FileNotFoundError, match="t.b.npy"),
        open_fields(tmp_path / "t.npy", ("a", "b")),
    ):
        pass


def test_an_npy_number_without_rows_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.float32(3))
    with (
        pytest.raises(ValueError, match="need the same number of rows"),
        open_fields(tmp_path / "t.npy"),
    ):
        pass


def test_rows_that_are_not_contiguous_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows of shape \(2,\) must be contiguous"):
        save_fields(tmp_path / "t.npy", {"weight": torch.zeros(2, 3).t()})
    assert snapshot(tmp_path) == {}
