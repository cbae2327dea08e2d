"""HostTable: fields over shared records, rows by their ids, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEEDS_GPU
from reference import DTYPES, assert_same_bytes, dtype_name, random_rows

from speedtorch import HostTable, ops

GPU_KINDS = ("managed", "registered", "cuda")
KINDS = ["plain", "auto", "file", *(pytest.param(kind, marks=NEEDS_GPU) for kind in GPU_KINDS)]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The arguments that place a table in each kind of memory."""
    path = {"path": tmp_path / "rows.bin"} if request.param == "file" else {}
    return {"memory": request.param, **path}


# Fields and records


def test_fields_share_the_memory_of_the_records(kind: dict[str, Any]) -> None:
    table = HostTable(3, 2, state=("exp_avg", "exp_avg_sq"), **kind)
    table.record.copy_(torch.arange(18.0).view(3, 6))
    assert table["weight"].tolist() == [[0, 1], [6, 7], [12, 13]]
    assert table["exp_avg_sq"].tolist() == [[4, 5], [10, 11], [16, 17]]
    table["exp_avg"][1] = -1
    assert table.record[1].tolist() == [6, 7, -1, -1, 10, 11]
    strides = {name: table[name].stride() for name in table.fields}
    assert strides == dict.fromkeys(table.fields, (6, 1))


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "requires_grad_": lambda rows: rows.requires_grad_(),
    "unsqueeze_": lambda rows: rows.unsqueeze_(0),
    "t_": lambda rows: rows.t_(),
    "resize_": lambda rows: rows.resize_(1, 2),
    "set_": lambda rows: rows.set_(rows.new_zeros(9, 2)),  # type: ignore[call-overload]
    "data": lambda rows: setattr(rows, "data", rows.new_zeros(9, 2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_tensor_of_the_rows_becomes_changes_no_table(
    kind: dict[str, Any], change: str
) -> None:
    table = HostTable(3, 2, state=("sum",), **kind).fill_(1)
    for rows in (table["weight"], table.record):
        CHANGES[change](rows)
    table.scatter(torch.tensor([2]), torch.full((1, 2), 5.0, device=table.device), "weight")
    assert table["weight"].tolist() == [[1, 1], [1, 1], [5, 5]] and table.record.shape == (3, 4)
    assert not table["weight"].requires_grad


def test_a_new_table_is_all_zeros(kind: dict[str, Any]) -> None:
    table = HostTable(1000, 3, state={"step": ((), torch.int64)}, **kind)
    assert not table.record.any()


def test_records_of_mixed_dtypes_are_bytes(kind: dict[str, Any]) -> None:
    fields = {"id": ((), torch.int8), "weight": (3, torch.bfloat16), "sum": (1, torch.float64)}
    table = HostTable.from_fields(5, fields, **kind)
    assert (table.record.dtype, table.record.shape) == (torch.uint8, (5, 16))
    for name, (shape, dtype) in table.fields.items():
        rows = random_rows(5, shape, dtype)
        table[name].copy_(rows)
        assert_same_bytes(table[name], rows)


def test_a_table_tells_what_it_is() -> None:
    table = HostTable(1000, (2, 3), torch.float16, state={"step": (1, torch.int32)}, memory="plain")
    assert (len(table), table.rows, table.dim, table.dtype) == (1000, 1000, (2, 3), torch.float16)
    assert table.fields == {"weight": ((2, 3), torch.float16), "step": ((1,), torch.int32)}
    assert (table.record_bytes, table.nbytes) == (16, 16_000)
    assert (table.memory, table.device) == ("plain", torch.device("cpu"))
    assert ("step" in table, "other" in table) == (True, False)
    text = "HostTable(1,000 rows of weight [2, 3] float16, step [1] int32; 16,000 bytes, plain)"
    assert repr(table) == text
    with pytest.raises(TypeError, match="not iterable"):
        iter(table)


def test_a_table_without_a_weight_has_no_dim() -> None:
    table = HostTable.from_fields(2, {"a": (1, torch.int8), "b": (2, torch.int8)}, "plain")
    assert (table.dim, table.dtype) == (None, torch.int8)
    table = HostTable.from_fields(2, {"a": (1, torch.int8), "b": (2, torch.int16)}, "plain")
    assert (table.dim, table.dtype) == (None, None)
    assert HostTable(1, 3, memory="plain").dim == 3


@pytest.mark.parametrize(("rows", "dim"), [(0, 3), (3, 0), (0, 0), (3, (2, 0))], ids=str)
def test_no_rows_and_no_columns_are_legal(kind: dict[str, Any], rows: int, dim: Any) -> None:
    with HostTable(rows, dim, state=("exp_avg",), **kind) as table:
        assert table["exp_avg"].shape[0] == rows
        ids = torch.arange(rows, device=table.device)
        assert table.gather(ids, "weight").shape == table["weight"].shape
        table.scatter(ids, table.gather(ids))
        table.flush()


@NEEDS_GPU
def test_a_table_on_the_gpu_names_its_device() -> None:
    assert HostTable(2, 2, memory="cuda", device="cuda:0").device == torch.device("cuda", 0)
    assert HostTable(2, 2, memory="cuda", device=0)["weight"].is_cuda


# Rows by their ids


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_a_field_is_gathered_and_scattered(kind: dict[str, Any], dtype: torch.dtype) -> None:
    table = HostTable(20, 3, dtype, state=("exp_avg",), **kind)
    before = random_rows(20, (6,), dtype)
    table.record.copy_(before)
    ids = torch.tensor([[4, 19], [0, 4]], device=table.device)
    rows = table.gather(ids, "exp_avg")
    assert_same_bytes(rows, before[:, 3:][ids.cpu()])
    new = random_rows(4, (3,), dtype, seed=1).view(2, 2, 3).to(table.device)
    table.scatter(ids, new, "exp_avg")
    expected = before.clone()
    for position, row in enumerate(ids.flatten().tolist()):
        expected[row, 3:] = new.view(4, 3)[position].cpu()
    table.flush()
    assert_same_bytes(table.record, expected)


def test_whole_records_are_gathered_and_scattered(kind: dict[str, Any]) -> None:
    table = HostTable(20, 3, state={"step": ((), torch.int64)}, **kind)
    before = random_rows(20, (24,), torch.uint8)
    table.record.copy_(before)
    ids = torch.tensor([3, 17], device=table.device)
    rows = table.gather(ids)
    assert_same_bytes(rows, before[[3, 17]])
    table.scatter(ids.flip(0), rows)
    table.flush()
    assert_same_bytes(table.record[[17, 3]], rows)


def test_rows_are_gathered_into_out_and_with_a_plan(kind: dict[str, Any]) -> None:
    table = HostTable(20, 3, **kind).normal_(seed=0)
    ids = torch.tensor([3, 17, 3], device=table.device)
    out = torch.empty(3, 3, device=table.device)
    plan = ops.plan_rows(ids, 20)
    assert table.gather(ids, "weight", out=out) is out
    assert_same_bytes(out, table["weight"][ids.to(table.device)])
    assert_same_bytes(table.gather(ids, plan=plan), out)
    table.scatter(ids, out, accumulate=True, plan=plan)
    table.flush()
    assert torch.equal(table["weight"][17], 2 * out[1])


def test_scatter_adds_to_a_field_and_not_to_records_of_several_dtypes() -> None:
    table = HostTable(3, 1, state=("exp_avg",), memory="plain")
    table.scatter(torch.tensor([2, 2]), torch.ones(2, 1), "exp_avg", accumulate=True)
    assert table.record.tolist() == [[0, 0], [0, 0], [0, 2]]
    mixed = HostTable(3, 1, state={"step": (1, torch.int32)}, memory="plain")
    with pytest.raises(ValueError, match="fields of different dtypes cannot be added. Pass one"):
        mixed.scatter(torch.tensor([0]), torch.ones(1, 8, dtype=torch.uint8), accumulate=True)


@NEEDS_GPU
@pytest.mark.parametrize("memory_kind", ["managed", "registered", "plain"])
def test_rows_are_copied_to_the_gpu_and_written_back(memory_kind: str) -> None:
    table = HostTable(1000, 5, state=("exp_avg",), memory=memory_kind).normal_(seed=1)
    ids = torch.tensor([999, 0, 500], device="cuda")
    rows = table.gather(ids)
    assert rows.is_cuda
    assert_same_bytes(rows, table.record[ids.cpu()])
    table.scatter(ids, rows + 1)
    table.flush()
    assert_same_bytes(table.record[ids.cpu()], rows + 1)


@pytest.mark.parametrize("ids", [[3], [-1], [0, 3]], ids=str)
def test_a_bad_id_changes_nothing(ids: list[int]) -> None:
    table = HostTable(3, 1, memory="plain").fill_(5)
    with pytest.raises(IndexError):
        table.scatter(torch.tensor(ids), torch.zeros(len(ids), 1))
    with pytest.raises(IndexError):
        table.gather(torch.tensor(ids))
    assert table["weight"].tolist() == [[5], [5], [5]]


@NEEDS_GPU
def test_a_bad_id_on_the_gpu_is_raised_by_flush() -> None:
    table = HostTable(3, 1)
    table.gather(torch.tensor([3], device="cuda"))
    with pytest.raises(IndexError):
        table.flush()
    table.flush()


# Errors

BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"memory": "disk"}, ValueError, "memory: expected one of auto, .*, got 'disk'"),
    ({"device": "cuda"}, ValueError, "device: requires memory='cuda', got memory='"),
    ({"path": "x"}, ValueError, "path: requires memory='file', got memory='plain'"),
    ({"memory": "file"}, ValueError, "memory='file' needs a path"),
    ({"rows": -1}, ValueError, "rows: expected sizes of 0 or more, got -1"),
    ({"rows": 2.0}, TypeError, "rows: expected an int"),
    ({"rows": (2, 3)}, TypeError, "rows: expected an int"),
    ({"dim": 1.5}, TypeError, "dim: expected an int or a tuple"),
    ({"dtype": "float32"}, TypeError, "expected a torch.dtype, got 'float32'"),
    ({"dim": np.array([2, 3])}, TypeError, "dim: expected an int or a tuple"),
    ({"dim": None}, TypeError, "dim: expected an int or a tuple of ints, got None"),
    ({"state": None}, TypeError, "state: expected names or a mapping of them, got None"),
    ({"state": {"a": 3}}, TypeError, r"state 'a': expected \(row shape, dtype\), got 3"),
    (
        {"rows": 0, "dim": (2**40, 2**40)},
        ValueError,
        r"field 'weight': rows of \[0, 1099511627776, 1099511627776\] span more than 2\^63 - 1",
    ),
    ({"rows": 2**70, "dim": 0}, ValueError, "span more than"),
    ({"state": {"a": (-1, torch.int8)}}, ValueError, "state 'a': expected sizes"),
    ({"rows": 2**62}, ValueError, r"rows: the table must be smaller than"),
    ({"rows": 2**50}, MemoryError, ""),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD)
def test_bad_arguments_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message or None):
        HostTable(**{"rows": 3, "dim": 2, "memory": "plain", **changes})


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_memory_of_a_gpu_needs_one() -> None:
    with pytest.raises(RuntimeError, match="memory='cuda' needs a GPU, and torch finds none"):
        HostTable(3, 2, memory="cuda")


def test_an_unknown_field_is_answered_with_the_known_ones() -> None:
    table = HostTable(3, 2, state=("exp_avg",), memory="plain")
    for call in (
        lambda: table["x"],
        lambda: table.gather(torch.tensor([0]), "x"),
        lambda: table.scatter(torch.tensor([0]), torch.zeros(1, 2), "x"),
        lambda: table.numpy("x"),
        lambda: table.zeros_("x"),
        lambda: table.begin_state("x", torch.zeros(2)),
        lambda: table.mark_loaded("x"),
    ):
        with pytest.raises(KeyError, match="no field 'x'. Fields: weight, exp_avg"):
            call()
    none: Any = None
    for call in (
        lambda: table[none],
        lambda: table.numpy(none),
        lambda: table.init_(print, field=none),
    ):
        with pytest.raises(KeyError, match="no field None. Fields: weight, exp_avg"):
            call()


def test_sizes_may_be_numpys_integers() -> None:
    table = HostTable(np.int64(3), (np.uint8(2), 1), memory="plain").normal_(seed=np.int32(4))
    assert (table.rows, table.dim, table.nbytes) == (3, (2, 1), 24)
    assert all(type(size) is int for size in (table.rows, *table["weight"].shape))
    assert torch.equal(table["weight"], HostTable(3, (2, 1)).normal_(seed=4)["weight"])


def test_a_device_that_is_no_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="expected a GPU for memory='cuda', got 'cpu'"):
        HostTable(3, 2, memory="cuda", device="cpu")
