"""HostTable from other sides: as NumPy arrays, closed, and in other processes."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import NEEDS_GPU

from speedtorch import HostTable, memory
from speedtorch.memory import host_memory, placement


def test_numpy_shares_the_rows() -> None:
    table = HostTable(3, 2, state=("exp_avg",), memory="plain")
    array = table.numpy("exp_avg")
    array[1] = 7
    assert table.record.tolist() == [[0, 0, 0, 0], [0, 0, 7, 7], [0, 0, 0, 0]]
    assert (table.numpy().dtype, table.numpy().shape) == (np.dtype("float32"), (3, 2))


CALLS: list[Callable[[HostTable], object]] = [
    lambda table: table["weight"],
    lambda table: table.record,
    lambda table: table.gather(torch.tensor([0])),
    lambda table: table.scatter(torch.tensor([0]), torch.zeros(1, 2)),
    lambda table: table.zeros_(),
    lambda table: table.normal_(),
    lambda table: table.numpy(),
    lambda table: table.flush(),
    lambda table: table.settle(),
    lambda table: table.save("x.npy"),
    lambda table: table.load("x.npy"),
]


@pytest.mark.parametrize("why", ["closed", "another process"])
def test_every_method_refuses_rows_that_are_gone(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = HostTable(3, 2, memory="plain")
    weight = table["weight"]
    error, message = ValueError, "this table is closed"
    if why == "closed":
        table.close()
        table.close()
        assert repr(table).endswith("closed)")
    else:
        error, message = RuntimeError, "made in process 12, used in its fork 15"
        refuse = mock.Mock(side_effect=error(message))
        monkeypatch.setattr(host_memory, "check_owner", refuse)
    for call in CALLS:
        with pytest.raises(error, match=message):
            call(table)
    assert weight.tolist() == [[0, 0]] * 3


def test_closing_frees_the_memory() -> None:
    gc.collect()
    before = memory.memory_stats()
    with HostTable(1000, 100, memory="plain"):
        assert memory.memory_stats()["plain"] == before["plain"] + 400_000
    assert memory.memory_stats() == before


def test_the_table_is_closed_also_if_the_flush_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    table = HostTable(3, 2, memory="plain")
    with monkeypatch.context() as patch:
        failing = mock.Mock(side_effect=IndexError("a bad id on the GPU"))
        patch.setattr(placement, "wait_for_rows", failing)
        with pytest.raises(IndexError, match="a bad id on the GPU"):
            table.close()
    with pytest.raises(ValueError, match="this table is closed"):
        table.flush()


def test_a_table_is_neither_pickled_nor_copied() -> None:
    table = HostTable(3, 2, memory="plain")
    for call in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled or copied. Call save"):
            call(table)


def test_numpy_says_what_it_lacks() -> None:
    table = HostTable(3, 2, torch.bfloat16, memory="plain")
    with pytest.raises(ValueError, match="NumPy has no torch.bfloat16. View 'weight' as integers"):
        table.numpy()
    assert table["weight"].view(torch.int16).numpy().shape == (3, 2)


@NEEDS_GPU
def test_numpy_refuses_rows_on_the_gpu() -> None:
    with pytest.raises(ValueError, match=r"the rows are on a GPU\. Call gather"):
        HostTable(3, 2, memory="cuda").numpy()
