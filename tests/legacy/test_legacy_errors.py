"""Every error of the classes of 2019: what is raised for which value, and that no row changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optimizer_families as of_optimizers
import pytest
import torch
from model_families import ROWS, WIDTH, layer
from model_families import started as started_model
from optimizer_families import Model
from reference import assert_same_content, random_rows
from torch import Tensor, nn, optim

from speedtorch import (
    COM,
    COMMM,
    CPUPytorchDataGadget,
    DataGadget,
    DataGadgetMM,
    GPUPytorchModelFactory,
    HostTable,
    ModelFactory,
    ModelFactoryMM,
    OptimizerFactory,
    OptimizerFactoryMM,
    PytorchModelFactory,
)

pytestmark = pytest.mark.usefixtures("own_folder", "files")


class Trap:
    """Would run code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("trap",)


@pytest.fixture
def files(own_folder: None) -> None:
    """Files that do not fit."""
    arrays = {
        "mine": random_rows(7, (3,)).numpy(),
        "narrow": np.zeros((ROWS, WIDTH - 1), dtype=np.float32),
        "double": np.zeros((ROWS, WIDTH)),
        "counts": np.full((2, 2), 7, dtype=np.uint32),
        "objects": np.array([{}, {}]),
    }
    for name, array in arrays.items():
        np.save(f"{name}.npy", array, allow_pickle=True)
    tensors = {
        "dict": {"a": torch.zeros(2)},
        "list": [torch.zeros(ROWS, WIDTH)],
        "narrow": torch.zeros(ROWS, 1),
        "sparse": torch.eye(3).to_sparse(),
        "scalar": torch.tensor(1.0),
        "trap": Trap(),
    }
    for name, content in tensors.items():
        torch.save(content, f"{name}.pt")
    Path("short.npy").write_bytes(bytes(40))
    Path("broken.pt").write_bytes(b"broken")
    Path("empty.pt").write_bytes(b"")
    Path("data.txt").write_text("1 2 3")


def rows_of(switcher: Any) -> dict[str, Tensor]:
    found = switcher.getNumpyVersion()
    fields = found if isinstance(found, dict) else {"weight": found}
    return {name: torch.from_numpy(rows.copy()) for name, rows in fields.items()}


def gadget() -> DataGadget:
    return DataGadget(random_rows(7, (3,)))


def torch_gadget() -> CPUPytorchDataGadget:
    return CPUPytorchDataGadget(random_rows(7, (3,)))


def mapped_gadget() -> DataGadgetMM:
    return DataGadgetMM("mine.npy")


def with_batch(make: Any = ModelFactory, **given: Any) -> Any:
    """A ModelFactory whose variable has the rows of a batch."""
    _, switcher, _ = started_model(make, **given)
    switcher.beforeForwardPass([1, 2, 3])
    return switcher


def torch_model() -> Any:
    return with_batch(GPUPytorchModelFactory)


def state_without_batch() -> Any:
    return of_optimizers.started()[2]


def state_with_batch() -> Any:
    *_, switcher = of_optimizers.started()
    of_optimizers.filled(switcher)
    switcher.beforeForwardPass([1, 2, 3])
    return switcher


def converted() -> Any:
    """A ModelFactory whose variable was converted."""
    embedding, switcher, _ = started_model()
    switcher.beforeForwardPass([1, 2, 3])
    embedding.double()
    return switcher


def variable_in_the_table() -> Any:
    """A ModelFactory whose variable is a view of its table."""
    embedding, switcher, _ = started_model()
    embedding.weight.data = switcher.getCupyVar()[:3]
    return switcher


def read_only() -> Any:
    """A ModelFactory with a batch of a table that cannot be written."""
    table(ROWS, WIDTH).save("read_only.npy")
    switcher = model(table=HostTable.open("read_only.npy", "mapped"))
    switcher.beforeForwardPass([1, 2, 3])
    return switcher


# Of a started object: a method, its arguments, the error and its message.
OF_ROWS: dict[Callable[[], Any], list[tuple[str, Any, type[Exception], str]]] = {
    gadget: [
        (
            "insertData",
            (torch.zeros(3, 3), [1, 2]),
            ValueError,
            r"insertData: .* \[2, 3\], got \[3,",
        ),
        ("insertData", (torch.zeros(2, 4), [1, 2]), ValueError, r"broadcast to \[2, 3\], got \[2,"),
        ("insertData", (torch.zeros(3, 3).double(), [1, 2]), ValueError, r"\[2, 3\], got \[3, 3\]"),
        ("insertData", (torch.zeros(6), [1, 2]), ValueError, r"got \[6\]"),
        ("insertData", (torch.tensor(0.0), (0, 0, 0)), IndexError, "too many indices"),
        ("getData", ([True, False],), IndexError, "the mask must have 7 entries, got 2"),
        ("getData", ([0.5],), TypeError, "indexes: expected integers, got float64"),
        ("insertData", (torch.tensor(0.0), "weight"), TypeError, "expected integers, got <U6"),
        ("loadCupy", "objects", ValueError, "objects"),
        ("loadCupy", "short", ValueError, "short"),
    ],
    torch_gadget: [
        ("loadTorch", "dict.pt", ValueError, r"dict.pt must contain one tensor, got \['a'\]"),
        ("loadTorch", "sparse.pt", ValueError, "sparse.pt"),
        ("loadTorch", "scalar.pt", ValueError, "scalar.pt"),
        ("loadTorch", "broken.pt", ValueError, "broken.pt"),
        ("loadTorch", "empty.pt", ValueError, "empty.pt"),
    ],
    mapped_gadget: [
        ("saveCupy", "mine.npy", ValueError, "the rows of the table are in this file"),
        ("__getattribute__", "table", RuntimeError, "DataGadgetMM has no HostTable"),
    ],
    with_batch: [
        ("beforeForwardPass", [0.5], TypeError, "indexes: expected integers, got float64"),
        ("beforeForwardPass", np.array([True]), TypeError, "indexes: expected integers, got bool"),
        ("beforeForwardPass", ["a"], TypeError, "indexes: expected integers, got <U1"),
        ("beforeForwardPass", torch.ones(1), TypeError, "expected integers, got torch.float32"),
        ("beforeForwardPass", torch.ones(1).bool(), TypeError, "integers, got torch.bool"),
        (
            "beforeForwardPass",
            torch.tensor([1]).to_sparse(),
            TypeError,
            "dense integers, got torch",
        ),
        ("beforeForwardPass", None, TypeError, "indexes: expected integers, got object"),
        ("afterOptimizerStep", [1, 2], ValueError, "Step: got 2 ids, but the variable has 3 rows"),
        ("loadCupy", "double.npy", ValueError, "contain weight .* float32, got .* float64"),
    ],
    converted: [
        ("afterOptimizerStep", [1, 2, 3], ValueError, r"has rows \[5\] of torch.float64 on cpu")
    ],
    variable_in_the_table: [
        ("afterOptimizerStep", [0, 1, 2], ValueError, "table and src overlap in memory"),
    ],
    read_only: [
        ("afterOptimizerStep", [1, 2, 3], ValueError, "is a read-only mapping of .*read_only.npy"),
    ],
    torch_model: [
        ("loadTorch", "list.pt", ValueError, r"list\.pt must contain a dense tensor .*, got a li"),
        ("loadTorch", "narrow.pt", ValueError, r"got weight \[12, 1\] float32"),
        ("loadTorch", "none.pt", FileNotFoundError, r"none\.pt"),
        ("loadTorch", "trap.pt", Exception, "[Ww]eights"),
    ],
    state_with_batch: [
        ("afterOptimizerStep", [1, 2], ValueError, "2 ids, but the optimizer's 'exp_avg' has 3")
    ],
    state_without_batch: [
        ("afterOptimizerStep", [0], RuntimeError, "no state 'exp_avg' of 'users'. Call befo")
    ],
}


@pytest.mark.parametrize(
    ("make", "method", "given", "error", "message"),
    [(make, *case) for make, cases in OF_ROWS.items() for case in cases],
)
def test_a_call_that_raises_changes_no_row_and_the_next_batch_is_loaded(
    make: Callable[[], Any], method: str, given: Any, error: type[Exception], message: str
) -> None:
    switcher = make()
    expected = rows_of(switcher)
    with pytest.raises(error, match=message):
        getattr(switcher, method)(*(given if isinstance(given, tuple) else (given,)))
    assert_same_content(rows_of(switcher), expected)
    getattr(switcher, "getData" if "gadget" in make.__name__ else "beforeForwardPass")([4])
    assert not os.path.exists("trap")


def model(variable: Any = None, make: Any = ModelFactory, **given: Any) -> Any:
    arguments = {"total_classes": ROWS, "embed_dimension": WIDTH, **given}
    return make(layer() if variable is None else variable, **arguments)


def state(kind: Any = optim.Adamax, *, make: Any = OptimizerFactory, **given: Any) -> Any:
    users = Model()
    arguments = {"total_classes": ROWS, "embed_dimension": WIDTH, "variable_name": "users"}
    return make(kind(users.parameters()), model=users, **arguments | given)


def table(rows: int, width: int, *state: str) -> HostTable:
    return HostTable(rows, width, state=state, memory="plain")


NO_TABLE = r"ModelFactory has no table yet\. Call zerosInit\(\)"
NO_STATE = r"OptimizerFactory has no table yet\. Call optInit\(\) or a load"
KINDS = r"must be \('cuda', False\), \('cpu', True\) or"
SUMS = HostTable.from_fields(ROWS, {"sum": (WIDTH, torch.float32)}, "plain")
STATE = table(ROWS, WIDTH, "exp_avg", "exp_inf")
CALLS: dict[type[Exception], list[tuple[Callable[[], Any], str]]] = {
    FileNotFoundError: [
        (lambda: DataGadget("missing.npy"), "missing.npy"),
    ],
    ValueError: [
        (lambda: DataGadget("data.txt"), r"ends in \.safetensors or \.npy"),
        (lambda: DataGadget("objects.npy"), r"objects\.npy"),
        (lambda: DataGadget(np.array(3.0)), "data must have at least one dimension"),
        (lambda: DataGadget(torch.tensor(3.0)), "data must have at least one dimension"),
        (lambda: COM(3, datatype="count"), "datatype must be a torch dtype, .* got 'count'"),
        (lambda: COM(3).loadCupy("counts"), r"\[3, 3\] int32, got weight \[2, 2\] uint32"),
        (lambda: COMMM(3).loadCupy("counts"), r"\[3, 3\] int32, got weight \[2, 2\] uint32"),
        (lambda: model(embed_dimension=4), r"dimension=4 does not .* \[5\]\. Pass"),
        (lambda: model(embed_dimension=(5, 1)), r"embed_dimension=\(5, 1\) does"),
        (lambda: model(datatype="float64"), "datatype='float64' does .* is 'float32'"),
        (lambda: model(datatype="floot"), "datatype must be a .* got 'floot'"),
        (lambda: model(datatype="U3"), "datatype must be a .* got 'U3'"),
        (lambda: model(total_classes=-1), "total_classes: expected sizes of 0 or more, got -1"),
        (lambda: COM(-1), "total_classes: expected sizes of 0 or more, got -1"),
        (lambda: model(table=table(3, 5)), "table must have total_classes=12 rows, got 3"),
        (lambda: model(table=table(ROWS, 4)), r"'weight' .* \[5\] of .*, got rows \[4\]"),
        (lambda: model(table=SUMS), "table must have the fields weight, got sum"),
        (lambda: model(None, PytorchModelFactory, pinType=True), KINDS),
        (lambda: model(None, PytorchModelFactory, deviceType="tpu"), KINDS),
        (lambda: state(variable_name="user"), r"\(bias, inner.books, users\), got 'user'"),
        (lambda: state(embed_dimension=4), r"=4 does not match .* 'users', .* \[5\]"),
        (lambda: state(dtype="float16"), "dtype='float16' .* 'users', .* 'float32'"),
        (lambda: state(dtype="half-ish"), "dtype must be a torch dtype, .* got 'half-ish'"),
        (lambda: state(table=table(ROWS, 5, "exp_avg")), "exp_avg, exp_inf, got weight, exp"),
        (lambda: state(table=table(9, 5, "exp_avg", "exp_inf")), "=12 rows, got 9"),
        (lambda: state(table=table(ROWS, 2, "exp_avg", "exp_inf")), r"\[5\] .*, got rows \[2"),
        (lambda: state(optim.Adafactor), "Adafactor"),
        (lambda: state(optim.LBFGS), "LBFGS"),
        (lambda: state(lambda _: optim.Adam([torch.ones(3)])), "Adam does not hold this"),
        (lambda: state(optim.SGD).saveCupy("s.npy"), "SGD with these settings keeps no state"),
        (lambda: state(optim.SGD).loadCupy("s.npy"), "so there is nothing to save or load"),
    ],
    TypeError: [
        (lambda: DataGadgetMM(np.zeros((2, 3))), "requires a file; use DataGadget"),
        (lambda: model(nn.ReLU()), "expected a module with a weight, .* got ReLU"),
        (lambda: model(table=torch.zeros(ROWS, 5)), "table: expected .* HostTable, got Tensor"),
        (lambda: state(lambda _: "Adam"), "given_optimizer: expected .* Optimizer, got str"),
        (
            lambda: OptimizerFactory(optim.Adam(Model().parameters()), ROWS, WIDTH, [], "users"),
            "model: expected an instance of Module, got list",
        ),
        (lambda: model(total_classes="12"), "total_classes: expected an int"),
        (lambda: model(total_classes=(3, 4)), r"total_classes: expected an int, got \(3, 4\)"),
        (lambda: COM((3, 4)), r"total_classes: expected an int, got \(3, 4\)"),
        (lambda: model(embed_dimension=5.0), "embed_dimension: expected an int"),
    ],
    RuntimeError: [
        (lambda: COM(3).getNumpyVersion(), r"COM has no table yet\. Call comInit\(\) or"),
        (lambda: model().beforeForwardPass([0, 1, 2]), NO_TABLE),
        (lambda: model().afterOptimizerStep([0, 1, 2]), NO_TABLE),
        (lambda: model().table, NO_TABLE),
        (lambda: state().beforeForwardPass([0, 1, 2]), NO_STATE),
        (lambda: state().afterOptimizerStep([0, 1, 2]), NO_STATE),
        (lambda: state(table=STATE).beforeForwardPass([0, 1, 2]), NO_STATE),
        (lambda: state(table=STATE).afterOptimizerStep([0, 1, 2]), NO_STATE),
    ],
}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [(call, error, message) for error, cases in CALLS.items() for call, message in cases],
)
def test_what_does_not_fit_is_refused(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


MAPPED: list[Callable[[], Any]] = [
    lambda: DataGadgetMM("mine.npy", CPUPinn=True),
    lambda: COMMM(3, CPUPinn=True),
    lambda: COMMM(3).comInit(CPUPinn=True),
    lambda: model(None, ModelFactoryMM, CPUPinn=True),
    lambda: state(make=OptimizerFactoryMM, CPUPinn=True),
]


@pytest.mark.parametrize("make", MAPPED)
def test_a_mapped_file_cannot_be_pinned(make: Callable[[], Any]) -> None:
    with pytest.warns(UserWarning, match="no effect .* the class without MM uses host memory"):
        make()


def test_a_file_that_does_not_fit_makes_no_table() -> None:
    switcher = model()
    with pytest.raises(ValueError, match=r"contain weight \[12, 5\] .* got weight \[12, 4\]"):
        switcher.loadCupy("narrow.npy")
    with pytest.raises(RuntimeError, match=NO_TABLE):
        switcher.beforeForwardPass([0])
