"""HostTable from other sides: as NumPy arrays, closed, and in other processes."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import NEEDS_GPU
from warm_python import warm_python

from speedtorch import HostTable, memory
from speedtorch.memory import host_memory, placement


def test_numpy_shares_the_rows() -> None:
    table = HostTable(3, 2, state=("exp_avg",), memory="plain")
    array = table.numpy("exp_avg")
    array[1] = 7
    assert table.record.tolist() == [[0, 0, 0, 0], [0, 0, 7, 7], [0, 0, 0, 0]]
    assert (table.numpy().dtype, table.numpy().shape) == (np.dtype("float32"), (3, 2))


def test_a_closed_table_says_so() -> None:
    table = HostTable(3, 2, memory="plain")
    weight = table["weight"]
    table.close()
    table.close()
    calls = [
        lambda: table["weight"],
        lambda: table.record,
        lambda: table.gather(torch.tensor([0])),
        lambda: table.scatter(torch.tensor([0]), torch.zeros(1, 2)),
        lambda: table.zeros_(),
        lambda: table.numpy(),
        lambda: table.flush(),
        lambda: table.save("x.npy"),
        lambda: table.load("x.npy"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="this table is closed"):
            call()
    assert repr(table).endswith("closed)")
    assert weight.tolist() == [[0, 0]] * 3


def test_closing_frees_the_memory() -> None:
    gc.collect()
    before = memory.memory_stats()
    with HostTable(1000, 100, memory="plain"):
        assert memory.memory_stats()["plain"] == before["plain"] + 400_000
    assert memory.memory_stats() == before


def test_the_table_is_closed_also_if_the_flush_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    table = HostTable(3, 2, memory="plain")

    def synchronize(device: object = None) -> None:
        raise IndexError("a bad id on the GPU")

    with monkeypatch.context() as patch:
        patch.setattr(placement, "wait_for_rows", synchronize)
        with pytest.raises(IndexError, match="a bad id on the GPU"):
            table.close()
    with pytest.raises(ValueError, match="this table is closed"):
        table.flush()


def test_a_table_is_neither_pickled_nor_copied() -> None:
    table = HostTable(3, 2, memory="plain")
    for call in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled or copied. Call save"):
            call(table)


def test_every_method_refuses_memory_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    table = HostTable(3, 2, memory="plain")

    def check_owner(tensor: object) -> None:
        raise RuntimeError("made in process 12, used in its fork 15")

    monkeypatch.setattr(host_memory, "check_owner", check_owner)
    calls = [
        lambda: table["weight"],
        lambda: table.record,
        lambda: table.zeros_(),
        lambda: table.normal_(),
        lambda: table.numpy(),
        lambda: table.flush(),
        lambda: table.settle(),
        lambda: table.save("x.npy"),
        lambda: table.load("x.npy"),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="used in its fork 15"):
            call()


FORK = """
import os, sys, torch, speedtorch
table = speedtorch.HostTable(3, 2, memory=sys.argv[1]).fill_(4)
if os.fork() == 0:
    try:
        print(table.gather(torch.tensor([2])).tolist(), table.numpy()[0].tolist(), flush=True)
    except RuntimeError as error:
        print("refused:", error, flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("plain", "[[4.0, 4.0]] [4.0, 4.0]"),
        pytest.param("registered", "[[4.0, 4.0]] [4.0, 4.0]", marks=NEEDS_GPU),
        pytest.param("managed", "refused: ", marks=NEEDS_GPU),
    ],
)
def test_a_forked_child_uses_a_table_or_raises(kind: str, answer: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(memory.__file__).parents[2])}
    result = subprocess.run(
        [warm_python(), "-c", FORK, kind],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.stdout.startswith(answer)


def test_numpy_says_what_it_lacks() -> None:
    table = HostTable(3, 2, torch.bfloat16, memory="plain")
    with pytest.raises(ValueError, match="NumPy has no torch.bfloat16. View 'weight' as integers"):
        table.numpy()
    assert table["weight"].view(torch.int16).numpy().shape == (3, 2)


@NEEDS_GPU
def test_numpy_refuses_rows_on_the_gpu() -> None:
    with pytest.raises(ValueError, match="the rows are on a GPU. Copy the rows"):
        HostTable(3, 2, memory="cuda").numpy()
