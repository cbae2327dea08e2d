"""DataGadget: rows of files and arrays, out and in, and what is refused."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from reference import DTYPES, as_bytes, assert_same_bytes, dtype_name, random_rows
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import speedtorch
from speedtorch import (
    CPUPytorchDataGadget,
    DataGadget,
    DataGadgetMM,
    GPUPytorchDataGadget,
    PytorchDataGadget,
)
from speedtorch.files.table_files import StoredField

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
    layer = nn.Embedding(2, 3, device=WHERE)
    layer.weight.data = rows[0]
    layer(torch.arange(2, device=WHERE)).sum().backward()
    assert_same_bytes(layer.weight, data[[6, 0]])


def random_ids(draw: Random, size: int) -> Any:
    """An index of NumPy for one axis; a few are out of range or have another size."""
    is_wrong = draw.random() < 0.03
    places = [*range(-size, size), *([draw.choice([size, -size - 1, 2**40, -(2**63)])] * is_wrong)]
    count = draw.choice([1, 1, 3, 20]) if places else 0
    ids = np.array(draw.choices(places, k=count) if places else [], np.int64)
    entries = abs(size + is_wrong * draw.choice([-1, 1]))
    mask = np.array([draw.random() < 0.5 for _ in range(entries)], bool)
    bounds = [draw.choice([None, draw.randint(-2 * size, 2 * size)]) for _ in range(2)]
    choices = [ids, ids.tolist(), [], mask, mask.tolist(), range(size)[::-2], slice(None)]
    choices += [slice(*bounds, draw.choice([None, 2, -1, -3])), ids.astype(np.int32)]
    choices += [(ids % max(size, 1)).astype(np.uint8), np.array([ids, ids]), ids[:, None]]
    choices += [int(ids[0]), ids[0]] if count else []
    return draw.choice(choices)


def random_index(draw: Random, shape: tuple[int, ...]) -> Any:
    if (kind := draw.randrange(6)) < 2:
        return random_ids(draw, shape[0])
    if kind == 2:
        return np.random.default_rng(draw.randrange(99)).random(shape) < 0.5
    if kind == 3:
        return draw.choice([None, ..., 2**40])
    index = [random_ids(draw, size) for size in (*shape, 1)[: draw.randint(1, len(shape))]]
    if draw.random() < 0.3:
        index.insert(draw.randint(0, len(index)), draw.choice([None, ..., 0]))
    return tuple(index)


def forms_of(values: Tensor) -> list[Any]:
    """The same values as variables and arrays hold them."""
    trains = values.is_floating_point()
    spread = values[..., None].expand(*values.shape, 2)[..., 0]
    return [values, values.to(WHERE), values.numpy(), nn.Parameter(values, trains), spread]


CASTS: list[tuple[torch.dtype, torch.dtype]] = [
    (torch.float32, torch.float32),
    (torch.float32, torch.float64),
    (torch.float64, torch.float32),
    (torch.float32, torch.float16),
    (torch.float32, torch.int64),
    (torch.int64, torch.float32),
    (torch.int64, torch.uint8),
    (torch.float32, torch.bool),
    (torch.float32, torch.complex64),
    (torch.complex64, torch.float32),
]


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize(("given", "held"), CASTS)
def test_calls_do_what_they_do_to_an_array_of_numpy(
    family: Any, given: torch.dtype, held: torch.dtype
) -> None:
    draw, raised = Random(f"{given} {held}"), 0
    for number in range(20):
        shape = draw.choice(SHAPES)
        source = random_rows(shape[0], shape[1:], held, seed=number)
        array = source.numpy().copy()
        gadget = family(draw.choice(forms_of(source)))
        for _ in range(3):
            index = random_index(draw, shape)
            forms = [index]
            if isinstance(index, np.ndarray | np.integer):
                forms += [torch.tensor(index), torch.tensor(index, device=WHERE)]
            try:
                expected = np.array(array[index])
            except IndexError:
                raised += 1
                with pytest.raises(IndexError):
                    gadget.getData(draw.choice(forms[:2]))  # a GPU would tell later
                with pytest.raises(IndexError):
                    gadget.insertData(torch.tensor(0.0), draw.choice(forms[:2]))
                continue
            found = gadget.getData(indexes=draw.choice(forms))
            assert found.device.type == WHERE
            assert_same_bytes(found, torch.from_numpy(expected))
            found.zero_()  # a copy
            new = torch.tensor(draw.choices([0.1, 1.75, 2.5, 3.0, 260.0, 0.0], k=expected.size))
            new = new.to(given).reshape(expected.shape)
            if expected.ndim and len(expected) and draw.random() < 0.3:
                new = new[draw.choice([0, slice(1)])]  # which is repeated
            array[index] = new.numpy()
            gadget.insertData(draw.choice(forms_of(new)), indexes=draw.choice(forms))
            assert_same_bytes(all_rows(gadget), torch.from_numpy(array))
        assert_same_bytes(source, random_rows(shape[0], shape[1:], held, seed=number))
    assert raised


def test_the_rows_and_ids_have_the_names_that_scripts_of_2019_used() -> None:
    np.save("data.npy", np.arange(6.0).reshape(3, 2))
    for maker in (DataGadget, DataGadgetMM):
        gadget = maker("data.npy")
        gadget.CUPYcorpus[0] = -1
        assert gadget.getNumpyVersion().tolist() == [[-1, -1], [2, 3], [4, 5]]
    ids, more = np.array([[2], [0]]), np.array([-1])
    assert gadget.getData(retrievedPosIndexes=ids).tolist() == [[[4, 5]], [[-1, -1]]]
    both = gadget.getData(retrievedPosIndexes=ids, retrievedNegIndexes=more)
    assert both.tolist() == [[4, 5], [-1, -1], [4, 5]]


def test_negatives_follow_the_positives(family: Any) -> None:
    data = random_rows(7, (3,))
    gadget = family(data)
    assert_same_bytes(gadget.getData([1], torch.tensor([[2], [3]])), data[[1, 2, 3]])
    gadget.insertData(data[[4, 5, 6]].clone(), [1], [2, 3])
    assert_same_bytes(all_rows(gadget), data[[0, 4, 5, 6, 4, 5, 6]])


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


def test_a_failed_read_does_not_change_the_gadget(monkeypatch: pytest.MonkeyPatch) -> None:
    np.save("other.npy", np.ones((9, 9)))
    gadget = DataGadget(np.zeros((3, 2)))
    gadget.gadgetInit()

    def read_into(*_: object) -> None:
        raise OSError("pretended")

    monkeypatch.setattr(StoredField, "read_into", read_into)
    with pytest.raises(OSError, match="pretended"):
        gadget.loadCupy("other.npy")
    assert all_rows(gadget).tolist() == [[0, 0]] * 3
