"""Where fields lie in a record, and what cannot be a field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from speedtorch.table.record_layout import lay_out, row_shape, weight_and_state


def offsets(fields: dict[str, Any]) -> dict[str, int]:
    """Byte offsets of the fields."""
    return lay_out(fields).offsets


def test_fields_of_one_dtype_lie_in_their_order_without_padding() -> None:
    fields = {"b": (3, torch.float32), "a": ((2, 2), torch.float32), "c": ((), torch.float32)}
    assert offsets(fields) == {"b": 0, "a": 12, "c": 28}
    assert lay_out(fields).record_bytes == 32
    assert lay_out(fields).dtype == torch.float32


def test_larger_items_come_first_and_equal_ones_keep_their_order() -> None:
    fields = {
        "id": (1, torch.int8),
        "weight": (3, torch.bfloat16),
        "sum": (1, torch.float64),
        "more": (1, torch.float16),
    }
    assert offsets(fields) == {"id": 16, "weight": 8, "sum": 0, "more": 14}


def test_a_record_of_mixed_dtypes_ends_at_a_multiple_of_its_largest_item() -> None:
    layout = lay_out({"id": (1, torch.int8), "weight": (2, torch.float32)})
    assert layout.record_bytes == 12
    assert layout.dtype is None


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex128])
def test_no_columns_make_an_empty_record(dtype: torch.dtype) -> None:
    layout = lay_out({"weight": (0, dtype), "more": ((3, 0), dtype)})
    assert layout.record_bytes == 0


def test_views_have_the_strides_of_the_record() -> None:
    layout = lay_out({"weight": ((2, 3), torch.float32), "step": ((), torch.int16)})
    data = torch.zeros(5 * layout.record_bytes, dtype=torch.uint8)
    weight, step = layout.rows_of(data, 5, "weight"), layout.rows_of(data, 5, "step")
    assert (weight.shape, weight.stride(), weight.storage_offset()) == ((5, 2, 3), (7, 3, 1), 0)
    assert (step.shape, step.stride(), step.storage_offset()) == ((5,), (14,), 12)
    assert layout.records_of(data, 5).shape == (5, 28)


def test_a_shape_is_a_number_or_several() -> None:
    assert row_shape(3) == (3,)
    assert row_shape((2, np.int64(4))) == (2, 4)
    assert row_shape(()) == ()
    assert row_shape(torch.Size([2])) == (2,)


def test_state_is_like_the_weight_or_as_it_says() -> None:
    assert weight_and_state(2, torch.float16, ("a",))["a"] == ((2,), torch.float16)
    given = weight_and_state((2, 3), torch.float16, {"a": (1, torch.int64)})
    assert given == {"weight": ((2, 3), torch.float16), "a": ((1,), torch.int64)}


def of_state(state: Any) -> object:
    return weight_and_state(2, torch.float32, state)


def of_name(name: Any) -> object:
    return lay_out({name: (1, torch.int8)})


def of_dtype(dtype: Any) -> object:
    return lay_out({"a": (1, dtype)})


BAD: list[tuple[Callable[[Any], object], Any, type[Exception], str]] = [
    *(
        (row_shape, dim, TypeError, "dim: expected an int or a tuple of ints, got")
        for dim in (2.0, "3", True, None, (2, "a"), [1.5])
    ),
    (row_shape, (2, -1), ValueError, r"dim: expected sizes of 0 or more, got \(2, -1\)"),
    *(
        (of_state, state, ValueError, r"the name '\w+' occurs twice")
        for state in (("a", "a"), ("weight",), {"weight": (1, torch.int8)})
    ),
    (of_state, "exp_avg", TypeError, r"got one string. Write \('exp_avg',\)"),
    *(
        (of_name, name, ValueError, "is not a valid name. A name must consist of printable char")
        for name in ("", "a/b", "a\\b", "a\n", "a\0", "__metadata__")
    ),
    (of_name, 3, TypeError, "names must be strings, got 3"),
    (lay_out, {}, ValueError, "a table needs at least one field"),
    (of_dtype, "float32", TypeError, "field 'a': expected a torch.dtype, got 'float32'"),
    (of_dtype, torch.quint8, ValueError, "field 'a': quantized dtypes .* got torch.quint8"),
]


@pytest.mark.parametrize(("call", "given", "error", "message"), BAD)
def test_what_cannot_be_a_field_is_refused(
    call: Callable[[Any], object], given: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(given)
