"""safetensors files, each with all fields: a header that describes plain arrays, then their bytes.

The files contain no pickle and no code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from speedtorch.files.file_format import NewContent, ReadAt, StoredArray, are_sizes
from speedtorch.files.npy_format import NPY_DTYPES

__all__ = ["files_to_read", "files_to_write", "read_arrays"]

# The limit for files to write: a table with a thousand fields needs 0.1 MB.
LARGEST_HEADER = 1 << 20
LARGEST_READ_HEADER = 100_000_000  # the limit of the format
RESERVED = "__metadata__"  # the header's entry for metadata; no array has this name

DTYPES = {
    "BOOL": torch.bool,
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def files_to_write(path: str, fields: Mapping[str, Tensor]) -> list[NewContent]:
    """Returns the path of the file, its header, and the fields in file order; see FileFormat."""
    arrays = {name: (field.shape, field.dtype) for name, field in fields.items()}
    order = in_file_order({name: field.dtype for name, field in fields.items()})
    return [(path, safetensors_header(arrays), [fields[name] for name in order])]


def files_to_read(path: str, names: Collection[str] | None) -> dict[str, list[str]]:
    """Returns one file for all fields, whose names therefore have no prefix; see FileFormat."""
    return {"": [path]}


def read_arrays(read: ReadAt, size: int) -> dict[str, StoredArray]:
    """Reads and checks the header of a file of `size` bytes; see FileFormat."""
    length = bytearray(min(size, 8))
    read(memoryview(length), 0)
    if size < 8:
        raise ValueError(f"a safetensors file has at least 8 bytes, got {size}")
    if (header_bytes := int.from_bytes(length, "little")) > min(LARGEST_READ_HEADER, size - 8):
        raise ValueError(
            f"the header length is {header_bytes:,} bytes. The file has {size:,} bytes, of which 8 "
            f"are before the header, and the limit is {LARGEST_READ_HEADER:,}."
        )
    header = bytearray(header_bytes)
    read(memoryview(header), 8)
    return read_safetensors_header(bytes(header), size - 8 - header_bytes)


def in_file_order(dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """Sorts names by item size, largest first, so that each array is aligned in the file."""
    return sorted(dtypes, key=lambda name: -dtypes[name].itemsize)


def safetensors_header(arrays: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> bytes:
    """Returns length, JSON and padding to a multiple of 8 bytes; arrays follow in_file_order().

    No array may have the name RESERVED.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    # The JSON has the caller's order of names, which is the order of a reader's arrays.
    header: dict[str, Any] = {RESERVED: {"format": "pt"}} | dict.fromkeys(arrays)
    end = 0
    for name in in_file_order({name: dtype for name, (_, dtype) in arrays.items()}):
        shape, dtype = arrays[name]
        if dtype not in names:
            remedy = " (.npy files can)" if dtype in NPY_DTYPES.values() else ""
            raise ValueError(f"safetensors files cannot hold {dtype} (field {name!r}){remedy}")
        offsets = [end, end + math.prod(shape) * dtype.itemsize]
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LARGEST_HEADER:
        raise ValueError(
            f"the header needs {len(text):,} bytes, but the limit is {LARGEST_HEADER:,}. Use fewer "
            "fields or shorter names."
        )
    return len(text).to_bytes(8, "little") + text


def read_safetensors_header(header: bytes, data_bytes: int) -> dict[str, StoredArray]:
    """Returns the arrays of a safetensors file from its JSON header, in order, without metadata.

    Raises ValueError if the header breaks the format; the arrays must cover the data exactly.
    """
    try:
        content = json.loads(header.decode(), object_pairs_hook=_without_repeats)
    except RecursionError as error:
        raise ValueError("the header is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"the header is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError("the header is not a JSON object")
    content.pop(RESERVED, None)
    arrays: dict[str, StoredArray] = {}
    spans: list[tuple[int, int, str]] = []
    # pop() frees the dict of an entry at once. Many live dicts start a full garbage collection.
    for name in list(content):
        start, stop, arrays[name] = _array(name, content.pop(name), 8 + len(header))
        spans.append((start, stop, name))
    end = 0
    for start, stop, name in sorted(spans):
        if stop - start != (array := arrays[name]).nbytes:
            raise ValueError(
                f"{name!r} has {array.nbytes:,} bytes according to its shape {array.shape}, but "
                f"{stop - start:,} according to its offsets"
            )
        if start != end:
            raise ValueError(f"{name!r} starts at byte {start:,} of the data instead of {end:,}")
        end = stop
    if end != data_bytes:
        text = f"{end:,} bytes of data, but the file has {data_bytes:,}"
        raise ValueError(f"the header describes {text}")
    return arrays


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(content := dict(pairs)) != len(pairs):
        raise ValueError("a name occurs twice")
    return content


def _array(name: str, entry: Any, begin: int) -> tuple[int, int, StoredArray]:
    """Returns an entry's offsets and array; `begin` is the file offset of the data."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r} needs exactly dtype, shape and data_offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise ValueError(
            f"{name!r} has the unsupported dtype {str(entry['dtype'])[:40]!r}. Supported dtypes: "
            f"{', '.join(DTYPES)}."
        )
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not are_sizes(shape) or len(shape) > 64:
        raise ValueError(f"{name!r} has the shape {str(shape)[:80]}; expected sizes of 0 or more")
    if not are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name!r} has the data_offsets {str(offsets)[:80]}; expected two sizes")
    return offsets[0], offsets[1], StoredArray(tuple(shape), dtype, begin + offsets[0])
