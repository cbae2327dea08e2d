"""The header of .npy files, written and read without touching any row (and without pickle)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from tokenize import TokenError

import numpy as np
import torch

from speedtorch.files.stored_array import StoredArray, are_sizes

__all__ = ["NPY_DTYPES", "NPY_HEADER_BYTES", "npy_header", "read_npy_header"]

# More than NumPy believes of a header (10,000 characters).
NPY_HEADER_BYTES = 16_384

# What NumPy's parser raises at texts that are no header.
_BROKEN = (ValueError, TypeError, SyntaxError, TokenError, RecursionError, MemoryError)

# NumPy's name of each dtype that it shares with torch.
NPY_DTYPES: dict[str, torch.dtype] = {
    np.dtype(name).str: getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}


def npy_header(shape: Sequence[int], dtype: torch.dtype) -> bytes:
    """The first bytes of a .npy file.

    Args:
        shape: The array's shape.
        dtype: Its elements.

    Returns:
        Everything that comes before the elements.

    Raises:
        ValueError: NumPy has no such dtype (bfloat16, float8).

    Example:
        >>> np.load(io.BytesIO(npy_header((2, 2), torch.int8) + bytes(4))).tolist()
        [[0, 0], [0, 0]]
    """
    names = {its_dtype: name for name, its_dtype in NPY_DTYPES.items()}
    if dtype not in names:
        raise ValueError(f".npy files cannot hold {dtype}: save as .safetensors instead")
    header = io.BytesIO()
    content = {"descr": names[dtype], "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(header, content)
    return header.getvalue()


def read_npy_header(start: bytes, file_bytes: int) -> StoredArray:
    """Reads the header of a .npy file.

    Args:
        start: The first NPY_HEADER_BYTES of the file, or all of a shorter one.
        file_bytes: Size of the whole file.

    Returns:
        The array.

    Raises:
        ValueError: No such header, an array that torch cannot hold in this form (objects, other
            byte orders, Fortran order), or one that does not end where the file ends.

    Example:
        >>> read_npy_header(npy_header((2, 3), torch.int8), 134).shape
        (2, 3)
    """
    file = io.BytesIO(start)
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
        else:
            raise ValueError(f"it has version {version}; known are (1, 0) and (2, 0)")
    except _BROKEN as error:
        raise ValueError(f"this is no .npy header: {error}") from error
    if dtype.str not in NPY_DTYPES or dtype.hasobject or dtype.names:
        raise ValueError(f"arrays of dtype {dtype} are not read; known are {', '.join(NPY_DTYPES)}")
    if fortran and len(shape) > 1:
        raise ValueError("its columns lie first (Fortran order): save np.ascontiguousarray(array)")
    if not are_sizes(list(shape)):
        raise ValueError(f"it has the shape {shape}; expected sizes of 0 or more")
    array = StoredArray(tuple(shape), NPY_DTYPES[dtype.str], file.tell())
    if array.offset + array.nbytes != file_bytes:
        raise ValueError(
            f"its header describes a file of {array.offset + array.nbytes:,} bytes, it has "
            f"{file_bytes:,}"
        )
    return array
