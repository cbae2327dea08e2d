"""Fields go to files and come back bit for bit, in blocks; broken files change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from file_faults import snapshot
from reference import (
    DTYPES,
    as_bytes,
    assert_same_bytes,
    assert_same_storage,
    dtype_name,
    layout_copy,
    random_rows,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from warm_python import run_warm

import speedtorch
from speedtorch.files.new_files import replace_files
from speedtorch.files.npy_format import NPY_DTYPES
from speedtorch.files.table_files import open_fields, save_fields, write_safetensors

SAFE = [dtype for dtype in DTYPES if dtype != torch.complex128]
NPY = [dtype for dtype in DTYPES if dtype in NPY_DTYPES.values()]


def read_into(path: Path, fields: dict[str, Tensor]) -> None:
    """Reads all fields of a file."""
    with open_fields(path, tuple(fields)) as stored:
        for name, field in fields.items():
            stored[name].read_into(field)


# Round trips


@pytest.mark.usefixtures("small_file_blocks")
@pytest.mark.parametrize("gap", [0, 3], ids=["contiguous", "strided"])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (40,)], ids=str)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("t.safetensors", dtype) for dtype in SAFE] + [("t.npy", dtype) for dtype in NPY],
    ids=lambda value: value if isinstance(value, str) else dtype_name(value),
)
def test_rows_of_files_are_bitwise_identical(
    tmp_path: Path, name: str, dtype: torch.dtype, shape: Sequence[int], gap: int
) -> None:
    path, rows = tmp_path / name, random_rows(7, shape, dtype, gap=gap, offset=gap)
    save_fields(path, {"weight": rows})
    if name == "t.npy":
        assert np.load(path).tobytes() == as_bytes(rows).numpy().tobytes()
    else:
        assert_same_bytes(load_file(path)["weight"], rows)
    back = random_rows(7, shape, dtype, gap=gap, offset=gap, seed=1)
    expected = layout_copy(back)
    expected.copy_(rows)
    read_into(path, {"weight": back})
    assert_same_storage(back, expected)


def mixed_fields(seed: int = 0) -> dict[str, Tensor]:
    """Fields of several item sizes and shapes."""
    return {
        "id": random_rows(9, (), torch.int8, seed=seed),
        "weight": random_rows(9, (3,), torch.bfloat16, gap=2, seed=seed),
        "sum": random_rows(9, (2, 2), torch.float64, seed=seed),
        "empty": random_rows(9, (0,), torch.float32, seed=seed),
    }


@pytest.mark.usefixtures("small_file_blocks")
def test_fields_of_all_kinds_share_one_safetensors_file_of_ours_or_of_its_library(
    tmp_path: Path,
) -> None:
    fields, back, other = mixed_fields(), mixed_fields(seed=1), mixed_fields(seed=1)
    save_fields(tmp_path / "ours.safetensors", fields)
    read_into(tmp_path / "ours.safetensors", back)
    loaded = load_file(tmp_path / "ours.safetensors")
    save_file(loaded, tmp_path / "others.safetensors")
    read_into(tmp_path / "others.safetensors", other)
    for name, rows in fields.items():
        for found in (back, loaded, other):
            assert_same_bytes(found[name], rows)


def test_the_weight_comes_first_and_the_others_in_their_order(tmp_path: Path) -> None:
    fields = {name: torch.zeros(2) for name in ("z", "a", "weight", "b")}
    save_fields(tmp_path / "t.safetensors", fields)
    with open_fields(tmp_path / "t.safetensors") as stored:
        assert list(stored) == ["weight", "z", "a", "b"]


def test_numbers_of_a_state_dict_are_written_beside_its_tensors(tmp_path: Path) -> None:
    state = nn.BatchNorm1d(3).state_dict() | {"bits": torch.tensor(True), "none": torch.zeros(0)}
    assert state["num_batches_tracked"].dim() == 0
    with replace_files([tmp_path / "model.safetensors"]) as (file,):
        write_safetensors(file, state)
    read = load_file(tmp_path / "model.safetensors")
    assert set(read) == set(state)
    for name, values in state.items():
        assert read[name].shape == values.shape and torch.equal(read[name], values)


def test_a_parameter_is_read_and_written_without_autograd(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    save_fields(tmp_path / "t.npy", {"weight": parameter})
    other = torch.nn.Parameter(torch.zeros(3, 2))
    read_into(tmp_path / "t.npy", {"weight": other})
    assert torch.equal(other, parameter)
    assert other.is_leaf


# Names of .npy files


@pytest.mark.parametrize(("name", "file"), [("weight", "t.npy"), ("sum", "t.sum.npy")])
def test_a_weight_alone_is_the_npy_file_itself(tmp_path: Path, name: str, file: str) -> None:
    save_fields(tmp_path / "t.npy", {name: torch.zeros(2)})
    assert list(snapshot(tmp_path)) == [file]
    with open_fields(tmp_path / "t.npy") as stored:
        assert list(stored) == [name]


def test_several_fields_are_one_npy_file_each(tmp_path: Path) -> None:
    fields = {"weight": torch.zeros(2), "exp_avg": torch.ones(2)}
    save_fields(tmp_path / "t.npy", fields)
    assert list(snapshot(tmp_path)) == ["t.exp_avg.npy", "t.weight.npy"]
    with open_fields(tmp_path / "t.npy") as stored:
        assert list(stored) == ["weight", "exp_avg"]
    (tmp_path / "t.a.b.npy").write_bytes(b"of another table, named t.a")
    with open_fields(tmp_path / "t.npy") as stored:
        assert list(stored) == ["weight", "exp_avg"]


@pytest.mark.parametrize("suffix", ["npy", "safetensors"])
def test_a_table_without_state_names_the_fields_of_a_file_with_state(
    suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"t.{suffix}"
    speedtorch.HostTable(3, 2, state={"exp_avg": ((2,), torch.float32)}).fill_(1).save(path)
    expected = r"the file has the fields \['exp_avg', 'weight'\].*use HostTable.open\(path\)"
    with pytest.raises(ValueError, match=expected):
        speedtorch.HostTable(3, 2).load(path)
    assert speedtorch.HostTable.open(path)["weight"].eq(1).all()


def test_a_missing_file_is_not_taken_for_files_of_other_tables(tmp_path: Path) -> None:
    table = speedtorch.HostTable(3, 2)
    for name in ("t.backup.npy", "u.weight.npy"):
        save_fields(tmp_path / name, {"weight": torch.zeros(3, 2)})
    for name in ("t.npy", "u.npy"):
        with pytest.raises(FileNotFoundError):
            table.load(tmp_path / name)


# Memory

PEAK = """
import resource, sys, torch
from speedtorch.files.table_files import open_fields, save_fields
data = torch.ones(131072, 128)
fields = {"weight": data[:, :96], "exp_avg": data[:, 96:]}
save_fields(sys.argv[2], {"weight": torch.zeros(131072, 2)})  # Everything is loaded now.
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
save_fields(sys.argv[1], fields)
with open_fields(sys.argv[1]) as stored:
    for name, field in fields.items():
        stored[name].read_into(field)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)
"""


@pytest.mark.slow
def test_saving_and_loading_take_a_few_mb_whatever_the_size(tmp_path: Path) -> None:
    done = run_warm("-c", PEAK, tmp_path / "t.safetensors", tmp_path / "warm.safetensors")
    # KiB, for fields of 64 MiB: the blocks of 32 MiB, and what threads and allocator have.
    assert int(done.stdout) < 48 * 1024
