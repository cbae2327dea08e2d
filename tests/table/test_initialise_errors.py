"""Initialisers with bad arguments say what is wrong and leave every row as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from reference import assert_same_bytes, assert_same_storage
from torch import Tensor

from speedtorch import HostTable

init = torch.nn.init


def table(dim: Any = 12, dtype: torch.dtype = torch.float32) -> HostTable:
    """A table whose weight has neighbours on both sides, all bits set."""
    fields = {"before": (dim, dtype), "weight": (dim, dtype), "after": (dim, dtype)}
    made = HostTable.from_fields(301, fields, "plain")
    made.record.view(torch.uint8).fill_(255)
    return made


def broken(rows: Tensor) -> None:
    """Fails after it has changed something."""
    rows.zero_()
    raise RuntimeError("no more")


BAD: dict[str, tuple[Callable[[HostTable], object], type[Exception], str]] = {
    "unknown field": (
        lambda t: t.normal_(field="x"),
        KeyError,
        "no field 'x'. Fields: before, wei",
    ),
    "low above high": (lambda t: t.uniform_(2, 1), ValueError, "must not exceed high, got 2 and 1"),
    "low not a number": (lambda t: t.uniform_(float("nan"), 1), ValueError, "must not exceed"),
    "negative std": (lambda t: t.normal_(0, -1), ValueError, "std must be 0 or more, got -1"),
    "generator": (
        lambda t: t.init_(init.normal_, generator=torch.Generator()),
        TypeError,
        "each block of rows has its own generator. Pass seed= instead",
    ),
    "seed": (lambda t: t.normal_(seed=1.5), TypeError, "seed: expected an int, got 1.5"),  # type: ignore[arg-type]
    "seed of true": (lambda t: t.normal_(seed=True), TypeError, "seed: expected an int"),
    "row of another shape": (
        lambda t: t.fill_([1, 2]),
        ValueError,
        r"a row of 'weight' has the shape \(12,\), got \(2,\)",
    ),
    "no row": (
        lambda t: t.fill_(None),
        TypeError,
        "expected a number or a row of numbers, got None",
    ),
    "row of text": (
        lambda t: t.fill_("a"),
        TypeError,
        "expected a number or a row of numbers, got 'a",
    ),
    "sparse row": (
        lambda t: t.fill_(torch.ones(12).to_sparse()),
        TypeError,
        "fill_: expected a dense row, got torch.sparse_coo",
    ),
    "row of complex": (lambda t: t.fill_(1j), ValueError, "complex128 cannot be cast"),
    "arguments": (lambda t: t.init_(init.normal_, 0, 1, 2, 3, 4), TypeError, "argument"),
    "trunc arguments": (lambda t: t.init_(init.trunc_normal_, "a"), TypeError, "not supported"),
    "a function that fails": (lambda t: t.init_(broken), RuntimeError, "no more"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_change_nothing(case: str) -> None:
    call, error, message = BAD[case]
    made = table()
    with pytest.raises(error, match=message):
        call(made)
    assert_same_storage(made.record, table().record)


@pytest.mark.parametrize("function", [init.uniform_, init.trunc_normal_, init.xavier_normal_])
def test_random_integers_are_refused(function: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match="need a floating or complex field, got torch.int64"):
        table(dtype=torch.int64).init_(function)


def test_a_fraction_is_no_integer() -> None:
    with pytest.raises(ValueError, match="fill_: torch.float64 cannot be cast to torch.i"):
        table(dtype=torch.int8).fill_(1.5)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.int8, 128),
        (torch.uint8, -1),
        (torch.int8, torch.full((12,), 300, dtype=torch.int16)),
        (torch.float16, 1e5),
        (torch.float16, 100_000),
        (torch.float8_e4m3fn, 1e5),
        (torch.float8_e5m2, -1e5),
        (torch.complex64, 1e300),
    ],
    ids=str,
)
def test_numbers_beyond_the_fields_dtype_are_refused(dtype: torch.dtype, value: Any) -> None:
    with pytest.raises(ValueError, match="is out of the range of torch.* of 'weight'"):
        table(dtype=dtype).fill_(value)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_infinity_and_nan_are_numbers(value: float) -> None:
    rows = table(dtype=torch.float16).fill_(value)["weight"]
    assert_same_bytes(rows, torch.full((301, 12), value, dtype=torch.float16))


def test_two_dimensional_functions_say_so() -> None:
    with pytest.raises(ValueError, match="fewer than 2 dimensions"):
        table(()).init_(init.xavier_uniform_)


@pytest.mark.parametrize(
    ("dtype", "given"),
    [
        (torch.int64, np.uint64(2**63)),
        (torch.int64, [np.uint64(2**63), np.uint64(1)]),
        (torch.int64, np.full(2, 2**63, np.uint64)),
        (torch.uint64, -1),
        (torch.int8, 2**63),
        (torch.float32, 2**64),
    ],
)
def test_numbers_that_wrap_are_refused(dtype: torch.dtype, given: Any) -> None:
    made = HostTable(1, 2, dtype).zeros_()
    message = "fill_: .*(is out of the range|got 18446744073709551616)"
    with pytest.raises(ValueError, match=message):
        made.fill_(given)
    assert made["weight"].tolist() == [[0, 0]]
