"""Plain torch and NumPy references of the ops, with the ops' own signatures, and rows to feed them.

The references work on CPU tensors, one row after the other, and are obviously right rather than
fast. Rows are compared as bytes, so that NaN payloads and the sign of zero count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
DTYPES_WITH_ADDITION = (*FLOATS, *COMPLEX, *SIGNED, *UNSIGNED, torch.bool)
DTYPES = (*DTYPES_WITH_ADDITION, *FLOAT8)

# 1 byte to 8 KiB: every vector width, one byte less and one more, and the odd ones between.
WIDTHS: tuple[int, ...]
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 47, 63, 64, 65, 100, 127, 128)
WIDTHS += (129, 255, 256, 400, 511, 512, 513, 1000, 1023, 1024, 1536, 2047, 2048, 4095, 4096)
WIDTHS += (8191, 8192)


def dtype_name(dtype: torch.dtype) -> str:
    """The readable test id of a dtype."""
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------------
# Rows to feed the ops
# ------------------------------------------------------------------------------------------------


def some(count: int, of: int, seed: int, *, ascending: bool = True) -> Tensor:
    """Distinct numbers below `of`."""
    chosen = torch.randperm(of, generator=torch.Generator().manual_seed(seed))[:count]
    return chosen.sort().values if ascending else chosen


def random_rows(
    rows: int,
    row_shape: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    *,
    gap: int = 0,
    offset: int = 0,
    seed: int = 0,
) -> Tensor:
    """Rows of random bits `[rows, *row_shape]`: NaN payloads, -0.0 and infinities included.

    Args:
        rows: how many rows.
        row_shape: the shape of one row; `()` makes a 1-D table.
        dtype: any dtype; bools are 0 or 1.
        gap: elements between one row's end and the next row's start.
        offset: elements in front of the first row.
        seed: the same seed gives the same bits.
    """
    columns = math.prod(row_shape)
    elements = offset + rows * (columns + gap)
    last = 1 if dtype == torch.bool else 255
    flat = torch.empty(elements * dtype.itemsize, dtype=torch.uint8)
    flat.numpy()[:] = np.random.default_rng(seed).integers(0, last, flat.numel(), np.uint8, True)
    return as_rows(flat.view(dtype), rows, row_shape, gap=gap, offset=offset)


def small_numbers(
    rows: int,
    row_shape: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    *,
    gap: int = 0,
    offset: int = 0,
    seed: int = 0,
) -> Tensor:
    """As `random_rows`, but finite values whose sums depend on the order of the additions."""
    elements = offset + rows * (math.prod(row_shape) + gap)
    random = np.random.default_rng(seed)
    if dtype.is_floating_point or dtype.is_complex:
        scale = 2.0 ** random.integers(-6, 7, elements)
        flat = torch.from_numpy(random.standard_normal(elements) * scale)
        if dtype.is_complex:
            flat = torch.complex(flat, flat.flip(0))
        flat = flat.to(dtype)
    else:
        flat = random_rows(elements, dtype=dtype, seed=seed)
    return as_rows(flat, rows, row_shape, gap=gap, offset=offset)


def as_rows(flat: Tensor, rows: int, row_shape: Sequence[int], *, gap: int, offset: int) -> Tensor:
    """A view of `flat` as `[rows, *row_shape]`, rows contiguous inside, `gap` elements apart."""
    columns = math.prod(row_shape)
    inner = [math.prod(row_shape[axis + 1 :]) for axis in range(len(row_shape))]
    return flat.as_strided((rows, *row_shape), (columns + gap, *inner), offset)


def record_fields(
    record: Tensor, fields: Sequence[tuple[Sequence[int], torch.dtype]]
) -> list[Tensor]:
    """The fields of records, side by side from the first byte on.

    Args:
        record: uint8 `[rows, record_bytes]`; record_bytes is a multiple of every element's size.
        fields: shape and dtype of each field, in order; each begins at a multiple of its element.
    """
    result, start = [], 0
    for shape, dtype in fields:
        flat = record.view(dtype)
        gap = flat.size(1) - math.prod(shape)
        offset = start // dtype.itemsize
        result.append(as_rows(flat, record.size(0), shape, gap=gap, offset=offset))
        start += math.prod(shape) * dtype.itemsize
    return result


def storage_bytes(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage, also those that no element of the tensor covers."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def plain_bytes(count: int) -> Tensor:
    """`count` bytes of pageable host memory, as a uint8 tensor `[count]`."""
    return torch.empty(count, dtype=torch.uint8)


def layout_copy(tensor: Tensor, allocate: Callable[[int], Tensor] = plain_bytes) -> Tensor:
    """A copy with the same strides, offset and bits, gaps between rows included.

    Args:
        tensor: any strided tensor.
        allocate: takes a count of bytes and returns a uint8 tensor `[count]` in the wanted memory.
    """
    source = storage_bytes(tensor.detach())
    typed = allocate(source.numel()).copy_(source).view(tensor.dtype)
    return typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's elements as one run of bytes on the CPU, in logical order."""
    # contiguous() would keep any stride of a dimension of one element, which view() then refuses.
    dense = torch.empty(tensor.numel(), dtype=tensor.dtype)
    dense.view(tensor.shape).copy_(tensor.detach())
    return dense.view(torch.uint8)


def assert_same_bytes(actual: Tensor, expected: Tensor) -> None:
    """Fails unless dtype, shape and every bit are the same; the device may differ."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(as_bytes(actual), as_bytes(expected))


def assert_same_content(actual: Any, expected: Any) -> None:
    """As `assert_same_bytes`, also for dicts, lists and tuples of tensors and other values."""
    if isinstance(expected, Tensor):
        assert_same_bytes(actual, expected)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert_same_content(actual[name], value)
    elif isinstance(expected, list | tuple):
        for one, other in zip(actual, expected, strict=True):
            assert_same_content(one, other)
    else:
        assert actual == expected


def copied(state: Any) -> Any:
    """A state dict with tensors of its own, in less time than deepcopy takes."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {name: copied(value) for name, value in state.items()}
    return [copied(each) for each in state] if isinstance(state, list) else state


def assert_same_storage(actual: Tensor, expected: Tensor) -> None:
    """As `assert_same_bytes`, also for the bytes before, between and after the rows."""
    assert_same_bytes(actual, expected)
    assert torch.equal(storage_bytes(actual).cpu(), storage_bytes(expected).cpu())


# ------------------------------------------------------------------------------------------------
# The ops
# ------------------------------------------------------------------------------------------------


def pinned_gather(
    table: Tensor, index: Tensor, *, out: Tensor | None = None, plan: list[Tensor] | None = None
) -> Tensor:
    """Row `index[i]` of `table` for every i: `[*index.shape, *table.shape[1:]]`."""
    ids = index.reshape(-1).tolist()
    result = torch.empty((len(ids), *table.shape[1:]), dtype=table.dtype)
    for position, row in enumerate(ids):
        result[position].copy_(table[row])
    result = result.reshape(*index.shape, *table.shape[1:])
    return result if out is None else out.copy_(result)


def pinned_scatter(
    table: Tensor,
    index: Tensor,
    src: Tensor,
    *,
    accumulate: bool = False,
    plan: list[Tensor] | None = None,
) -> None:
    """Sets row `index[i]` of `table` to `src[i]`, or adds `src[i]` to it, for i in rising order."""
    ids = index.reshape(-1).tolist()
    rows = src.reshape(len(ids), *table.shape[1:])
    if accumulate and table.dtype != torch.bfloat16:
        np.add.at(table.numpy(), np.array(ids, dtype=np.int64), rows.numpy())
        return
    for position, row in enumerate(ids):
        if accumulate:
            table[row] += rows[position]
        else:
            table[row].copy_(rows[position])


def optimizer_state_swap(
    host: Sequence[Tensor],
    leaving: Sequence[Tensor],
    evict: Tensor,
    arriving: Sequence[Tensor],
    load: Tensor,
    *,
    evict_plan: list[Tensor] | None = None,
    load_plan: list[Tensor] | None = None,
    evict_places: Tensor | None = None,
    load_places: Tensor | None = None,
) -> None:
    """Writes `leaving` to the host rows `evict` and the host rows `load` to `arriving`, at once.

    A row in both lists goes from `leaving` to `arriving`, with the bits that the host would store;
    its host copy stays as it was.
    """
    leaves, arrives = (
        dict(zip(ids.tolist(), range(len(ids)) if at is None else at.tolist(), strict=True))
        for ids, at in ((evict, evict_places), (load, load_places))
    )
    for rows, out_rows, in_rows in zip(host, leaving, arriving, strict=True):
        for row, position in arrives.items():
            kept = out_rows[leaves[row]].to(rows.dtype) if row in leaves else rows[row]
            in_rows[position].copy_(kept)
        for row, position in leaves.items():
            if row not in arrives:
                rows[row].copy_(out_rows[position])


def plan_rows(index: Tensor, rows: int) -> list[Tensor]:
    """The address order of ids that are all in range: `[unique, inverse, order, offsets, status]`.

    With n ids of which u are distinct, `unique` holds u ids and `offsets` n + 1 entries. `status`:
    bad ids, position and id of the first one, u, rows, n, position and id of the first repeat.
    """
    ids = index.reshape(-1).numpy().astype(np.int64)
    unique, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
    order = np.argsort(ids, kind="stable")
    offsets = np.full(ids.size + 1, ids.size, dtype=np.int64)
    offsets[: unique.size] = np.cumsum(counts) - counts
    repeats = [position for position, id in enumerate(ids) if id in ids[:position]]
    repeat = (repeats[0], ids[repeats[0]]) if repeats else (ids.size, 0)
    status = np.array([0, ids.size, 0, unique.size, rows, ids.size, *repeat], dtype=np.int64)
    return [
        torch.from_numpy(part) for part in (unique, inverse.reshape(-1), order, offsets, status)
    ]
