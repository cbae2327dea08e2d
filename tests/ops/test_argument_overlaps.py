"""Any two arguments of any op may share memory: the op refuses what it would write, or is right."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_arguments import (
    ONE_TENSOR,
    ROWS,
    are_written,
    numbers,
    op_arguments,
    ops,
    tensors_of,
    with_tensors,
)
from reference import assert_same_bytes
from torch import Tensor

import speedtorch

NAMES = list(op_arguments("cpu"))


def attempt(op: Any, arguments: tuple[Any, ...]) -> tuple[Exception | None, list[Tensor]]:
    """Makes a call and waits for it; its error, and what it returned."""
    try:
        result = op(*arguments)
        speedtorch.synchronize()
    except (ValueError, IndexError) as error:
        return error, []
    plans = (ops.plan_batch.default, ops.plan_parts.default)
    if op in (*plans, ops.diff_ids.default) and len(result) > 6:
        *plan, counts = result[:5] if op in plans else result[-1:]
        _, kept, loaded, evicted = counts[-4:].tolist()
        sizes = (loaded, loaded, kept, kept, evicted, evicted)
        lists = result[5:11] if plan else result[:-1]
        lists = [part[:size] for part, size in zip(lists, sizes, strict=True)]
        result = [*plan, counts, *lists]
    if op == ops.merge_rows.default:  # the other rows are memory of whatever was there
        result = [*result[:3], *(rows[result[1]] for rows in result[3:])]
    return None, [] if result is None else tensors_of((result,))


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Fails unless they are the same bit for bit."""
    for mine, theirs in zip(actual, expected, strict=True):
        assert_same_bytes(mine, theirs)


def sharing(first: Tensor, second: Tensor, begin: int) -> tuple[Tensor, Tensor]:
    """Copies of both in one piece of memory, the second's at byte `begin`; its contents win."""
    size = max(tensor.numel() * tensor.itemsize for tensor in (first, second))
    arena = torch.zeros(2 * size + begin, dtype=torch.uint8, device=first.device)
    copies = []
    for tensor, start in ((first, 0), (second, begin)):
        part = arena[start : start + tensor.numel() * tensor.itemsize]
        copies.append(part.view(tensor.dtype).view(tensor.shape).copy_(tensor))
    return copies[0], copies[1]


_arguments = functools.cache(op_arguments)


def fresh(name: str, device: str) -> tuple[Any, tuple[Any, ...]]:
    """An op and its arguments, with tensors of their own."""
    op, arguments = _arguments(device)[name]
    return op, with_tensors(arguments, [tensor.clone() for tensor in tensors_of(arguments)])


def names_of(op: Any, arguments: tuple[Any, ...]) -> list[str]:
    """Of each tensor the name that messages have for it."""
    names = []
    for part, declared in zip(arguments, op._schema.arguments, strict=False):
        if isinstance(part, list):
            names += [f"{declared.name}[{k}]" for k in range(len(tensors_of((part,))))]
        elif isinstance(part, Tensor):
            names.append(declared.name)
    return names


def pairs_of(name: str, device: str) -> list[tuple[int, int]]:
    """Places of every two tensors, each first and second in turn."""
    count = len(tensors_of(_arguments(device)[name][1]))
    pairs = itertools.combinations(range(count), 2)
    return [pair if sum(pair) % 2 else pair[::-1] for pair in pairs]


@pytest.mark.parametrize("begin", ["the same byte", "a number further", "the last number"])
@pytest.mark.parametrize("name", NAMES)
def test_every_pair_of_arguments_that_overlaps(device: str, name: str, begin: str) -> None:
    for first, second in pairs_of(name, device):
        op, arguments = fresh(name, device)
        tensors, written = tensors_of(arguments), are_written(op, arguments)
        if device == "cuda" and not (written[first] or written[second]):
            continue  # ids and plans that are none, which a GPU checks late, or not at all
        last = (tensors[first].numel() - 1) * tensors[first].element_size() // 8 * 8
        at = {"the same byte": 0, "a number further": min(8, last), "the last number": last}[begin]
        tensors[first], tensors[second] = sharing(tensors[first], tensors[second], at)
        before = [tensor.clone() for tensor in tensors]
        apart = [tensor.clone() for tensor in tensors]
        versions = [tensor._version for tensor in tensors]
        error, result = attempt(op, with_tensors(arguments, tensors))
        if written[first] or written[second]:
            assert isinstance(error, ValueError) and "overlap in memory" in str(error)
            both = {names_of(op, arguments)[place] for place in (first, second)}
            assert both <= set(re.findall(r"[\w\[\]]+", str(error))), (both, str(error))
        if error is None:  # else the contents may be no plan, which a GPU would go by
            expected_error, expected = attempt(op, with_tensors(arguments, apart))
            assert expected_error is None
            assert_same([*tensors, *result], [*apart, *expected])
        else:
            assert_same(tensors, before)
            assert [tensor._version for tensor in tensors] == versions


@pytest.mark.parametrize("name", NAMES)
def test_arguments_side_by_side_are_no_overlap(device: str, name: str) -> None:
    for first, second in pairs_of(name, device):
        op, arguments = fresh(name, device)
        tensors = tensors_of(arguments)
        end = tensors[first].numel() * tensors[first].itemsize
        tensors[first], tensors[second] = sharing(tensors[first], tensors[second], end)
        apart = [tensor.clone() for tensor in tensors]
        error, result = attempt(op, with_tensors(arguments, tensors))
        _, expected = attempt(op, with_tensors(arguments, apart))
        assert error is None
        assert_same([*tensors, *result], [*apart, *expected])


def test_every_op_is_listed() -> None:
    declared = {
        name.removeprefix("speedtorch::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("speedtorch::")
    }
    taking = set()
    for name in declared:
        packet, overload = (*name.split("."), "default")[:2]
        types = [
            argument.type for argument in getattr(getattr(ops, packet), overload)._schema.arguments
        ]
        taking |= {name for kind in types if "Tensor" in str(kind)}
    assert taking - ONE_TENSOR == {name.split(",")[0] for name in NAMES}


# Fields of one record


def test_ids_table_and_rows_may_be_fields_of_one_record(device: str) -> None:
    record = numbers(ROWS, 8, seed=1).to(device)
    table, index, rows = record[:, 2:5], record[:4, 0], record[:4, 5:8]
    expected = record.clone()
    speedtorch.pinned_scatter(expected[:, 2:5].clone(), index.clone(), rows.clone())
    moved = table.clone()
    speedtorch.pinned_scatter(moved, index.clone(), rows.clone())
    speedtorch.pinned_scatter(table, index, rows)
    speedtorch.synchronize()
    expected[:, 2:5] = moved
    assert torch.equal(record, expected)


def test_every_other_row_is_copied_to_those_between(device: str) -> None:
    rows = numbers(12, 3, seed=2).to(device)
    expected = rows.clone()
    expected[::2] = rows[1::2]
    speedtorch.pinned_copy(rows[::2], rows[1::2])
    speedtorch.synchronize()
    assert torch.equal(rows, expected)


def bytes_of(tensor: Tensor, storage: int) -> set[int]:
    """The bytes that a tensor covers, counted from its storage's first."""
    marks = torch.zeros(storage, dtype=torch.int16)
    marks.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(1)
    return set(marks.nonzero().flatten().tolist())


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, int]) -> tuple[int, int]:
    """Row stride and offset of rows of this shape within 64 elements."""
    rows, columns = shape
    stride = draw(st.integers(columns, 9))
    return stride, draw(st.integers(0, 64 - (rows - 1) * stride - columns))


@settings(max_examples=300)
@given(st.data())
def test_rows_that_share_no_byte_are_copied_and_overlaps_raise(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 4)))
    (to_stride, to), (from_stride, begin) = (data.draw(views(shape)) for _ in range(2))
    values = torch.arange(64, dtype=torch.int16)
    dst = values.as_strided(shape, (to_stride, 1), to)
    src = values.as_strided(shape, (from_stride, 1), begin)
    expected = values.numpy().copy()
    np.lib.stride_tricks.as_strided(expected[to:], shape, (to_stride * 2, 2))[:] = src.numpy()
    shared = bytes_of(dst, 64) & bytes_of(src, 64)
    try:
        speedtorch.pinned_copy(dst, src)
    except ValueError as error:
        assert "overlap in memory" in str(error)
        assert torch.equal(values, torch.arange(64, dtype=torch.int16))
        # Rows at unlike distances are refused if rows further on would meet.
        assert shared or to_stride != from_stride
    else:
        assert not shared
        assert np.array_equal(values.numpy(), expected)


# Nothing is shared


def test_a_side_without_rows_may_lie_anywhere(device: str) -> None:
    """What a step passes that only writes or only reads."""
    table, ids = numbers(ROWS, 3, seed=1).to(device), torch.arange(4, device=device)
    none = ids[:0]
    rows = numbers(4, 3, seed=2).to(device)
    ops.optimizer_state_swap.placed([table], [rows], ids, ids.flip(0), [rows[:0]], none, none)
    assert torch.equal(table[:4], rows.flip(0))
    ops.optimizer_state_swap.placed([table], [table[:0]], none, none, [rows], ids, ids.clone())
    assert torch.equal(rows, table[:4])
