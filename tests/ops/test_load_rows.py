"""load_rows, load_batch and join_batch: rows arrive in new memory while others leave."""

from __future__ import annotations

import pytest
import torch
from conftest import NEEDS_GPU
from reference import assert_same_bytes, some
from torch import Tensor

import speedtorch
from speedtorch.ops.functions import count_batch, join_batch, load_batch, load_rows, plan_rows

ROWS = 5000
SHAPES = [((3,), torch.float32), ((), torch.int64), ((4, 2), torch.bfloat16)]


def table(*, pinned: bool = False) -> list[Tensor]:
    """Fields of a table."""
    random = torch.Generator().manual_seed(1)
    fields = [
        torch.randint(99, (ROWS, *shape), generator=random).to(dtype) for shape, dtype in SHAPES
    ]
    if pinned:
        for field in fields:
            speedtorch.pin_memory_(field)
    return fields


def loaded(host: list[Tensor], leaving: list[Tensor], evict: Tensor, index: Tensor) -> None:
    """load_batch() of one part."""
    load_batch(host, leaving, evict, [index], ROWS, -1)


def left(count: int, device: str) -> list[Tensor]:
    """Rows that leave."""
    return [torch.full((count, *shape), 7).to(device, dtype) for shape, dtype in SHAPES]


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize(
    ("evicts", "more", "loads"), [(0, 0, 0), (0, 2, 3), (4, 0, 0), (40, 1, 70), (3000, 0, 2500)]
)
def test_rows_of_both_lists_are_carried_and_further_rows_are_read(
    evicts: int, more: int, loads: int, pinned: bool, device: str
) -> None:
    """`more` rows lie behind those that leave, as a padding's."""
    host = table(pinned=pinned and device == "cuda")
    before = [field.clone() for field in host]
    evict, load = some(evicts, ROWS, 2), some(loads, ROWS, 3)
    leaving = left(evicts + more, device)
    made = load_rows(host, leaving, evict.to(device), load.to(device))
    speedtorch.synchronize()
    carried = torch.isin(load, evict)
    gone = evict[~torch.isin(evict, load)]
    for field, old, rows in zip(host, before, made, strict=True):
        assert rows.device.type == device and rows.dtype == field.dtype
        expected = old[load]
        expected[carried] = 7
        assert_same_bytes(rows.cpu(), expected)
        expected, mine = old.clone(), field.clone()
        expected[gone] = 7
        for rows in (expected, mine):  # what is carried may be written here, too
            rows[load[carried]] = 0
        assert_same_bytes(mine, expected)


@pytest.mark.parametrize("pinned", [False, True])
def test_rows_without_eviction_are_carried_and_the_table_is_unchanged(
    pinned: bool, device: str
) -> None:
    host, evict, index = (
        table(pinned=pinned and device == "cuda"),
        some(300, ROWS, 2),
        some(700, ROWS, 3),
    )
    before = [field.clone() for field in host]
    lists = left(300, device), evict.to(device)
    planned = load_batch(host, *lists, [index.to(device, copy=True)], ROWS, -1, False)
    alone = load_rows(host, *lists, index.to(device), False)
    speedtorch.synchronize()
    carried = torch.isin(index, evict)
    for number, (field, old) in enumerate(zip(host, before, strict=True)):
        assert_same_bytes(field, old)
        expected = old[index]
        expected[carried] = 7
        assert_same_bytes(planned[7 + number].cpu(), expected)
        assert_same_bytes(alone[number].cpu(), expected)


# Of the rows and of the ids.
PLACES = [("cpu", "cpu"), *(pytest.param("cuda", ids, marks=NEEDS_GPU) for ids in ("cpu", "cuda"))]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("padding", [-1, 7])
@pytest.mark.parametrize("count", [0, 1, 100, 5000])
@pytest.mark.parametrize(("device", "of_ids"), PLACES)
def test_a_batch_is_planned_and_loaded(
    count: int, padding: int, dtype: torch.dtype, device: str, of_ids: str
) -> None:
    host = table(pinned=device == "cuda")
    random, evict = torch.Generator().manual_seed(count), some(30, ROWS, 2)
    index = torch.randint(20 if count == 100 else ROWS, (count,), generator=random).to(dtype)
    given = index.to(of_ids, copy=True)
    made = load_batch(host, left(30, device), evict.to(device), [given], ROWS, padding)
    if of_ids == "cpu":
        copied = made.pop()
        assert_same_bytes(copied, index)
        given.fill_(ROWS)  # which changes neither the copy nor what a GPU has yet to read
        assert_same_bytes(copied, index)
        assert copied.is_pinned() == (device == "cuda") or count == 0
    assert len(made) == 7 + len(host) and {tensor.device.type for tensor in made} == {device}
    *plan, named, loaded = (tensor.cpu() for tensor in made[:7])
    rows = [tensor.cpu() for tensor in made[7:]]
    expected = torch.unique(index.long())
    expected = expected[expected != padding]
    assert_same_bytes(named, expected)
    if padding >= 0:
        expected = torch.cat([expected, torch.tensor([padding])])
    assert_same_bytes(loaded, expected)
    assert_same_bytes(loaded[plan[1]], index.long())
    if padding < 0:
        for part, other in zip(plan, plan_rows(index, ROWS), strict=True):
            assert_same_bytes(part, other)
    fresh = [field[expected].clone() for field in table()]
    for part, row in zip(rows, fresh, strict=True):
        row[torch.isin(expected, evict)] = 7
        assert_same_bytes(part, row)


@pytest.mark.parametrize("bad", [-1, ROWS])
@pytest.mark.parametrize(("device", "of_ids"), PLACES)
def test_bad_ids_move_nothing(bad: int, device: str, of_ids: str) -> None:
    host, index = table(pinned=device == "cuda"), torch.tensor([3, bad, 4, bad], device=of_ids)
    with pytest.raises(IndexError, match=rf"id {bad} at position 1 of index .*\(2 of 4 ids"):
        load_batch(host, left(30, device), some(30, ROWS, 2).to(device), [index], ROWS, -1)
    for mine, other in zip(host, table(), strict=True):
        assert_same_bytes(mine, other)


@NEEDS_GPU
def test_ids_of_a_gpu_have_rows_there() -> None:
    index = torch.tensor([3], device="cuda")
    with pytest.raises(ValueError, match="load_batch: index is on cuda:0 but like is on cpu"):
        load_batch(table(), left(0, "cpu"), index[:0].cpu(), [index], ROWS, -1)


@NEEDS_GPU
def test_a_graph_cannot_hold_a_batch_that_is_counted() -> None:
    host, index = table(pinned=True), torch.tensor([3], device="cuda")
    leaving = left(0, "cuda")
    expected = pytest.raises(RuntimeError, match="load_batch: not supported while a CUDA graph")
    with expected, torch.cuda.graph(torch.cuda.CUDAGraph()):
        load_batch(host, leaving, index[:0], [index], ROWS, -1)


def test_rows_of_16_bits_are_loaded_in_the_dtype_of_evicted_rows(device: str) -> None:
    host = torch.randn(ROWS, 3).bfloat16()
    if device == "cuda":
        speedtorch.pin_memory_(host)
    load = some(50, ROWS, 4)
    nothing = torch.empty(0, 3, device=device)
    (rows,) = load_rows([host], [nothing], load[:0].to(device), load.to(device))
    assert_same_bytes(rows.cpu(), host[load].float())


@pytest.mark.parametrize(
    ("leaving", "message"),
    [
        ([], "leaving"),
        ([(4, 3)], "host, leaving and arriving must have the same length"),
        ([(1, 3), (1,), (1, 4, 2)], r"leaving\[0\] has 1 rows, at least 2|place 1"),
        ([(), (), ()], r"leaving\[0\]"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    leaving: list[tuple[int, ...]], message: str, device: str
) -> None:
    host = table()
    kinds = [dtype for _, dtype in SHAPES]
    given = [
        torch.zeros(shape, dtype=kind, device=device)
        for shape, kind in zip(leaving, kinds, strict=False)
    ]
    ids = torch.arange(2, device=device)
    for load in (load_rows, loaded):
        with pytest.raises((ValueError, IndexError), match=message):
            load(host, given, ids, ids)
            if device == "cuda":
                torch.cuda.synchronize()
                load_rows(host, left(0, device), ids[:0], ids[:0])  # raises what a kernel found


def test_memory_that_is_not_there_moves_no_row(device: str) -> None:
    host, ids = table(), some(40, ROWS, 2).to(device)
    given = [torch.empty((0, 1 << 50), device=device), *left(0, device)[1:]]
    for load in (load_rows, loaded):
        with pytest.raises(RuntimeError, match="load_rows: .*failed at allocating"):
            load(host, given, ids[:0], ids)
    for mine, other in zip(host, table(), strict=True):
        assert_same_bytes(mine, other)


@pytest.mark.parametrize("loads", [True, False])
@pytest.mark.parametrize("padding", [-1, 7])
@pytest.mark.parametrize("kinds", [[torch.int64], [torch.int32, torch.int64]], ids=str)
@pytest.mark.parametrize(("device", "of_ids"), PLACES)
def test_a_batch_joins_a_step(
    kinds: list[torch.dtype], padding: int, loads: bool, device: str, of_ids: str
) -> None:
    host, held = table(pinned=device == "cuda"), some(300, ROWS, 4).sort().values
    held = held[held != padding]
    before = [field.clone() for field in host]
    own = torch.cat([held, held.new_tensor([padding][: padding + 1])])
    rows = [(field[own] + 1).to(device) for field in before]
    evict, evict_places = some(30, ROWS, 2), torch.arange(30).flip(0)
    evict = evict[~torch.isin(evict, own)].sort().values
    evict_places = evict_places[: len(evict)]
    random = torch.Generator().manual_seed(1)
    parts = [torch.randint(ROWS, (200,), generator=random).to(kind) for kind in kinds]
    given = [part.to(of_ids, copy=True) for part in parts]
    step = rows, held.to(device)
    left_out = left(30, device), evict.to(device), evict_places.to(device)
    made = join_batch(host if loads else [], *left_out, *step, given, ROWS, padding)
    if of_ids == "cpu":
        index = torch.cat(parts)
        assert_same_bytes(made.pop(), index)
    alone = count_batch(given, rows[0], ROWS, padding)
    for part, other in zip(made[:7], alone, strict=False):
        assert_same_bytes(part[: len(other)], other)  # the status has more numbers
    positions, ids, places, new, new_places = (tensor.cpu() for tensor in made[7:12])
    expected = torch.cat([*parts]).unique()
    expected = expected[~torch.isin(expected, own)]
    assert_same_bytes(new, expected)
    order = torch.cat([ids, ids.new_tensor([padding][: padding + 1])])
    assert_same_bytes(order[positions], torch.cat([*parts]).long())
    assert_same_bytes(ids, torch.cat([held, new]).sort().values)
    assert_same_bytes(ids[places[: len(held)]], held)
    assert_same_bytes(ids[new_places], new)
    speedtorch.synchronize()
    carried = torch.isin(new, evict)
    for field, old, mine, joined in zip(host, before, rows, made[12:], strict=True):
        assert_same_bytes(joined[places.to(device)], mine)
        if loads:
            arrived = old[new]
            arrived[carried] = 7
            assert_same_bytes(joined[new_places.to(device)].cpu(), arrived)
            old[evict] = 7
            old[new[carried]] = field[new[carried]]  # what is carried may be written here, too
        assert_same_bytes(field, old)
    again = join_batch(host, *left_out, *step, [held[:9].to(of_ids)], ROWS, padding)
    assert len(again) == 8 + (of_ids == "cpu")
    assert again[7].tolist() == [*range(9)]
    for field, old in zip(host, before, strict=True):
        assert_same_bytes(field, old)
