"""Values of a run as JSON and back: the same values of the same kinds, or an error."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, OrderedDict
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from speedtorch.checkpoints.saved_values import described, restored

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
KEYS = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(KEYS, inner).map(OrderedDict)
    ),
    max_leaves=20,
)


def there_and_back(value: Any) -> Any:
    kept: dict[str, Tensor] = {}

    def keep(name: str, tensor: Tensor) -> str:
        kept[name] = tensor
        return name

    return restored(json.loads(json.dumps(described("value", value, keep))), kept.__getitem__)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return repr(one) == repr(other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(same(a, c) and same(b, d) for (a, b), (c, d) in pairs)
    return bool(one == other)


@given(VALUES)
def test_values_are_restored(value: Any) -> None:
    assert same(there_and_back(value), value)


def test_values_of_torch_are_restored() -> None:
    value = {
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "size": torch.Size([2, 3]),
        "tensor": torch.arange(3),
    }
    found = there_and_back(value)
    assert found["tensor"] is value["tensor"]
    assert same({**found, "tensor": 0}, {**value, "tensor": 0})


def test_a_modules_state_keeps_its_metadata() -> None:
    state: Any = nn.BatchNorm1d(3).state_dict()
    found = there_and_back(state)
    assert found._metadata == state._metadata and list(found) == list(state)


def test_milestones_are_restored_with_zero_for_missing_ones() -> None:
    found = there_and_back({"milestones": Counter({30: 1, 80: 2})})["milestones"]
    assert same(found, Counter({30: 1, 80: 2})) and found[31] == 0


def test_ints_too_long_for_decimal_text_are_restored() -> None:
    value = {"long": [10**5000, -(10**5000)], "longest_text": 10**639}
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        assert same(there_and_back(value), value)
    finally:
        sys.set_int_max_str_digits(before)


@pytest.mark.parametrize(
    "value",
    [
        np.float32(1.5),
        np.float64("nan"),
        np.int64(-3),
        np.bool_(True),
        np.str_("x"),
        np.datetime64("2026-01-01"),
        np.arange(6, dtype=">u2").reshape(2, 3).T,
        np.ones((0, 3), np.float16),
        np.array(2 + 3j),
        np.longdouble("0.1"),
        np.array(["a", "bc"]),
    ],
)
def test_numbers_and_arrays_of_numpy_are_restored(value: Any) -> None:
    value_of_file = there_and_back({"a": [value]})["a"][0]
    assert type(value_of_file) is type(value) and value_of_file.dtype == value.dtype
    assert value_of_file.shape == value.shape and value_of_file.tobytes() == value.tobytes()


def test_random_state_of_numpy_is_restored() -> None:
    legacy, new = np.random.RandomState(3), np.random.default_rng(3)
    found = there_and_back([legacy.get_state(), new.bit_generator.state])
    expected = legacy.random(), new.random()
    legacy.set_state(found[0])
    new.bit_generator.state = found[1]
    assert (legacy.random(), new.random()) == expected


class Own(dict[str, int]):
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {2}]}, r"value\['a'\]\[1\]: .* it cannot hold a builtins.set"),
        (Own(), "Own"),
        (1 + 2j, "builtins.complex"),
        ({(1, 2): 3}, r"value: has the key \(1, 2\), a tuple; expected strings and numbers"),
        (nn.Tanh(), "torch.nn.modules.activation.Tanh"),
        (math, "builtins.module"),
        (
            [np.array([{}])],
            r"value\[0\]: .* cannot hold a numpy.ndarray.* Pass a plain array of numbers",
        ),
        (np.zeros(2, dtype=[("a", "i4")]), "numpy.ndarray"),
        (np.ma.array([1]), "MaskedArray"),
        (np.str_(""), "numpy.str_"),  # of no bytes
        (np.zeros(2, "V0"), "numpy.ndarray"),
    ],
)
def test_what_cannot_be_held_is_named(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        there_and_back(value)


def test_a_value_within_itself_raises() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueError, match="more than 100 levels deep, or within itself"):
        there_and_back(value)


NESTED: list[Any] = ["list"]
for _ in range(300):
    NESTED = ["list", NESTED]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (["device", "garbage"], "expected a device, got 'garbage'"),
        (["dtype", "garbage"], r"expected a value, got \['dtype', 'garbage'\]"),
        (["number", "|O", "00"], r"expected a type of numbers, got '\|O'"),
        (["number", "float32", "00000000"], "expected a type of numbers, got 'float32'"),
        (NESTED, "it is nested too deeply"),
    ],
)
def test_a_text_that_no_value_has_is_a_value_error(content: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        restored(content, {}.__getitem__)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
WORDS = ["list", "tuple", "size", "dict", "counter", "ordered", "tensor", "int", "float", "bytes"]
WORDS += ["dtype", "device", "number", "array"]
OURS = st.recursive(
    JSON,
    lambda inner: st.tuples(st.sampled_from(WORDS), st.lists(inner)).map(lambda e: [e[0], *e[1]]),
)


@given(OURS)
def test_other_json_is_a_value_or_an_error(content: Any) -> None:
    with suppress(ValueError, KeyError, TypeError):
        restored(content, {"a": torch.ones(1)}.__getitem__)
