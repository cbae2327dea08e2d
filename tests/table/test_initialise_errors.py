"""Initialisers with bad arguments say what is wrong and leave every row as it was."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from reference import assert_same_bytes, assert_same_storage
from test_initialise import table
from torch import Tensor

from speedtorch import HostTable

init = torch.nn.init


def broken(rows: Tensor) -> None:
    """Fails after it has changed something."""
    rows.zero_()
    raise RuntimeError("no more")


BAD: list[tuple[Callable[[HostTable], object], type[Exception], str]] = [
    (lambda t: t.normal_(field="x"), KeyError, "no field 'x'. Fields: before, wei"),
    (lambda t: t.uniform_(2, 1), ValueError, "must not exceed high, got 2 and 1"),
    (lambda t: t.uniform_(float("nan"), 1), ValueError, "must not exceed"),
    (lambda t: t.normal_(0, -1), ValueError, "std must be 0 or more, got -1"),
    (
        lambda t: t.init_(init.normal_, generator=torch.Generator()),
        TypeError,
        "has its own generator. Pass seed=",
    ),
    (
        lambda t: t.init_(lambda rows: rows.zero_().random_(generator=torch.Generator())),
        TypeError,
        "has its own generator. Pass seed=",
    ),
    (lambda t: t.normal_(seed=1.5), TypeError, "seed: expected an int, got 1.5"),
    (lambda t: t.normal_(seed=True), TypeError, "seed: expected an int"),
    (lambda t: t.fill_([1, 2]), ValueError, r"'weight' has the shape \(12,\), got \(2,\)"),
    (lambda t: t.fill_(None), TypeError, "row of numbers that torch can store, got None"),
    (lambda t: t.fill_("a"), TypeError, "row of numbers that torch can store, got 'a"),
    (lambda t: t.fill_(torch.ones(12).to_sparse()), TypeError, "fill_: expected a dense row, got"),
    (lambda t: t.fill_(1j), ValueError, "complex128 cannot be cast"),
    (lambda t: t.init_(init.normal_, 0, 1, 2, 3, 4), TypeError, "argument"),
    (lambda t: t.init_(init.trunc_normal_, "a"), TypeError, "not supported"),
    (lambda t: t.init_(broken), RuntimeError, "no more"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_arguments_change_nothing(
    call: Callable[[HostTable], object], error: type[Exception], message: str
) -> None:
    made = table()
    with pytest.raises(error, match=message):
        call(made)
    assert_same_storage(made.record, table().record)


NO_RANDOM = "need a floating or complex field, got torch.int64"
BEYOND = "is out of the range of torch.* of 'weight'|fill_: .*got 18446744073709551616"
UNFIT: list[tuple[torch.dtype, Callable[[HostTable], object], str]] = [
    *(
        (torch.int64, lambda t, draw=draw: t.init_(draw), NO_RANDOM)
        for draw in (init.uniform_, init.trunc_normal_, init.xavier_normal_)
    ),
    (torch.int8, lambda t: t.fill_(1.5), "fill_: torch.float64 cannot be cast to torch.i"),
    *(
        (dtype, lambda t, value=value: t.fill_(value), BEYOND)
        for dtype, value in (
            *((torch.int8, 128), (torch.int8, 2**63), (torch.uint8, -1), (torch.uint64, -1)),
            *((torch.float16, 1e5), (torch.float16, 100_000), (torch.float32, 2**64)),
            *((torch.float8_e4m3fn, 1e5), (torch.float8_e5m2, -1e5), (torch.complex64, 1e300)),
            (torch.int8, torch.full((12,), 300, dtype=torch.int16)),
            (torch.int64, np.uint64(2**63)),
            (torch.int64, [np.uint64(2**63), *[np.uint64(1)] * 11]),
            (torch.int64, np.full(12, 2**63, np.uint64)),
        )
    ),
]


@pytest.mark.parametrize(("dtype", "call", "message"), UNFIT)
def test_what_no_field_of_a_dtype_holds_is_refused(
    dtype: torch.dtype, call: Callable[[HostTable], object], message: str
) -> None:
    made = table(dtype=dtype)
    with pytest.raises(ValueError, match=message):
        call(made)
    assert_same_storage(made.record, table(dtype=dtype).record)


def test_two_dimensional_functions_say_so() -> None:
    with pytest.raises(ValueError, match="fewer than 2 dimensions"):
        table(()).init_(init.xavier_uniform_)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_infinity_and_nan_are_numbers(value: float) -> None:
    rows = table(dtype=torch.float16).fill_(value)["weight"]
    assert_same_bytes(rows, torch.full((301, 12), value, dtype=torch.float16))
