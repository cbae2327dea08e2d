"""Tables are saved, loaded, opened and mapped; whatever does not fit changes nothing."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import NEEDS_GPU
from file_faults import fail, snapshot
from reference import DTYPES, as_bytes, assert_same_bytes, assert_same_storage, dtype_name
from safetensors.torch import load_file, save_file

import speedtorch
from speedtorch import HostTable
from speedtorch.checkpoints.rendezvous import Rendezvous
from speedtorch.files import system_calls, table_files
from speedtorch.files.new_files import replace_files
from speedtorch.files.npy_format import NPY_DTYPES
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


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d in NPY_DTYPES.values()], ids=dtype_name)
def test_a_table_is_restored_from_npy(tmp_path: Path, dtype: torch.dtype) -> None:
    table = small(dtype=dtype)
    table.save(tmp_path / "t.npy")
    assert list(snapshot(tmp_path)) == ["t.exp_avg.npy", "t.weight.npy"]
    opened = HostTable.open(tmp_path / "t.npy", "plain")
    assert_same_storage(opened.record, table.record)
    array = np.load(tmp_path / "t.exp_avg.npy")
    assert array.tobytes() == table.numpy("exp_avg").tobytes()


def test_a_weight_of_numpys_is_opened(tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", np.arange(6.0).reshape(3, 2))
    table = HostTable.open(tmp_path / "vectors.npy", "plain")
    assert (table.dim, table.dtype) == (2, torch.float64)
    assert table["weight"].tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(("rows", "dim"), [(0, 3), (3, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("name", ["t.safetensors", "t.npy"])
def test_empty_tables_are_restored(tmp_path: Path, name: str, rows: int, dim: int) -> None:
    HostTable(rows, dim, memory="plain").save(tmp_path / name)
    opened = HostTable.open(tmp_path / name, "plain")
    assert (opened.rows, opened.dim) == (rows, dim)
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


# ------------------------------------------------------------------------------------------------
# What does not fit
# ------------------------------------------------------------------------------------------------


def other_rows(path: Path) -> None:
    """One row too many."""
    small(rows=5).save(path)


def other_dtype(path: Path) -> None:
    """Elements of another size."""
    small(dtype=torch.float64).save(path)


def other_shape(path: Path) -> None:
    """The right number of bytes in another shape."""
    small(dim=(2, 1)).save(path)


def other_names(path: Path) -> None:
    """A field too many."""
    small(state=("exp_avg", "step")).save(path)


def cut_off(path: Path) -> None:
    """The last byte is missing."""
    small().save(path)
    for file in path.parent.glob("t*"):
        os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize("name", ["t.safetensors", "t.npy"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            other_rows,
            r"'weight' is torch.float32 \[5, 2\], but the table needs torch.float32 \[4, 2\]",
        ),
        (other_dtype, r"'weight' is torch.float64 \[4, 2\], but the table needs torch.float32"),
        (other_shape, r"'weight' is torch.float32 \[4, 2, 1\], but the table needs"),
        (cut_off, "describes"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(
    tmp_path: Path, name: str, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(tmp_path / name)
    table = filled(small(), seed=5)
    with pytest.raises(ValueError, match=message):
        table.load(tmp_path / name)
    assert_same_storage(table.record, filled(small(), seed=5).record)


def test_other_names_change_nothing(tmp_path: Path) -> None:
    other_names(tmp_path / "t.safetensors")
    table = filled(small(), seed=5)
    with pytest.raises(ValueError, match=r"has the fields .*'step'.*, but the table has \['exp_"):
        table.load(tmp_path / "t.safetensors")
    assert_same_storage(table.record, filled(small(), seed=5).record)


def test_the_last_field_of_npy_is_checked_before_the_first_is_read(tmp_path: Path) -> None:
    small().save(tmp_path / "t.npy")
    np.save(tmp_path / "t.exp_avg.npy", np.zeros((4, 3), np.float32))
    table = filled(small(), seed=5)
    with pytest.raises(ValueError, match=r"t.exp_avg.npy: 'exp_avg' is torch.float32 \[4, 3\]"):
        table.load(tmp_path / "t.npy")
    assert_same_storage(table.record, filled(small(), seed=5).record)


@pytest.mark.parametrize("call", ["save", "load"])
def test_other_endings_are_refused(tmp_path: Path, call: str) -> None:
    with pytest.raises(ValueError, match=r"t.pt: expected a name that ends in .safetensors or .n"):
        getattr(small(), call)(tmp_path / "t.pt")


def test_a_hostile_file_takes_no_memory(tmp_path: Path) -> None:
    header = b'{"weight":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}'
    path = tmp_path / "t.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with (
        mock.patch.object(host_memory, "empty", side_effect=AssertionError),
        pytest.raises(ValueError, match=r"describes 4,398,046,511,104 bytes of data, but the"),
    ):
        HostTable.open(path, "plain")


def test_files_without_a_common_row_count_are_no_table(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2), "b": torch.zeros(3)}, tmp_path / "t.safetensors")
    with pytest.raises(ValueError, match="need the same number of rows"):
        HostTable.open(tmp_path / "t.safetensors", "plain")


def test_a_save_that_fails_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small().save(tmp_path / "t.safetensors")
    before = snapshot(tmp_path)
    fail(monkeypatch, "rename")
    with pytest.raises(OSError, match="Input/output error"):
        filled(small(), seed=5).save(tmp_path / "t.safetensors")
    assert snapshot(tmp_path) == before


# ------------------------------------------------------------------------------------------------
# memory="file"
# ------------------------------------------------------------------------------------------------


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


def test_an_existing_file_is_not_laid_under_a_table(tmp_path: Path) -> None:
    (tmp_path / "rows.bin").write_bytes(b"rows")
    with pytest.raises(FileExistsError, match="exists already; delete it or choose another path"):
        small(memory="file", path=tmp_path / "rows.bin")
    assert snapshot(tmp_path) == {"rows.bin": b"rows"}


def test_a_table_is_not_saved_over_its_own_rows(tmp_path: Path) -> None:
    table = small(memory="file", path=tmp_path / "rows.npy")
    with pytest.raises(ValueError, match="the rows of the table are in this file. Choose another"):
        table.save(tmp_path / "rows.npy")


def test_a_table_is_not_saved_over_its_own_rows_as_one_field_of_it(tmp_path: Path) -> None:
    table = small(memory="file", path=tmp_path / "rows.weight.npy", state=("m",))
    table.fill_(3, "m")
    with pytest.raises(ValueError, match="rows.weight.npy: the rows of the table are in this file"):
        table.save(tmp_path / "rows.npy")
    assert list(snapshot(tmp_path)) == ["rows.weight.npy"]


def test_an_error_of_a_file_is_pickled_with_its_text(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError) as raised,
        system_calls.path_in_errors(str(tmp_path), "load it again"),
    ):
        raise OSError(errno.EIO, "Input/output error")
    assert "load it again" in str(raised.value)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


@pytest.mark.parametrize("content", [b"", b"{}\n"])
def test_a_safetensors_file_of_a_few_bytes_raises(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=f"has at least 8 bytes, got {len(content)}"):
        HostTable.open(tmp_path / "t.safetensors")


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


@pytest.mark.parametrize("beside", ["t.npy", "t.gone.npy"])
def test_npy_files_that_open_would_mix_in_are_refused(tmp_path: Path, beside: str) -> None:
    np.save(tmp_path / beside, np.zeros((3, 2)))
    table = HostTable(3, 2, state=["m"], memory="plain")
    with pytest.raises(ValueError, match=f"{beside} would be read as part of this table. Remove"):
        table.save(tmp_path / "t.npy")
    assert sorted(os.listdir(tmp_path)) == [beside]
