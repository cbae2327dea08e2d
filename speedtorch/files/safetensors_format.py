"""The header of safetensors files, written and read without touching any row.

It describes plain arrays and nothing else: no pickle, no code. What it says is believed only after
it agrees with the size of the file, so that a hostile file can take no memory.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from speedtorch.files.npy_format import NPY_DTYPES
from speedtorch.files.stored_array import StoredArray, are_sizes

__all__ = ["LARGEST_HEADER", "in_file_order", "read_safetensors_header", "safetensors_header"]

# The format allows 100 MB; a table with a thousand fields needs 0.1 MB.
LARGEST_HEADER = 1 << 20

_SAFETENSORS_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
_SAFETENSORS: dict[str, torch.dtype] = {
    name: getattr(torch, dtype)
    for name, dtype in _SAFETENSORS_NAMES.items()
    if hasattr(torch, dtype)
}


def in_file_order(dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """Names in the order of their bytes: larger items first, so that each array is aligned.

    Args:
        dtypes: Name to elements.

    Returns:
        The names.

    Example:
        >>> in_file_order({"id": torch.int8, "weight": torch.float32})
        ['weight', 'id']
    """
    return sorted(dtypes, key=lambda name: -dtypes[name].itemsize)


def safetensors_header(arrays: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> bytes:
    """The first bytes of a safetensors file.

    Args:
        arrays: Name to (shape, dtype); their bytes follow in the order of `in_file_order`.

    Returns:
        Length, JSON and padding to a multiple of 8 bytes.

    Raises:
        ValueError: A dtype that the format does not know, or too many or too long names.

    Example:
        >>> safetensors_header({"weight": ((2, 3), torch.float32)})[8:70]
        b'{"__metadata__":{"format":"pt"},"weight":{"dtype":"F32","shape'
    """
    names = {dtype: name for name, dtype in _SAFETENSORS.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}} | dict.fromkeys(arrays)
    end = 0
    for name in in_file_order({name: dtype for name, (_, dtype) in arrays.items()}):
        shape, dtype = arrays[name]
        if dtype not in names:
            remedy = " (.npy files can)" if dtype in NPY_DTYPES.values() else ""
            raise ValueError(f"safetensors files cannot hold {dtype} (field {name!r}){remedy}")
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": names[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LARGEST_HEADER:
        raise ValueError(
            f"the header takes {len(text):,} bytes, the limit is {LARGEST_HEADER:,}: use fewer "
            "fields or shorter names"
        )
    return struct.pack("<Q", len(text)) + text


def read_safetensors_header(header: bytes, data_bytes: int) -> dict[str, StoredArray]:
    """Reads the JSON of a safetensors file.

    Args:
        header: The JSON, without the length before it.
        data_bytes: How many bytes follow the header in the file.

    Returns:
        The arrays in the header's order, without metadata.

    Raises:
        ValueError: Anything that the format forbids: the arrays must cover the data exactly.

    Example:
        >>> text = safetensors_header({"weight": ((2, 3), torch.float32)})
        >>> read_safetensors_header(text[8:], 24)["weight"].shape
        (2, 3)
    """
    try:
        content = json.loads(header.decode(), object_pairs_hook=_without_repeats)
    except RecursionError as error:
        raise ValueError("the header is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"the header is no valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError("the header is no JSON object")
    content.pop("__metadata__", None)
    arrays = {name: _array(name, entry) for name, entry in content.items()}
    end = 0
    for name, (start, stop, array) in sorted(arrays.items(), key=lambda item: item[1][:2]):
        if stop - start != array.nbytes:
            raise ValueError(
                f"{name!r} takes {array.nbytes:,} bytes by its shape {array.shape} and "
                f"{stop - start:,} by its offsets"
            )
        if start != end:
            raise ValueError(f"{name!r} starts at byte {start:,} of the data instead of {end:,}")
        end = stop
    if end != data_bytes:
        raise ValueError(f"the header describes {end:,} bytes of data, the file has {data_bytes:,}")
    return {
        name: array._replace(offset=8 + len(header) + start)
        for name, (start, _, array) in arrays.items()
    }


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name occurs twice")
    return content


def _array(name: str, entry: Any) -> tuple[int, int, StoredArray]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r} needs exactly dtype, shape and data_offsets")
    dtype = _SAFETENSORS.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise ValueError(
            f"{name!r} has the dtype {str(entry['dtype'])[:40]!r}; known are "
            + ", ".join(_SAFETENSORS)
        )
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not are_sizes(shape) or len(shape) > 64:
        raise ValueError(f"{name!r} has the shape {str(shape)[:80]}; expected sizes of 0 or more")
    if not are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name!r} has the data_offsets {str(offsets)[:80]}; expected two sizes")
    return offsets[0], offsets[1], StoredArray(tuple(shape), dtype, 0)
