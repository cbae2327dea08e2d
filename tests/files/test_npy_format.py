""".npy headers as NumPy reads and writes them, and hostile ones."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
import torch
from reference import DTYPES, as_bytes, dtype_name, random_rows

from speedtorch.files.npy_format import NPY_DTYPES, npy_header, read_npy_header

STORED = [dtype for dtype in DTYPES if dtype in NPY_DTYPES.values()]


def saved(array: Any) -> bytes:
    """What np.save writes."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize("dtype", STORED, ids=dtype_name)
def test_our_files_are_those_of_numpy_byte_for_byte(dtype: torch.dtype) -> None:
    rows = random_rows(3, (5,), dtype)
    ours = npy_header(rows.shape, dtype) + as_bytes(rows).numpy().tobytes()
    assert ours == saved(rows.numpy())


@pytest.mark.parametrize("dtype", STORED, ids=dtype_name)
def test_files_of_numpy_are_read(dtype: torch.dtype) -> None:
    rows = random_rows(3, (5,), dtype)
    data = saved(rows.numpy())
    array = read_npy_header(data, len(data))
    assert (array.shape, array.dtype) == ((3, 5), dtype)
    assert data[array.offset :] == as_bytes(rows).numpy().tobytes()


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)], ids=str)
def test_empty_arrays_are_legal(shape: tuple[int, ...]) -> None:
    assert read_npy_header(npy_header(shape, torch.float32), 128).shape == shape


def test_version_2_is_read() -> None:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.zeros((2, 3), np.float32), version=(2, 0))
    assert read_npy_header(file.getvalue(), len(file.getvalue())).shape == (2, 3)


def header(text: str) -> bytes:
    """A version 1 header with this text."""
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


GOOD = "{'descr': '|u1', 'fortran_order': False, 'shape': (6,)}"
HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "header is invalid"),
    "no magic": (b"x" * 200, "header is invalid"),
    "version 3": (b"\x93NUMPY\x03\x00" + bytes(200), r"version \(3, 0\)"),
    "cut off": (header(GOOD)[:30], "the .npy header is invalid"),
    "code": (header("__import__('os').abort()"), "header is invalid"),
    "nested without end": (header("(" * 9000), "header is invalid"),
    "a long header": (header(GOOD + " " * 20_000), "header is invalid"),
    "no order": (header(GOOD.replace("fortran", "other")), "header is invalid"),
    "objects": (saved(np.array([{}, None])), "dtype object is not supported"),
    "records": (saved(np.zeros(3, [("a", "i4")])), "is not supported. Supported dtypes: "),
    "text": (saved(np.array(["a"])), "is not supported. Supported dtypes: "),
    "the other byte order": (saved(np.zeros(3, ">f4")), "dtype >f4 is not supported"),
    "columns first": (saved(np.asfortranarray(np.ones((2, 3)))), "Save np.ascontiguousarray"),
    "a negative size": (header(GOOD.replace("6", "-6")), "expected sizes of 0 or more"),
    "a size of true": (header(GOOD.replace("6", "True")), "expected sizes|header is invalid"),
    "a size of 2^63": (header(GOOD.replace("6", str(2**63))), "expected sizes of 0 or more"),
    "more than the file": (header(GOOD.replace("6", str(2**62))), "the header describes"),
    "less than the file": (saved(np.zeros(3)) + b"x", "the header describes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused(case: str) -> None:
    data, message = HOSTILE[case]
    with pytest.raises(ValueError, match=message):
        read_npy_header(data[:16_384], len(data))
