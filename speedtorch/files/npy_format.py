""".npy files, each with the rows of one field, without pickle.

A table that has only a weight is a single file, `table.npy`. Any other table has one file for each
field: `table.weight.npy`, `table.exp_avg.npy`. These files are replaced together through a hidden
folder (new_files.py), in which a reader looks first. A program that ignores this folder finds
complete files. During the switch or after a killed save it may find both old and new files.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from tokenize import TokenError

import numpy as np
import torch
from torch import Tensor

from speedtorch.files.file_format import NewContent, ReadAt, StoredArray, are_sizes
from speedtorch.files.new_files import switch_folder

__all__ = ["NPY_DTYPES", "files_to_read", "files_to_write", "npy_header", "read_arrays"]

# More than NumPy's limit of a header (10,000 characters).
_HEADER_BYTES = 16_384

_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}

# NumPy's errors for a bad header; a NUL byte raises SystemError in Python 3.12.
_NO_HEADER = (
    *(ValueError, TypeError, SyntaxError, TokenError, RecursionError, MemoryError, SystemError),
)

# NumPy's name of each dtype that it shares with torch.
NPY_DTYPES: dict[str, torch.dtype] = {
    np.dtype(name).str: getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}


def files_to_write(path: str, fields: Mapping[str, Tensor]) -> list[NewContent]:
    """See FileFormat. Raises ValueError if other files would be read as fields of this table."""
    targets = _paths(path, fields)
    headers = [npy_header(field.shape, field.dtype) for field in fields.values()]
    if path not in targets.values():
        extra_files = [path] if os.path.lexists(path) else []
        extra_files += [_path(path, name) for name in _names(path) if name not in fields]
        if extra_files:
            raise ValueError(
                f"{path}: {', '.join(extra_files)} would be read as part of this table. Remove"
                " these files, choose another name, or save as .safetensors."
            )
    contents = ([field] for field in fields.values())
    return list(zip(targets.values(), headers, contents, strict=True))


def files_to_read(path: str, names: Collection[str] | None) -> dict[str, list[str]]:
    """See FileFormat."""
    place = switch_folder(path)
    targets = {"weight": path} if names is None else _paths(path, names)
    new = os.path.join(place, os.path.basename(path))
    if [*targets.values()] == [path] and not any(map(os.path.lexists, (new, path))):
        found = _names(path)
        if not found or (names is not None and not {*found} > {"weight"}):
            text = f"neither this file nor {path.removesuffix('.npy')}.<field>.npy exists"
            raise FileNotFoundError(errno.ENOENT, text, path)
        targets = {name: _path(path, name) for name in found}
    return {
        name: [os.path.join(place, os.path.basename(target)), target]
        for name, target in targets.items()
    }


def _paths(path: str, names: Collection[str]) -> dict[str, str]:
    if list(names) == ["weight"]:
        return {"weight": path}
    for name in names:
        if "." in name:
            text = "field names in .npy files must not have dots. Save as .safetensors."
            raise ValueError(f"field {name!r}: {text}")
    return {name: _path(path, name) for name in names}


def _path(path: str, name: str) -> str:
    return f"{path.removesuffix('.npy')}.{name}.npy"


def _names(path: str) -> list[str]:
    """Returns the fields that have their own file."""
    folder, begin = os.path.split(path.removesuffix("npy"))
    found: set[str] = set()
    # In this order the search finds a file that another process moves to its name meanwhile.
    for searched in (switch_folder(path), folder or "."):
        with suppress(FileNotFoundError):
            found.update(os.listdir(searched))
    ours = (
        entry[len(begin) : -len(".npy")]
        for entry in found
        if entry.startswith(begin) and entry.endswith(".npy") and len(entry) > len(begin) + 3
    )
    return sorted(name for name in ours if "." not in name)


def read_arrays(read: ReadAt, size: int) -> dict[str, StoredArray]:
    """See FileFormat."""
    start = bytearray(min(size, _HEADER_BYTES))
    read(memoryview(start), 0)
    return {"": read_npy_header(bytes(start), size)}


def npy_header(shape: Sequence[int], dtype: torch.dtype) -> bytes:
    """Returns all bytes of a .npy file before the elements."""
    names = {its_dtype: name for name, its_dtype in NPY_DTYPES.items()}
    if dtype not in names:
        remedy = "Convert the field to another dtype"
        if dtype.is_floating_point:
            remedy = "Save as .safetensors instead"
        raise ValueError(f".npy files cannot hold {dtype}. {remedy}.")
    header = io.BytesIO()
    content = {"descr": names[dtype], "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(header, content)
    return header.getvalue()


def read_npy_header(start: bytes, file_bytes: int) -> StoredArray:
    """Returns the array of a .npy file; `start` holds at least the header.

    Raises ValueError if torch cannot hold the array, or if it does not end at the file's end.
    """
    file = io.BytesIO(start)
    try:
        if (version := np.lib.format.read_magic(file)) not in _READERS:
            known = ", ".join(map(str, _READERS))
            raise ValueError(f"version {version} is not supported. Supported versions: {known}.")
        shape, fortran, dtype = _READERS[version](file)
    except _NO_HEADER as error:
        raise ValueError(f"the .npy header is invalid: {error}") from error
    if dtype.str not in NPY_DTYPES or dtype.hasobject or dtype.names:
        known = ", ".join(NPY_DTYPES)
        raise ValueError(
            f"dtype {dtype} is not supported. Supported dtypes: {known}. Convert the array to one"
            " of them with array.astype(dtype), and save again."
        )
    if fortran and len(shape) > 1:
        raise ValueError("the array is in Fortran order. Save np.ascontiguousarray(array) instead.")
    if not are_sizes(list(shape)):
        raise ValueError(f"the array has the shape {shape}; expected sizes of 0 or more")
    array = StoredArray(tuple(shape), NPY_DTYPES[dtype.str], file.tell())
    if (end := array.offset + array.nbytes) != file_bytes:
        raise ValueError(f"the header describes {end:,} bytes, but the file has {file_bytes:,}")
    return array
