"""optimizer_state_swap with places: ids that ascend, and rows anywhere on the other side."""

from __future__ import annotations

import pytest
import torch
from conftest import NEEDS_GPU
from reference import assert_same_bytes
from torch import Tensor

import speedtorch
from speedtorch.ops.functions import exchange_rows, swap_placed

ROWS = 50
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
SHAPES = [((4,), torch.float32), ((3,), torch.float16), ((), torch.int64), ((2, 5), torch.uint8)]


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    made = torch.randint(
        256, (*shape, dtype.itemsize), generator=torch.Generator().manual_seed(seed)
    )
    return made.to(torch.uint8).view(dtype).reshape(shape)


def some(count: int, of: int, seed: int, *, ascending: bool) -> Tensor:
    chosen = torch.randperm(of, generator=torch.Generator().manual_seed(seed))[:count]
    return chosen.sort().values if ascending else chosen


def swapped(
    host: Tensor, leaving: Tensor, evict: Tensor, arriving: Tensor, load: Tensor, *places: Tensor
) -> tuple[Tensor, Tensor]:
    """The reference, row by row."""
    host_after, arriving_after = host.clone(), arriving.clone()
    evicted = dict(zip(evict.tolist(), places[0].tolist(), strict=True))
    arrives = dict(zip(load.tolist(), places[1].tolist(), strict=True))
    for row, place in arrives.items():
        arriving_after[place] = leaving[evicted[row]] if row in evicted else host[row]
    for row, place in evicted.items():
        if row not in arrives:
            host_after[row] = leaving[place]
    return host_after, arriving_after


@pytest.mark.parametrize("memory", ["auto", "registered", "plain", "cuda"])
@pytest.mark.parametrize("counts", [(0, 0), (0, 7), (9, 0), (20, 30), (50, 50)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_rows_go_from_and_to_their_places(
    device: str, counts: tuple[int, int], memory: str
) -> None:
    if device == "cpu" and memory in ("registered", "cuda"):
        pytest.skip("needs a GPU")
    evict = some(counts[0], ROWS, 1, ascending=True)
    load = some(counts[1], ROWS, 2, ascending=True)
    places = some(counts[0], 60, 3, ascending=False), some(counts[1], 55, 4, ascending=False)
    fields = {f"f{k}": shape for k, shape in enumerate(SHAPES)}
    table = speedtorch.HostTable.from_fields(ROWS, fields, memory)
    hosts, leaving, arriving, expected = [], [], [], []
    for k, (shape, dtype) in enumerate(SHAPES):
        field = table[f"f{k}"]
        field.copy_(random((ROWS, *shape), dtype, k))
        hosts.append(field)
        leaving.append(random((60, *shape), dtype, k + 10))
        arriving.append(random((55, *shape), dtype, k + 20))
        expected.append(swapped(field.cpu(), leaving[-1], evict, arriving[-1], load, *places))
    on_device = [tensor.to(device) for tensor in arriving]
    leaving = [tensor.to(device) for tensor in leaving]
    ids, slots = ([tensor.to(device) for tensor in lists] for lists in ((evict, load), places))
    swap_placed(hosts, leaving, ids[0], slots[0], on_device, ids[1], slots[1])
    speedtorch.synchronize()
    for field, side, (host_after, arriving_after) in zip(hosts, on_device, expected, strict=True):
        assert_same_bytes(field, host_after)
        assert_same_bytes(side, arriving_after)


BAD = {
    "out of range": ([1, 50], [0, 1], "id 50 at position 1 of {ids} is out of range.* 50 rows"),
    "negative": ([-1, 4], [0, 1], "id -1 at position 0 of {ids} is out of range"),
    "twice": ([4, 4], [0, 1], "id 4 at position 1 of {ids} is not larger than the previous id"),
    "descending": ([1, 5, 4], [0, 1, 2], "id 4 at position 2 of {ids} is not larger than"),
    "place": ([1, 5], [0, 3], "place 3 of the row at position 1 of {ids} is .* for 3 rows"),
    "negative place": ([1, 5], [-1, 2], "place -1 of the row at position 0 of {ids}"),
}


@pytest.mark.parametrize("which", ["evict", "load"])
@pytest.mark.parametrize(("ids", "places", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("device", DEVICES)
def test_bad_ids_and_places_are_errors_and_move_nothing(
    device: str, ids: list[int], places: list[int], message: str, which: str
) -> None:
    table = speedtorch.HostTable(ROWS, 2).normal_(seed=0)
    before = table["weight"].clone()
    sides = [torch.full((3, 2), float(number), device=device) for number in (1, 2)]
    good = torch.tensor([2, 3], device=device), torch.tensor([0, 1], device=device)
    bad = torch.tensor(ids, device=device), torch.tensor(places, device=device)
    evict, load = (bad, good) if which == "evict" else (good, bad)
    with pytest.raises(IndexError, match=message.format(ids=which)):
        swap_placed([table["weight"]], sides[:1], *evict, sides[1:], *load)
        speedtorch.synchronize()
    speedtorch.synchronize()  # said once
    assert_same_bytes(table["weight"], before)
    assert sides[1].eq(2).all()


@NEEDS_GPU
@pytest.mark.parametrize("which", ["evict", "load"])
@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        (0, 70_000, "id 70000 at position {} of {} is out of range.* [(]2 of 60000"),
        (0, 7, "id 7 at position {} of {} is not larger than"),
        (1, -1, "place -1 of the row at position {} of {}"),
    ],
    ids=["id", "order", "place"],
)
def test_of_long_lists_the_first_bad_entry_is_reported_and_nothing_moves(
    part: int, value: int, message: str, which: str
) -> None:
    table = speedtorch.empty((70_000, 2)).zero_()
    lists = [[torch.arange(60_000, device="cuda") for _ in range(2)] for _ in range(2)]
    sides = [torch.full((60_000, 2), value, device="cuda") for value in (5.0, 7.0)]
    bad = lists[which == "load"][part]
    bad[40_000] = bad[50_000] = value
    with pytest.raises(IndexError, match=message.format(40_000, which)):
        swap_placed([table], sides[:1], *lists[0], sides[1:], *lists[1])
        speedtorch.synchronize()
    assert not table.any() and sides[1].eq(7).all()
    bad[:] = torch.arange(60_000, device="cuda")
    swap_placed([table], sides[:1], *lists[0], sides[1:], *lists[1])
    speedtorch.synchronize()
    assert not table.any() and sides[1].eq(5).all()


def test_arguments_that_do_not_fit_are_errors() -> None:
    weight, side, longer = torch.zeros(ROWS, 2), torch.zeros(3, 2), torch.zeros(4, 2)
    ids, places = torch.tensor([1, 2]), torch.tensor([0, 1])

    def swap(**changes: object) -> None:
        given = {"evict": ids, "load": ids, "evict_places": places, "load_places": places}
        chosen = given | changes
        speedtorch.optimizer_state_swap(
            [weight], [side], chosen.pop("evict"), [side.clone()], chosen.pop("load"), **chosen
        )

    swap()
    for changes, message in (
        ({"evict": ids.int()}, "evict must be a contiguous int64"),
        ({"load_places": places.int()}, "load_places must be a contiguous int64"),
        ({"load_places": places[:1]}, r"load_places has shape \[1\], expected \[2\]"),
        ({"load_places": None}, "evict_places and load_places must be passed together"),
        ({"evict_plan": speedtorch.plan_rows(ids, ROWS)}, "without a plan"),
    ):
        with pytest.raises(ValueError, match=message):
            swap(**changes)
    fields = [weight, weight.clone()]
    with pytest.raises(ValueError, match=r"leaving\[1\] has 4 rows, leaving\[0\] has 3"):
        swap_placed(fields, [side, longer], ids, places, [side.clone(), side.clone()], ids, places)


# Several tables in one call


@pytest.mark.parametrize("memory", ["auto", "registered", "cuda"])
@pytest.mark.parametrize(
    ("rows", "widths"),
    [([7], 2), ([3, 0, 9, 1], 3), ([2] * 150, 1), ([5] * 11, 17)],
    ids=["one", "few, one without rows", "more than a launch takes", "many fields"],
)
@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_several_tables_go_from_and_to_their_places(
    device: str, rows: list[int], widths: int, memory: str
) -> None:
    if device == "cpu" and memory in ("registered", "cuda"):
        pytest.skip("needs a GPU")
    total = sum(rows)
    fields = {f"f{k}": SHAPES[k % len(SHAPES)] for k in range(widths)}
    tables = [speedtorch.HostTable.from_fields(count, fields, memory) for count in rows if count]
    empty = {name: torch.empty(0, *shape, dtype=dtype) for name, (shape, dtype) in fields.items()}
    ours = iter(tables)
    hosts = [next(ours) if count else empty for count in rows]
    evict = some(total // 2, total, 1, ascending=True)
    load = some(total * 2 // 3, total, 2, ascending=True)
    places = [some(len(ids), total, 3, ascending=False) for ids in (evict, load)]
    leaving, arriving, expected = [], [], []
    for k, (name, (shape, dtype)) in enumerate(fields.items()):
        values = random((total, *shape), dtype, k)
        for host, part in zip(hosts, values.split(rows), strict=True):
            host[name].copy_(part)
        leaving.append(random((total, *shape), dtype, k + 100))
        arriving.append(random((total, *shape), dtype, k + 200))
        expected.append(swapped(values, leaving[-1], evict, arriving[-1], load, *places))
    on_device = [tensor.to(device) for tensor in arriving]
    exchange_rows(
        [host[name] for host in hosts for name in fields],
        [tensor.to(device) for tensor in leaving],
        *(evict.to(device), places[0].to(device)),
        on_device,
        *(load.to(device), places[1].to(device), len(hosts)),
    )
    speedtorch.synchronize()
    for name, side, (host_after, arriving_after) in zip(fields, on_device, expected, strict=True):
        assert_same_bytes(torch.cat([host[name].cpu() for host in hosts]), host_after)
        assert_same_bytes(side, arriving_after)


@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_id_of_several_tables_is_reported_once_and_moves_nothing(device: str) -> None:
    tables = [speedtorch.HostTable(2, 2).normal_(seed=k) for k in range(100)]
    before = [table["weight"].clone() for table in tables]
    sides = [torch.full((3, 2), float(number), device=device) for number in (1, 2)]
    good, bad = torch.tensor([2, 199], device=device), torch.tensor([2, 200], device=device)
    places = torch.tensor([0, 1], device=device)
    hosts = [table["weight"] for table in tables]
    with pytest.raises(IndexError, match="id 200 at position 1 of load is out of range.* 200 rows"):
        exchange_rows(hosts, sides[:1], good, places, sides[1:], bad, places, 100)
        speedtorch.synchronize()
    speedtorch.synchronize()  # said once
    assert all(torch.equal(*pair) for pair in zip(before[:99], hosts, strict=False))
    if device == "cuda":  # the other entries are moved
        assert torch.equal(hosts[99][0], before[99][0]) and hosts[99][1].eq(1).all()
        assert sides[1].tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    else:
        assert torch.equal(before[99], hosts[99]) and sides[1].eq(2).all()


def test_tables_that_do_not_fit_are_errors() -> None:
    ids, side, none = torch.tensor([1]), torch.zeros(3, 2), torch.tensor([], dtype=torch.int64)
    weight, state, four = (torch.zeros(4, 2) for _ in range(3))

    def swap(hosts: list[Tensor], count: int, sides: list[Tensor]) -> None:
        arriving = [tensor.clone() for tensor in sides]
        exchange_rows(hosts, sides, ids, ids, arriving, none, none, count)

    two = [side, side.clone()]
    swap([weight, state], 2, [side])
    swap([weight, state], 1, two)
    for hosts, count, sides, message in (
        ([], 1, [side], "host must have at least one field"),
        ([weight], 0, [side], "host must have at least one field"),
        ([weight], -1, [side], "host must have at least one field"),
        ([weight, state, four], 2, [side], "host has 3 fields, .* each of 2 tables"),
        ([weight, state], 2, two, "must have the same length, got 1, 2 and 2"),
        ([weight, weight], 2, [side], r"host\[0\] and host\[1\] overlap"),
        ([weight, torch.zeros(4, 3)], 2, [side], r"leaving\[0\] has shape"),
        ([weight, state, four, torch.zeros(5, 2)], 2, two, r"host\[3\] has 5 rows, .*\[2\] has 4"),
    ):
        with pytest.raises(ValueError, match=message):
            swap(hosts, count, sides)
    assert not weight.any() and not state.any()


@NEEDS_GPU
def test_several_tables_in_pageable_memory_are_refused() -> None:
    ids, side = torch.tensor([1], device="cuda"), torch.zeros(3, 2, device="cuda")
    hosts = [torch.zeros(4, 2), torch.zeros(4, 2)]
    with pytest.raises(ValueError, match="pageable memory, .* with several tables needs .* Pin it"):
        exchange_rows(hosts, [side], ids, ids, [side.clone()], ids, ids, 2)


@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_place_of_a_planned_list_loses_no_row(device: str) -> None:
    # Row 2 is in both lists, and its place among the loaded rows is none.
    table = speedtorch.HostTable(5, 2)["weight"]
    held = torch.tensor([[1.0, 1.0], [2.0, 2.0]], device=device)
    loaded = torch.full((2, 2), 9.0, device=device)
    ids = torch.tensor([1, 2], device=device), torch.tensor([2, 4], device=device)
    places = torch.tensor([0, 1], device=device), torch.tensor([7, 1], device=device)
    with pytest.raises(IndexError, match="place 7"):
        exchange_rows([table], [held], ids[0], places[0], [loaded], ids[1], places[1])
        speedtorch.synchronize()
    if device == "cuda":  # the other entries are moved, and what was to stay is written home
        assert table[1:3].tolist() == [[1.0, 1.0], [2.0, 2.0]]
        assert loaded.tolist() == [[9.0, 9.0], [0.0, 0.0]]
    else:
        assert not table.any() and (loaded == 9).all()
