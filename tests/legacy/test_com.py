"""COM: tables of counts in every family."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from speedtorch import COM, COMMM, CPUPytorchCOM, GPUPytorchCOM, PytorchCOM

pytestmark = pytest.mark.usefixtures("own_folder")

MAKERS = {
    "COM": COM,
    "COM-pinned": lambda *a, **k: COM(*a, CPUPinn=True, **k),
    "GPUPytorch": GPUPytorchCOM,
    "CPUPytorch": CPUPytorchCOM,
    "Pytorch": PytorchCOM,
    "Pytorch-pinned": lambda *a, **k: PytorchCOM(*a, deviceType="cpu", pinType=True, **k),
    "MM": COMMM,
}


@pytest.fixture(params=MAKERS.values(), ids=MAKERS.keys())
def family(request: pytest.FixtureRequest) -> Any:
    """Builds a COM of each family."""
    return request.param


def test_the_table_is_square_and_zero_and_has_the_families_dtype(family: Any) -> None:
    counts = family(4)
    counts.comInit()
    array = counts.getNumpyVersion()
    assert array.shape == (4, 4)
    assert array.dtype == np.int32
    assert not array.any()


@pytest.mark.parametrize("datatype", ["int64", np.int64, torch.int64, "i8"], ids=str)
def test_the_dtype_may_be_named_in_any_way(family: Any, datatype: Any) -> None:
    counts = family(4, datatype=datatype)
    counts.comInit()
    assert counts.table["weight"].dtype == torch.int64


@pytest.mark.parametrize("maker", [COM, COMMM])
def test_counts_are_saved_and_loaded_without_an_init(maker: Any) -> None:
    first = maker(3)
    first.comInit()
    values = torch.arange(9, dtype=torch.int32).reshape(3, 3)
    first.getCupyVar().copy_(values)
    first.saveCupy("counts")
    second = maker(3)
    second.loadCupy("counts")
    assert second.getNumpyVersion().tolist() == values.tolist()
    with pytest.raises(ValueError, match=r"contain weight \[2, 2\] .* got weight \[3, 3\] int32"):
        maker(2).loadCupy("counts")


def test_every_family_counts_with_its_default_dtype(family: Any) -> None:
    counts = family(4)
    counts.comInit()
    rows = counts.table["weight"]
    rows[2, 3] += 1
    rows.index_put_(
        (torch.tensor([2, 2]), torch.tensor([3, 3])),
        torch.ones(2, dtype=rows.dtype, device=rows.device),
        accumulate=True,
    )
    assert counts.getNumpyVersion()[2].tolist() == [0, 0, 0, 3]


def test_counts_of_2019_are_read_with_their_dtype() -> None:
    np.save("counts", np.full((3, 3), 7, dtype=np.uint32))
    with pytest.raises(ValueError, match=r"contain weight \[3, 3\] int32, got .* uint32"):
        COM(3).loadCupy("counts")
    counts = COM(3, datatype="uint32")
    counts.loadCupy("counts")
    assert (counts.getNumpyVersion() == 7).all()


@pytest.mark.parametrize("maker", [GPUPytorchCOM, CPUPytorchCOM, PytorchCOM])
def test_counts_go_through_torchs_files(maker: Any) -> None:
    first = maker(3)
    first.comInit()
    first.getTorchVar().add_(7)
    first.saveTorch("counts.pt")
    second = maker(3)
    second.loadTorch("counts.pt")
    assert (second.getNumpyVersion() == 7).all()


def test_mapped_counts_take_the_first_free_name() -> None:
    for _ in range(2):
        COMMM(3).comInit()
    COMMM(3, "mine").comInit()
    assert sorted(os.listdir()) == ["COM0.memmap", "COM1.memmap", "mine0.memmap"]
    with pytest.warns(UserWarning, match="no effect on a memory-mapped file"):
        COMMM(3, CPUPinn=True)


def test_the_init_takes_the_argument_of_2019() -> None:
    pinned = COM(3, CPUPinn=True)
    pinned.comInit()
    counts = COM(3)
    counts.comInit(CPUPinn=True)
    assert counts.table.memory == pinned.table.memory
    assert counts.CUPYcorpus.shape == counts.CUPYCom.shape == (3, 3)
    with pytest.warns(UserWarning, match="no effect on a memory-mapped file"):
        COMMM(3).comInit(CPUPinn=True)


def test_a_table_that_was_not_initialised_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"COM has no table yet\. Call comInit\(\) or a load"):
        COM(3).getNumpyVersion()


def test_a_dtype_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="datatype must be a torch dtype, .*, got 'count'"):
        COM(3, datatype="count")
