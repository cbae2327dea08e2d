"""ModelFactory: first values, files, and where its table is."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from model_families import FAMILIES, ROWS, WIDTH, filled, layer, started, table_rows
from reference import assert_same_bytes
from torch import nn

import speedtorch
from speedtorch import (
    CPUPytorchModelFactory,
    GPUPytorchModelFactory,
    HostTable,
    ModelFactory,
    ModelFactoryMM,
    PytorchModelFactory,
)

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request: pytest.FixtureRequest) -> Any:
    """Builds a ModelFactory of each family."""
    return request.param


# First values, files, views


def test_initialisers_give_their_distribution_and_follow_the_seed(family: Any) -> None:
    switcher = family(layer(), 4000, WIDTH)
    torch.manual_seed(3)
    switcher.uniformDistributionInit(-2, 3)
    uniform = switcher.getNumpyVersion()
    assert -2 <= uniform.min() < -1.9
    assert 2.9 < uniform.max() <= 3
    torch.manual_seed(3)
    switcher.uniformDistributionInit(-2, 3)
    assert np.array_equal(switcher.getNumpyVersion(), uniform)
    switcher.normalDistributionInit(mean=5, stdDev=0.5)
    normal = switcher.getNumpyVersion()
    assert normal.mean() == pytest.approx(5, abs=0.05)
    assert normal.std() == pytest.approx(0.5, abs=0.05)
    switcher.customInit(nn.init.constant_, 0.25)
    assert (switcher.getNumpyVersion() == 0.25).all()
    switcher.zerosInit()
    assert (switcher.getNumpyVersion() == 0).all()


FILES = [
    *(
        (maker, "Cupy", f"rows{end}")
        for maker in (ModelFactory, ModelFactoryMM)
        for end in ("", ".npy", ".safetensors")
    ),
    *(
        (maker, "Torch", name)
        for maker in (GPUPytorchModelFactory, CPUPytorchModelFactory, PytorchModelFactory)
        for name in ("rows.pt", "rows.safetensors")
    ),
]


@pytest.mark.parametrize(("maker", "kind", "name"), FILES)
def test_saved_rows_are_loaded_without_an_init(
    maker: Any, kind: str, name: str, device: str
) -> None:
    first = maker(layer(device), ROWS, WIDTH)
    values = filled(first)
    getattr(first, f"save{kind}")(name)
    assert os.path.exists(name if "." in name else "rows.npy")
    if kind == "Torch":
        with open(name, "rb") as file:
            assert_same_bytes(torch.load(file, weights_only=True), values)
    second = maker(layer(device), ROWS, WIDTH)
    getattr(second, f"load{kind}")(name)
    assert_same_bytes(table_rows(second), values)


def test_the_npy_file_is_numpys() -> None:
    _, switcher, values = started()
    switcher.saveCupy("rows")
    assert_same_bytes(torch.from_numpy(np.load("rows.npy", allow_pickle=False)), values)
    np.save("numpys.npy", np.ones((ROWS, WIDTH), dtype=np.float32))
    switcher.loadCupy("numpys.npy")
    assert (switcher.getNumpyVersion() == 1).all()


def test_a_field_of_a_shared_table_is_saved_alone() -> None:
    table = HostTable(ROWS, WIDTH, state=("exp_avg",), memory="plain")
    switcher = GPUPytorchModelFactory(layer(), ROWS, WIDTH, table=table)
    filled(switcher)
    switcher.saveTorch("rows.pt")
    saved = torch.load("rows.pt", weights_only=True)
    assert saved.untyped_storage().nbytes() == ROWS * WIDTH * 4
    ModelFactory(layer(), ROWS, WIDTH, table=table).saveCupy("rows.npy")
    assert np.load("rows.npy").shape == (ROWS, WIDTH)


def test_bfloat16_goes_to_safetensors_and_not_to_npy() -> None:
    switcher = ModelFactory(layer(dtype=torch.bfloat16), ROWS, WIDTH, datatype="bfloat16")
    values = filled(switcher)
    with pytest.raises(ValueError, match="safetensors"):
        switcher.saveCupy("rows.npy")
    switcher.saveCupy("rows.safetensors")
    switcher.zerosInit()
    switcher.loadCupy("rows.safetensors")
    assert_same_bytes(table_rows(switcher), values)


@pytest.mark.parametrize(
    ("maker", "method", "name"),
    [
        (ModelFactory, "getCupyVar", "CUPYcorpus"),
        (ModelFactoryMM, "getCupyMM", "CUPYmemmap"),
        (GPUPytorchModelFactory, "getTorchVar", "pytorchGPUVar"),
        (PytorchModelFactory, "getTorchVar", "pytorchGPUVar"),
        (CPUPytorchModelFactory, "getTorchVar", "pytorchCPUVar"),
    ],
)
def test_each_family_returns_its_rows_by_the_names_of_2019(
    maker: Any, method: str, name: str
) -> None:
    switcher = maker(layer(), ROWS, WIDTH)
    switcher.zerosInit()
    assert getattr(switcher, method)().data_ptr() == switcher.table["weight"].data_ptr()
    snapshot = switcher.getNumpyVersion()
    getattr(switcher, name)[3] = 7
    assert (switcher.getNumpyVersion()[3] == 7).all()
    assert (snapshot[3] == 0).all()  # a copy
    snapshot[5] = 9
    assert (switcher.table["weight"][5] == 0).all()


# Where the table is


def kind(switcher: Any) -> str:
    switcher.zerosInit()
    memory: str = switcher.table.memory
    return memory


def test_the_placement_follows_the_family_and_its_arguments(device: str) -> None:
    with_variable = {"cpu": "plain", "cuda": "cuda"}[device]
    host = speedtorch.memory_kind(speedtorch.empty(1, memory="auto"))
    variable = (layer(device), ROWS, WIDTH)
    assert kind(ModelFactory(*variable)) == with_variable
    assert kind(ModelFactory(*variable, CPUPinn=True)) == host
    assert kind(GPUPytorchModelFactory(*variable)) == with_variable
    assert kind(CPUPytorchModelFactory(*variable)) == host
    assert kind(PytorchModelFactory(*variable)) == with_variable
    assert kind(PytorchModelFactory(*variable, deviceType="cuda:0")) == with_variable
    assert kind(PytorchModelFactory(*variable, deviceType="cpu")) == "plain"
    assert kind(PytorchModelFactory(*variable, deviceType="cpu", pinType=True)) == host
    assert kind(ModelFactoryMM(*variable)) == "file"


def test_memory_mapped_tables_take_the_first_free_name() -> None:
    for name in ("variable0.memmap", "variable1.memmap"):
        ModelFactoryMM(layer(), ROWS, WIDTH).zerosInit()
        assert os.path.getsize(name) == ROWS * WIDTH * 4
    ModelFactoryMM(layer(), ROWS, WIDTH, diskname="mine").zerosInit()
    assert os.path.exists("mine0.memmap")


def test_a_table_is_kept_by_a_second_init_and_used_as_it_is_given() -> None:
    switcher = ModelFactory(layer(), ROWS, WIDTH)
    switcher.zerosInit()
    table = switcher.table
    switcher.uniformDistributionInit(1, 2)
    assert switcher.table is table
    given = HostTable(ROWS, WIDTH, state=("exp_avg",), memory="plain").fill_(2.0)
    embedding = layer()
    switcher = ModelFactory(embedding, ROWS, WIDTH, table=given)
    switcher.beforeForwardPass([1])
    assert (embedding.weight == 2).all()
    switcher.zerosInit()
    assert (given["weight"] == 0).all()
