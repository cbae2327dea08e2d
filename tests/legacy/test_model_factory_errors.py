"""What ModelFactory refuses, at construction and later, changing nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from model_families import ROWS, WIDTH, layer, started, table_rows
from reference import assert_same_bytes
from torch import nn

from speedtorch import (
    HostTable,
    ModelFactory,
    PytorchModelFactory,
)

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.mark.parametrize("bad", [-1, ROWS, 2**40, -(2**63)])
def test_an_id_out_of_range_changes_nothing_and_the_next_call_works(bad: int) -> None:
    embedding, switcher, values = started(ModelFactory, CPUPinn=True)
    switcher.beforeForwardPass([1, 2, 3])
    held = embedding.weight.detach().clone()
    with pytest.raises(IndexError):
        switcher.beforeForwardPass([4, bad, 5])
    assert_same_bytes(embedding.weight, held)
    with pytest.raises(IndexError):
        switcher.afterOptimizerStep([4, bad, 5])
    assert_same_bytes(table_rows(switcher), values)
    switcher.beforeForwardPass([4, 5])
    assert_same_bytes(embedding.weight, values[[4, 5]])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0.5], "indexes: expected integers, got float64"),
        (np.array([True]), "indexes: expected integers, got bool"),
        (["a"], "indexes: expected integers, got <U1"),
        (torch.tensor([1.0]), "indexes: expected integers, got torch.float32"),
        (torch.tensor([True]), "indexes: expected integers, got torch.bool"),
        (torch.tensor([1]).to_sparse(), "indexes: expected dense integers, got torch.sparse"),
        (None, "indexes: expected integers, got object"),
    ],
)
def test_ids_that_are_no_integers_are_refused(ids: Any, message: str) -> None:
    switcher = ModelFactory(layer(), ROWS, WIDTH)
    switcher.zerosInit()
    with pytest.raises(TypeError, match=message):
        switcher.beforeForwardPass(ids)


def test_another_number_of_ids_than_rows_is_refused() -> None:
    _, switcher, values = started()
    switcher.beforeForwardPass([1, 2, 3])
    message = "afterOptimizerStep: got 2 ids, but the variable has 3 rows"
    with pytest.raises(ValueError, match=message):
        switcher.afterOptimizerStep([1, 2])
    assert_same_bytes(table_rows(switcher), values)


def test_converted_rows_are_refused_and_the_next_batch_is_loaded() -> None:
    embedding, switcher, values = started()
    switcher.beforeForwardPass([1, 2, 3])
    embedding.double()
    with pytest.raises(ValueError, match=r"the variable has rows \[5\] of torch.float64 on cpu"):
        switcher.afterOptimizerStep([1, 2, 3])
    assert_same_bytes(table_rows(switcher), values)
    switcher.beforeForwardPass([4])
    assert_same_bytes(embedding.weight, values[[4]])


@pytest.mark.parametrize("method", ["beforeForwardPass", "afterOptimizerStep"])
def test_a_table_that_was_not_initialised_is_named(method: str) -> None:
    switcher = ModelFactory(layer(), ROWS, WIDTH)
    with pytest.raises(RuntimeError, match=r"ModelFactory has no table yet\. Call zerosInit\(\)"):
        getattr(switcher, method)([0, 1, 2])
    with pytest.raises(RuntimeError, match="has no table yet"):
        _ = switcher.table


CONSTRUCTION_ERRORS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (nn.ReLU(), {}, TypeError, "expected a module with a weight, .* got ReLU"),
    (layer(), {"embed_dimension": 4}, ValueError, r"embed_dimension=4 does not .* \[5\]\. Pass"),
    (layer(), {"embed_dimension": (5, 1)}, ValueError, r"embed_dimension=\(5, 1\) does"),
    (layer(), {"embed_dimension": 5.0}, TypeError, "embed_dimension: expected an int"),
    (layer(), {"datatype": "float64"}, ValueError, "datatype='float64' does .* is 'float32'"),
    (layer(), {"datatype": "floot"}, ValueError, "datatype must be a .* got 'floot'"),
    (layer(), {"datatype": "U3"}, ValueError, "datatype must be a .* got 'U3'"),
    (
        layer(),
        {"table": HostTable(3, WIDTH, memory="plain")},
        ValueError,
        "table must have total_classes=12 rows, got 3",
    ),
    (
        layer(),
        {"table": HostTable(ROWS, 4, memory="plain")},
        ValueError,
        r"table: the field 'weight' must have rows \[5\] of torch.float32, got rows \[4\]",
    ),
    (
        layer(),
        {"table": HostTable.from_fields(ROWS, {"sum": (5, torch.float32)}, "plain")},
        ValueError,
        "table must have the fields weight, got sum",
    ),
]


@pytest.mark.parametrize(("variable", "arguments", "error", "message"), CONSTRUCTION_ERRORS)
def test_what_does_not_fit_is_refused_at_construction(
    variable: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ModelFactory(variable, **{"total_classes": ROWS, "embed_dimension": WIDTH} | arguments)


@pytest.mark.parametrize(("deviceType", "pinType"), [("cuda", True), ("tpu", False)])
def test_device_and_pin_types_that_do_not_exist_are_refused(deviceType: str, pinType: bool) -> None:
    with pytest.raises(ValueError, match=r"must be \('cuda', False\), \('cpu', True\) or"):
        PytorchModelFactory(layer(), ROWS, WIDTH, deviceType=deviceType, pinType=pinType)
