"""Tables are saved, loaded, opened and mapped; whatever does not fit changes nothing."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import NEEDS_GPU
from file_faults import fail, snapshot
from reference import as_bytes, assert_same_bytes, assert_same_storage
from safetensors.torch import load_file

import speedtorch
from speedtorch import HostTable
from speedtorch.checkpoints.rendezvous import Rendezvous
from speedtorch.files import system_calls, table_files
from speedtorch.files.new_files import replace_files
from speedtorch.memory import host_memory

GPU_KINDS = [pytest.param(kind, marks=NEEDS_GPU) for kind in ("managed", "registered", "cuda")]
FIELDS = {
    "id": ((), torch.int8),
    "weight": (3, torch.bfloat16),
    "sum": ((2, 2), torch.float64),
    "mask": (5, torch.bool),
}


def filled(table: HostTable, seed: int = 0) -> HostTable:
    """Random bits in every field (0 or 1 in bools)."""
    random = np.random.default_rng(seed)
    for name, (_, dtype) in table.fields.items():
        last = 2 if dtype == torch.bool else 256
        count = as_bytes(table[name]).numel()
        bits = torch.from_numpy(random.integers(0, last, count, np.uint8))
        table[name].copy_(bits.view(dtype).view(table[name].shape))
    return table


def small(**changes: Any) -> HostTable:
    """A table of four rows with state."""
    given = {"rows": 4, "dim": 2, "state": ("exp_avg",), "memory": "plain", **changes}
    return filled(HostTable(**given))


@pytest.mark.parametrize("kind", ["plain", "auto", *GPU_KINDS])
def test_a_table_is_restored_from_safetensors(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "t.safetensors"
    table = filled(HostTable.from_fields(50, FIELDS, kind))
    table.save(path)
    other = HostTable.from_fields(50, FIELDS, kind)
    other.load(path)
    assert_same_storage(other.record, table.record)
    opened = HostTable.open(path, kind)
    others = load_file(path)
    for name in FIELDS:
        assert_same_bytes(opened[name], table[name])
        assert_same_bytes(others[name], table[name])
    assert opened.fields == {"weight": ((3,), torch.bfloat16), **table.fields}


def test_a_weight_of_numpys_is_opened(tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", np.arange(6.0).reshape(3, 2))
    table = HostTable.open(tmp_path / "vectors.npy", "plain")
    assert (table.dim, table.dtype) == (2, torch.float64)
    assert table["weight"].tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(("rows", "dim"), [(0, (3,)), (3, (0,)), (0, (0,)), (0, ())], ids=str)
@pytest.mark.parametrize("name", ["t.safetensors", "t.npy"])
def test_empty_tables_are_restored(
    tmp_path: Path, name: str, rows: int, dim: tuple[int, ...]
) -> None:
    HostTable(rows, dim, memory="plain").save(tmp_path / name)
    opened = HostTable.open(tmp_path / name, "plain")
    assert opened["weight"].shape == (rows, *dim)
    opened.load(tmp_path / name)


@pytest.mark.slow
def test_torchs_default_device_plays_no_part(tmp_path: Path) -> None:
    with torch.device("meta"):
        table = (
            HostTable(4, 2, memory="plain").normal_().init_(torch.nn.init.xavier_normal_).fill_(3)
        )
        table.save(tmp_path / "t.npy")
        table.load(tmp_path / "t.npy")
    assert table["weight"].tolist() == [[3, 3]] * 4


def test_saving_flushes_what_the_gpu_still_does(tmp_path: Path) -> None:
    table = small()
    with mock.patch.object(host_memory, "check_owner", wraps=host_memory.check_owner) as checked:
        table.save(tmp_path / "t.npy")
        table.load(tmp_path / "t.npy")
    assert checked.called


# What does not fit


def test_a_hostile_file_takes_no_memory(tmp_path: Path) -> None:
    header = b'{"weight":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}'
    path = tmp_path / "t.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with (
        mock.patch.object(host_memory, "empty", side_effect=AssertionError),
        pytest.raises(ValueError, match=r"describes 4,398,046,511,104 bytes of data, but the"),
    ):
        HostTable.open(path, "plain")


# memory="file"


def test_a_mapped_file_holds_the_records(tmp_path: Path) -> None:
    path = tmp_path / "rows.bin"
    table = small(memory="file", path=path)
    assert (table.memory, table["weight"].device.type) == ("file", "cpu")
    table.flush()
    assert path.read_bytes() == as_bytes(table.record).numpy().tobytes()
    rows = np.memmap(path, np.float32, "r", shape=(4, 4))
    assert np.array_equal(rows.view(np.int32), table.record.view(torch.int32).numpy())


def test_a_mapped_file_remains_when_its_table_is_closed(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with small(memory="file", path=tmp_path / "rows.bin") as table:
        content = as_bytes(table.record).numpy().tobytes()
    del table
    assert snapshot(tmp_path) == {"rows.bin": content}
    assert set(os.listdir("/proc/self/fd")) <= set(before)


def test_a_flush_syncs_the_mapped_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = small(memory="file", path=tmp_path / "rows.bin")
    with monkeypatch.context() as patch:
        fail(patch, "fsync")
        with pytest.raises(OSError, match="Input/output error"):
            table.flush()
    table.flush()


def test_a_table_is_opened_into_a_mapped_file(tmp_path: Path) -> None:
    small().save(tmp_path / "t.safetensors")
    table = HostTable.open(tmp_path / "t.safetensors", "file", path=tmp_path / "rows.bin")
    assert_same_storage(table.record, small().record)


def test_an_error_of_a_file_is_pickled_with_its_text(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError) as raised,
        system_calls.path_in_errors(str(tmp_path), "load it again"),
    ):
        raise OSError(errno.EIO, "Input/output error")
    assert "load it again" in str(raised.value)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_opening_that_fails_leaves_no_mapped_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small().save(tmp_path / "t.safetensors")
    before = snapshot(tmp_path)
    with (
        mock.patch.object(table_files.StoredField, "read_into", side_effect=OSError("no more")),
        pytest.raises(OSError, match="no more"),
    ):
        HostTable.open(tmp_path / "t.safetensors", "file", path=tmp_path / "rows.bin")
    assert snapshot(tmp_path) == before


def test_every_file_call_goes_through_the_table_of_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = set()
    for name in vars(system_calls.calls):
        real = getattr(system_calls.calls, name)
        note = lambda *args, real=real, name=name: (used.add(name), real(*args))[1]  # noqa: E731
        monkeypatch.setattr(system_calls.calls, name, note)
    table = small(memory="file", path=tmp_path / "rows.bin")
    table.save(tmp_path / "t.npy")
    table.save(tmp_path / "t.npy")
    table.load(tmp_path / "t.npy")
    table.close()
    HostTable.open(tmp_path / "t.npy", "mapped")
    speedtorch.save(tmp_path / "run", a=torch.ones(2))
    speedtorch.load(tmp_path / "run")
    rendezvous = Rendezvous(str(tmp_path / "ranks"), 0, 1, 1.0)
    rendezvous.make()
    with rendezvous:
        assert rendezvous.all_gather(1) == [1]
    with pytest.raises(RuntimeError), replace_files([tmp_path / "a"]) as (file,):
        file.write(bytes(16 << 20))
        raise RuntimeError
    assert used == set(vars(system_calls.calls))
