"""safetensors headers as the safetensors library reads and writes them, and hostile ones."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import torch
from reference import DTYPES, as_bytes, assert_same_bytes, dtype_name, random_rows
from safetensors.torch import load, save

from speedtorch.files.safetensors_format import (
    in_file_order,
    read_safetensors_header,
    safetensors_header,
)

STORED = [dtype for dtype in DTYPES if dtype != torch.complex128]
GOOD = {"dtype": "U8", "shape": [2, 3], "data_offsets": [0, 6]}


@pytest.mark.parametrize("dtype", STORED, ids=dtype_name)
def test_the_safetensors_library_reads_what_follows_our_header(dtype: torch.dtype) -> None:
    rows = random_rows(3, (5,), dtype)
    header = safetensors_header({"weight": (rows.shape, dtype)})
    assert_same_bytes(load(header + as_bytes(rows).numpy().tobytes())["weight"], rows)


@pytest.mark.parametrize("dtype", STORED, ids=dtype_name)
def test_what_the_safetensors_library_writes_is_read(dtype: torch.dtype) -> None:
    rows = random_rows(3, (5,), dtype)
    data = save({"weight": rows}, {"author": "someone"})
    length = struct.unpack("<Q", data[:8])[0]
    array = read_safetensors_header(data[8 : 8 + length], len(data) - 8 - length)["weight"]
    assert (array.shape, array.dtype) == ((3, 5), dtype)
    assert data[array.offset : array.offset + array.nbytes] == as_bytes(rows).numpy().tobytes()


def test_fields_keep_their_order_while_larger_items_come_first() -> None:
    arrays = {"id": ((2, 1), torch.int8), "weight": ((2, 1), torch.float64)}
    header = safetensors_header(arrays)
    read = read_safetensors_header(header[8:], 18)
    assert list(read) == ["id", "weight"]
    assert in_file_order({"id": torch.int8, "weight": torch.float64}) == ["weight", "id"]
    assert read["weight"].offset == len(header)
    assert read["id"].offset == len(header) + 16


@pytest.mark.parametrize("length", range(1, 20))
def test_the_data_starts_at_a_multiple_of_eight_bytes(length: int) -> None:
    assert len(safetensors_header({"x" * length: ((1,), torch.int8)})) % 8 == 0


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (0,)], ids=str)
def test_empty_arrays_are_legal(shape: tuple[int, ...]) -> None:
    header = safetensors_header({"weight": (shape, torch.float32), "b": ((1,), torch.int8)})
    assert read_safetensors_header(header[8:], 1)["weight"].shape == shape


def test_names_may_be_of_any_script() -> None:
    header = safetensors_header({"größe 大": ((1,), torch.int8)})
    assert load(header + b"\x05")["größe 大"].tolist() == [5]


def bytes_at(offsets: list[int]) -> dict[str, Any]:
    """The entry of a run of bytes."""
    return {"dtype": "U8", "shape": [offsets[1] - offsets[0]], "data_offsets": offsets}


HOSTILE: dict[str, tuple[Any, str]] = {
    "no text": (b"\xff\xfe", "not valid JSON"),
    "no JSON": (b"{", "not valid JSON"),
    "no object": (b"[]", "not a JSON object"),
    "nested without end": (b"[" * 500_000, "nested too deeply"),
    "a number of many digits": (b'{"a":' + b"9" * 5000 + b"}", "not valid JSON"),
    "a name twice": (b'{"a":{},"a":{}}', "a name occurs twice"),
    "an entry that is no object": ({"a": 3}, "needs exactly dtype, shape and data_offsets"),
    "a missing key": ({"a": {"dtype": "U8", "shape": [6]}}, "needs exactly"),
    "a key too many": ({"a": {**GOOD, "x": 1}}, "needs exactly"),
    "an unknown dtype": ({"a": {**GOOD, "dtype": "U4"}}, "dtype 'U4'. Supported dtypes: BOOL"),
    "a dtype that is a list": ({"a": {**GOOD, "dtype": ["U8"]}}, "has the unsupported dtype"),
    "a negative size": ({"a": {**GOOD, "shape": [-2, -3]}}, "expected sizes of 0 or more"),
    "a size of true": ({"a": {**GOOD, "shape": [True, 6]}}, "expected sizes of 0 or more"),
    "a size of 6.0": ({"a": {**GOOD, "shape": [6.0]}}, "expected sizes of 0 or more"),
    "a size of 2^63": ({"a": {**GOOD, "shape": [2**63, 0]}}, "expected sizes of 0 or more"),
    "a shape that is a number": ({"a": {**GOOD, "shape": 6}}, "expected sizes of 0 or more"),
    "too many dimensions": ({"a": {**GOOD, "shape": [1] * 65 + [6]}}, "expected sizes"),
    "three offsets": ({"a": {**GOOD, "data_offsets": [0, 6, 6]}}, "expected two sizes"),
    "a negative offset": ({"a": {**GOOD, "data_offsets": [-6, 0]}}, "expected two sizes"),
    "offsets in reverse": ({"a": {**GOOD, "data_offsets": [6, 0]}}, "according to its offsets"),
    "a shape beyond its bytes": ({"a": {**GOOD, "shape": [2**62, 3]}}, "according to its shape"),
    "a hole": ({"a": {**GOOD, "data_offsets": [1, 7]}}, "starts at byte 1 of the data"),
    "an overlap": (
        {"a": bytes_at([0, 3]), "b": bytes_at([2, 6])},
        "'b' starts at byte 2 of the data instead of 3",
    ),
    "too few bytes described": ({"a": bytes_at([0, 5])}, "the file has 6"),
    "too many bytes described": ({"a": bytes_at([0, 7])}, "the file has 6"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused(case: str) -> None:
    header, message = HOSTILE[case]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with pytest.raises(ValueError, match=message):
        read_safetensors_header(text, 6)
