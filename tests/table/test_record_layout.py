"""Where fields lie in a record, and what cannot be a field."""

from __future__ import annotations

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


@pytest.mark.parametrize("dim", [2.0, "3", True, None, (2, "a"), [1.5]], ids=str)
def test_a_shape_of_anything_else_is_refused(dim: Any) -> None:
    with pytest.raises(TypeError, match="dim: expected an int or a tuple of ints, got"):
        row_shape(dim)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dim: expected sizes of 0 or more, got \(2, -1\)"):
        row_shape((2, -1))


def test_state_is_like_the_weight_or_as_it_says() -> None:
    assert weight_and_state(2, torch.float16, ("a",))["a"] == ((2,), torch.float16)
    given = weight_and_state((2, 3), torch.float16, {"a": (1, torch.int64)})
    assert given == {"weight": ((2, 3), torch.float16), "a": ((1,), torch.int64)}


@pytest.mark.parametrize("state", [("a", "a"), ("weight",), {"weight": (1, torch.int8)}], ids=str)
def test_a_name_twice_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match=r"the name '\w+' occurs twice"):
        weight_and_state(2, torch.float32, state)


def test_one_string_is_no_list_of_names() -> None:
    with pytest.raises(TypeError, match=r"got one string. Write \('exp_avg',\)"):
        weight_and_state(2, torch.float32, "exp_avg")


@pytest.mark.parametrize("name", ["", "a/b", "a\\b", "a\n", "a\0", "__metadata__"])
def test_a_name_that_no_file_can_hold_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not a valid name. A name must have printable char"):
        lay_out({name: (1, torch.int8)})


def test_a_name_that_is_no_string_is_refused() -> None:
    with pytest.raises(TypeError, match="names must be strings, got 3"):
        lay_out({3: (1, torch.int8)})  # type: ignore[dict-item]


def test_no_field_is_refused() -> None:
    with pytest.raises(ValueError, match="a table needs at least one field"):
        lay_out({})


def test_a_dtype_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="field 'a': expected a torch.dtype, got 'float32'"):
        lay_out({"a": (1, "float32")})  # type: ignore[dict-item]


def test_a_quantized_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="field 'a': quantized dtypes .* got torch.quint8"):
        lay_out({"a": (1, torch.quint8)})
