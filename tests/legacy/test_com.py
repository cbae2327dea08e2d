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


def test_the_table_is_square_and_zero_and_counts_with_the_families_dtype(family: Any) -> None:
    counts = family(4)
    counts.comInit()
    array = counts.getNumpyVersion()
    assert array.shape == (4, 4)
    assert array.dtype == np.int32
    assert not array.any()
    rows = counts.table["weight"]
    rows[2, 3] += 1
    ids, ones = torch.tensor([2, 2]), torch.ones(2, dtype=rows.dtype, device=rows.device)
    rows.index_put_((ids, ids + 1), ones, accumulate=True)
    assert counts.getNumpyVersion()[2].tolist() == [0, 0, 0, 3]


@pytest.mark.parametrize("datatype", ["int64", np.int64, torch.int64, "i8"], ids=str)
def test_the_dtype_may_be_named_in_any_way(family: Any, datatype: Any) -> None:
    counts = family(4, datatype=datatype)
    counts.comInit()
    assert counts.table["weight"].dtype == torch.int64


@pytest.mark.parametrize(
    ("maker", "kind"),
    [(COM, "Cupy"), (COMMM, "Cupy")]
    + [(maker, "Torch") for maker in (GPUPytorchCOM, CPUPytorchCOM, PytorchCOM)],
)
def test_counts_are_saved_and_loaded_without_an_init(maker: Any, kind: str) -> None:
    first = maker(3, datatype="uint32")  # as in 2019
    first.comInit()
    values = torch.arange(9).reshape(3, 3).to(torch.uint32)
    getattr(first, f"get{kind}Var")().copy_(values)
    getattr(first, f"save{kind}")("counts")
    second = maker(3, datatype="uint32")
    getattr(second, f"load{kind}")("counts")
    assert second.getNumpyVersion().tolist() == values.tolist()
    with pytest.raises(ValueError, match=r"contain weight \[3, 3\] int32, got .* uint32"):
        getattr(maker(3), f"load{kind}")("counts")


def test_mapped_counts_take_the_first_free_name() -> None:
    for _ in range(2):
        COMMM(3).comInit()
    COMMM(3, "mine").comInit()
    assert sorted(os.listdir()) == ["COM0.memmap", "COM1.memmap", "mine0.memmap"]


def test_the_init_takes_the_argument_of_2019() -> None:
    pinned = COM(3, CPUPinn=True)
    pinned.comInit()
    counts = COM(3)
    counts.comInit(CPUPinn=True)
    assert counts.table.memory == pinned.table.memory
    assert counts.CUPYcorpus.shape == counts.CUPYCom.shape == (3, 3)
