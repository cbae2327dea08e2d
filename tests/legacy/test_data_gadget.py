"""DataGadget: rows of files and arrays, out and in, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import DTYPES, as_bytes, assert_same_bytes, dtype_name, random_rows
from safetensors.torch import load_file, save_file
from torch import Tensor

import speedtorch
from speedtorch import (
    CPUPytorchDataGadget,
    DataGadget,
    DataGadgetMM,
    GPUPytorchDataGadget,
    PytorchDataGadget,
)

pytestmark = pytest.mark.usefixtures("own_folder")

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
MAKERS = {
    "DataGadget": DataGadget,
    "DataGadget-pinned": lambda source, **k: DataGadget(source, CPUPinn=True, **k),
    "GPUPytorch": GPUPytorchDataGadget,
    "CPUPytorch": CPUPytorchDataGadget,
    "Pytorch-device": PytorchDataGadget,
    "Pytorch-pinned": lambda source, **k: PytorchDataGadget(source, "cpu", True, **k),
    "Pytorch-pageable": lambda source, **k: PytorchDataGadget(source, "cpu", **k),
}
SHAPES = [(7,), (7, 1), (7, 3), (7, 2, 3), (7, 2, 1, 3), (7, 0), (0, 3)]


@pytest.fixture(params=MAKERS.values(), ids=MAKERS.keys())
def family(request: pytest.FixtureRequest) -> Any:
    """Builds a DataGadget of each family that has memory of its own."""
    return request.param


def all_rows(gadget: Any) -> Tensor:
    return torch.from_numpy(gadget.getNumpyVersion())


def all_bytes(gadget: Any) -> Tensor:
    gadget.table.settle()
    return as_bytes(gadget.table["weight"].cpu())


# Sources


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_data_of_any_number_of_dimensions_is_read_from_every_source(
    family: Any, shape: tuple[int, ...]
) -> None:
    data = random_rows(shape[0], shape[1:])
    np.save("data.npy", data.numpy())
    save_file({"anything": data}, "data.safetensors")
    for source in ("data.npy", Path("data.safetensors"), data.numpy(), data, data.to(WHERE)):
        gadget = family(source)
        gadget.gadgetInit()
        assert_same_bytes(all_rows(gadget), data)


@pytest.mark.parametrize("CPUPinn", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_rows_and_parts_of_rows_have_any_dtype(dtype: torch.dtype, CPUPinn: bool) -> None:
    expected = random_rows(7, (3,), dtype)
    gadget = DataGadget(expected.clone(), CPUPinn=CPUPinn)
    assert_same_bytes(gadget.getData([6, 0, 6]), expected[[6, 0, 6]])
    assert_same_bytes(gadget.getData((slice(1, 4), 2)), expected[1:4, 2])
    gadget.insertData(expected[[0, 1]][:, :2].clone(), (slice(2, 4), slice(0, 2)))
    expected[2:4, :2] = expected[:2, :2].clone()
    assert_same_bytes(all_bytes(gadget), as_bytes(expected))


def test_the_init_is_optional_and_makes_the_table_once(family: Any) -> None:
    data = random_rows(7, (3,))
    gadget = family(data)
    with pytest.raises(RuntimeError, match=r"has no table yet\. Call gadgetInit\(\) first"):
        _ = gadget.table
    gadget.insertData(data[:1].clone(), [3])
    for _ in range(2):
        gadget.gadgetInit()
        assert gadget.table.rows == 7
        assert_same_bytes(gadget.getData([2, 3]), data[[2, 0]])


@pytest.mark.filterwarnings("error")
def test_arrays_that_torch_cannot_share_are_copied() -> None:
    data = np.arange(12.0).reshape(4, 3)
    read_only = data.copy()
    read_only.flags.writeable = False
    for source in (
        data[::-1],
        np.asfortranarray(data),
        data.astype(">f8"),
        read_only,
        data[:, ::2],
        np.ones(4, dtype=[("kind", "i1"), ("value", "f8")])["value"],
    ):
        assert np.array_equal(DataGadget(source).getNumpyVersion(), source)


def test_the_gadget_has_rows_of_its_own(family: Any) -> None:
    for source in (torch.zeros(4, 3), np.zeros((4, 3), dtype=np.float32)):
        gadget = family(source)
        gadget.insertData(torch.ones(1, 3), [2])
        assert source.sum() == 0
        assert gadget.getNumpyVersion().sum() == 3


def test_one_tensor_of_several_is_chosen_by_name() -> None:
    first, second = random_rows(4, (2,)), random_rows(4, (3, 2), seed=1)
    save_file({"first": first, "second": second}, "data.safetensors")
    assert_same_bytes(all_rows(DataGadget("data.safetensors", field="second")), second)
    with pytest.raises(ValueError, match="field must be one of the file's first, second, got None"):
        DataGadget("data.safetensors")
    with pytest.raises(ValueError, match="no field 'third'. Choose one of 'first', 'second'"):
        DataGadget("data.safetensors", field="third")


# Rows out and in


def test_rows_arrive_where_they_are_trained_on_as_a_variables_data(family: Any) -> None:
    data = random_rows(7, (3,))
    rows = family(data).getData(np.array([[6, 0], [6, 2]]))
    assert rows.device.type == WHERE
    assert rows.is_contiguous()
    assert_same_bytes(rows, data[torch.tensor([[6, 0], [6, 2]])])
    layer = torch.nn.Embedding(2, 3, device=WHERE)
    layer.weight.data = rows[0]
    layer(torch.arange(2, device=WHERE)).sum().backward()
    assert_same_bytes(layer.weight, data[[6, 0]])


# What NumPy itself is asked for, in rows `[7, 2, 3]`.
INDICES: dict[str, Any] = {
    "id": 3,
    "last": -1,
    "numpy-id": np.int64(2),
    "ids": [6, 0, 6],
    "negative-ids": [-1, 0, -7],
    "no-ids": [],
    "ids-2-d": np.array([[6, 0], [-6, 2]]),
    "int32-negative": np.array([-1, 3], dtype=np.int32),
    "uint8": np.array([1, 0], dtype=np.uint8),
    "range": range(5, 0, -2),
    "slice": slice(2, 5),
    "slice-all": slice(None),
    "slice-negative-step": slice(None, None, -2),
    "slice-empty": slice(5, 2),
    "slice-beyond": slice(-100, 100, 3),
    "mask": np.array([True, False, True, True, False, False, True]),
    "mask-list": [False] * 6 + [True],
    "mask-of-none": np.zeros(7, dtype=bool),
    "mask-2-d": np.arange(14).reshape(7, 2) % 3 == 0,
    "mask-3-d": np.arange(42).reshape(7, 2, 3) % 5 == 0,
    "ellipsis": ...,
    "none": None,
    "one-element": (1, 1, 2),
    "rows-and-columns": ([1, 2], [0, -1]),
    "an-element-twice": ([1, 1], [0, 0], [2, 2]),
    "rows-columns-both": (np.array([[1], [2]]), np.array([0, 1, 0])),
    "slices": (slice(1, 6, 2), slice(0, 1)),
    "slice-and-column": (slice(None), -1),
    "ids-and-slice": ([5, 1], slice(None), [2, 0]),
    "ellipsis-and-column": (..., 0),
    "new-axis": (None, [1, 2]),
    "mask-and-column": (np.arange(7) > 4, 1),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES.keys())
def test_an_index_means_what_it_means_to_numpy(family: Any, index: Any) -> None:
    expected = random_rows(7, (2, 3))
    gadget = family(expected.clone())
    values = torch.from_numpy(np.array(expected.numpy()[index]))
    rows = gadget.getData(indexes=index)
    assert rows.device.type == WHERE
    assert_same_bytes(rows, values)
    rows.zero_()
    assert_same_bytes(all_rows(gadget), expected)  # what comes out is a copy
    new = random_rows(values.numel(), (), seed=1).reshape(values.shape)
    expected.numpy()[index] = new.numpy()
    gadget.insertData(new.to(WHERE), indexes=index)
    assert_same_bytes(all_rows(gadget), expected)


TENSORS: dict[str, Tensor] = {
    "ids": torch.tensor([[6, -1], [0, -7]]),
    "int32": torch.tensor([-1, 3], dtype=torch.int32),
    "mask": torch.tensor([True, False] * 3 + [True]),
    "scalar": torch.tensor(-2),
}


@pytest.mark.parametrize("index", TENSORS.values(), ids=TENSORS.keys())
def test_an_index_may_be_a_tensor_on_either_device(family: Any, index: Tensor) -> None:
    data = random_rows(7, (3,))
    gadget = family(data)
    expected = torch.from_numpy(np.array(data.numpy()[index.numpy()]))
    for given in (index, index.to(WHERE)):
        assert_same_bytes(gadget.getData(given), expected)
        gadget.insertData(expected.to(WHERE), given)
    assert_same_bytes(all_rows(gadget), data)


def test_one_row_is_repeated_as_numpy_repeats_it(family: Any) -> None:
    expected = random_rows(7, (3,))
    gadget = family(expected.clone())
    gadget.insertData(expected[:1].clone(), [2, -1])
    expected[[2, -1]] = expected[:1].clone()
    assert_same_bytes(all_rows(gadget), expected)


CASTS: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "wider": (torch.float32, torch.float64),
    "narrower": (torch.float64, torch.float32),
    "half": (torch.float32, torch.float16),
    "to-whole-numbers": (torch.float32, torch.int64),
    "of-whole-numbers": (torch.int64, torch.float32),
    "to-fewer-bits": (torch.int64, torch.uint8),
    "to-bool": (torch.float32, torch.bool),
    "to-complex": (torch.float32, torch.complex64),
    "to-real": (torch.complex64, torch.float32),
}


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("index", [[5, -1], (slice(1, 3), slice(0, 3))], ids=["ids", "parts"])
@pytest.mark.parametrize(("given", "held"), CASTS.values(), ids=CASTS)
def test_values_of_another_dtype_are_cast_as_numpy_casts_them(
    family: Any, given: torch.dtype, held: torch.dtype, index: Any
) -> None:
    rows = torch.tensor([[0.1, 1.75, 2.5], [3.0, 260.0, 0.0]]).to(given)
    expected = (torch.arange(21) % 2).view(7, 3).to(held)
    gadget = family(expected.clone())
    expected.numpy()[index] = rows.numpy()
    gadget.insertData(rows.to(WHERE), index)
    assert_same_bytes(all_rows(gadget), expected)
    gadget.insertData(rows.numpy(), index)
    assert_same_bytes(all_rows(gadget), expected)


def test_rows_of_float32_go_into_the_doubles_of_numpy(tmp_path: Path) -> None:
    """As programs of 2019 do, whose np.random.rand gives doubles."""
    np.save(tmp_path / "data.npy", np.random.default_rng(0).random((7, 3)))
    gadget = DataGadgetMM(str(tmp_path / "data.npy"))
    gadget.gadgetInit()
    gadget.insertData(torch.full((1, 3), 0.1, device=WHERE), [2])
    found = np.load(tmp_path / "data.npy")
    assert found.dtype == np.float64
    assert found[2].tolist() == [float(np.float32(0.1))] * 3


BAD_INDICES: dict[str, tuple[Any, type[Exception]]] = {
    "too-many-axes": ((0, 0, 0), IndexError),
    "column-out-of-range": (([0], [3]), IndexError),
    "mask-too-short": ([True, False], IndexError),
    "mask-of-another-shape": (np.ones((7, 2), dtype=bool), IndexError),
    "fractions": ([0.5], TypeError),
    "words": ("weight", TypeError),
}


@pytest.mark.parametrize(("index", "error"), BAD_INDICES.values(), ids=BAD_INDICES.keys())
def test_an_index_that_numpy_refuses_changes_nothing(
    family: Any, index: Any, error: type[Exception]
) -> None:
    data = random_rows(7, (3,))
    gadget = family(data)
    with pytest.raises(error):
        gadget.getData(index)
    with pytest.raises(error):
        gadget.insertData(torch.tensor(0.0), index)
    assert_same_bytes(all_rows(gadget), data)


def test_the_rows_have_the_name_that_scripts_of_2019_used() -> None:
    np.save("data.npy", np.arange(6.0).reshape(3, 2))
    for maker in (DataGadget, DataGadgetMM):
        gadget = maker("data.npy")
        assert gadget.CUPYcorpus.shape == (3, 2)
        gadget.CUPYcorpus[0] = -1
        assert gadget.getNumpyVersion()[0].tolist() == [-1, -1]


def test_a_mapped_gadget_names_its_ids_as_in_2019() -> None:
    data = np.arange(12.0).reshape(4, 3)
    np.save("data.npy", data)
    gadget = DataGadgetMM("data.npy")
    ids, more = np.array([[3], [0]]), np.array([-1])
    assert np.array_equal(gadget.getData(retrievedPosIndexes=ids).cpu(), data[ids])
    both = gadget.getData(retrievedPosIndexes=ids, retrievedNegIndexes=more)
    assert np.array_equal(both.cpu(), data[[3, 0, -1]])


def test_negatives_follow_the_positives(family: Any) -> None:
    data = random_rows(7, (3,))
    gadget = family(data)
    assert_same_bytes(gadget.getData([1], torch.tensor([[2], [3]])), data[[1, 2, 3]])
    gadget.insertData(data[[4, 5, 6]].clone(), [1], [2, 3])
    assert_same_bytes(all_rows(gadget), data[[0, 4, 5, 6, 4, 5, 6]])


@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 2, 3)], ids=str)
@pytest.mark.parametrize("count", [0, 1, 3, 7, 20])
def test_any_number_of_rows_is_inserted_and_the_last_of_an_id_wins(
    family: Any, count: int, shape: tuple[int, ...]
) -> None:
    data = random_rows(shape[0], shape[1:])
    gadget = family(data)
    ids = [(5 * position + 2) % 7 for position in range(count)]
    new = random_rows(count, shape[1:], seed=1)
    gadget.insertData(new.to(WHERE), ids)
    expected = data.clone()
    for row, values in zip(ids, new, strict=True):
        expected[row] = values
    assert_same_bytes(all_rows(gadget), expected)


def test_rows_are_inserted_from_a_variable_an_array_and_a_cpu_tensor(family: Any) -> None:
    gadget = family(torch.zeros(4, 2))
    gadget.insertData(torch.nn.Parameter(torch.full((1, 2), 1.0, device=WHERE)), [0])
    gadget.insertData(np.full((1, 2), 2.0, dtype=np.float32), [1])
    gadget.insertData(torch.full((2, 1), 3.0).t(), [2])
    assert all_rows(gadget)[:, 0].tolist() == [1, 2, 3, 0]


# Files


@pytest.mark.parametrize("name", ["saved", "saved.npy", "saved.safetensors"])
def test_saved_rows_are_loaded_again_also_in_another_shape(name: str) -> None:
    data = random_rows(7, (2, 3))
    DataGadget(data).saveCupy(name)
    gadget = DataGadget(torch.zeros(2, dtype=torch.int8), CPUPinn=True)
    gadget.gadgetInit()
    gadget.loadCupy(name)
    assert_same_bytes(all_rows(gadget), data)


@pytest.mark.parametrize("maker", [GPUPytorchDataGadget, CPUPytorchDataGadget, PytorchDataGadget])
def test_torchs_files_are_loaded_again_also_in_another_shape(maker: Any) -> None:
    data = random_rows(7, (2, 3))
    maker(data).saveTorch("saved.pt")
    assert_same_bytes(torch.load("saved.pt", weights_only=True), data)
    gadget = maker(torch.zeros(2, dtype=torch.int8))
    gadget.loadTorch("saved.pt")
    assert_same_bytes(all_rows(gadget), data)
    torch.save({"a": data}, "other.pt")
    with pytest.raises(ValueError, match=r"other.pt must contain one tensor, got \['a'\]"):
        gadget.loadTorch("other.pt")
    assert_same_bytes(all_rows(gadget), data)


def test_each_family_returns_its_rows_under_its_own_name() -> None:
    data = random_rows(7, (3,))
    np.save("data.npy", data.numpy())
    assert_same_bytes(DataGadget("data.npy").getCupyVar(), data)
    assert_same_bytes(GPUPytorchDataGadget("data.npy").getTorchVar(), data)
    assert_same_bytes(DataGadgetMM("data.npy").getCupyMM(), data)


# Mapped files


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_mapped_gadget_changes_its_file(shape: tuple[int, ...]) -> None:
    data = random_rows(shape[0], shape[1:])
    np.save("data.npy", data.numpy())
    save_file({"a": data, "b": data.clone()}, "data.safetensors")
    ids = [1, 3, 1] if shape[0] else []
    new = random_rows(len(ids), shape[1:], seed=1)
    expected = data.clone()
    for row, values in zip(ids, new, strict=True):
        expected[row] = values
    gadgets = (DataGadgetMM("data.npy"), DataGadgetMM("data.safetensors", field="b"))
    for gadget in gadgets:
        assert_same_bytes(gadget.getData(ids), data[ids])
        gadget.insertData(new.to(WHERE), ids)
        assert_same_bytes(all_rows(gadget), expected)
    speedtorch.synchronize()
    assert_same_bytes(torch.from_numpy(np.load("data.npy")), expected)
    saved = load_file("data.safetensors")
    assert_same_bytes(saved["b"], expected)
    assert_same_bytes(saved["a"], data)


def test_a_mapped_gadget_takes_another_file_and_saves_a_copy() -> None:
    np.save("one.npy", np.zeros((2, 3)))
    np.save("two.npy", np.ones((4, 5)))
    gadget = DataGadgetMM("one.npy")
    gadget.loadCupy("two")
    gadget.saveCupy("three")
    assert np.load("three.npy").sum() == 20
    with pytest.raises(ValueError, match="the rows of the table are in this file"):
        gadget.saveCupy("two")
    with pytest.raises(RuntimeError, match="DataGadgetMM has no HostTable"):
        _ = gadget.table


# Refusals


@pytest.mark.parametrize("bad", [-8, 7, 2**40, -(2**63)])
def test_an_id_out_of_range_changes_nothing_and_the_next_call_works(family: Any, bad: int) -> None:
    data = random_rows(7, (3,))
    gadget = family(data)
    with pytest.raises(IndexError):
        gadget.getData([1, bad])
    with pytest.raises(IndexError):
        gadget.insertData(torch.zeros(2, 3), [1, bad])
    assert_same_bytes(all_rows(gadget), data)
    assert_same_bytes(gadget.getData([1]), data[[1]])


def test_a_failed_read_does_not_change_the_gadget(monkeypatch: pytest.MonkeyPatch) -> None:
    np.save("other.npy", np.ones((9, 9)))
    gadget = DataGadget(np.zeros((3, 2)))
    gadget.gadgetInit()

    def fail(*_: object) -> None:
        raise OSError("pretended")

    monkeypatch.setattr("speedtorch.files.table_files.StoredField.read_into", fail)
    with pytest.raises(OSError, match="pretended"):
        gadget.loadCupy("other.npy")
    assert all_rows(gadget).tolist() == [[0, 0]] * 3
