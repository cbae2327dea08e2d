"""optimizer_state_swap with places: ids that ascend, and rows anywhere on the other side."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from conftest import NEEDS_GPU
from reference import assert_same_bytes, random_rows, some

import speedtorch
from speedtorch.ops.functions import exchange_rows, swap_placed

ROWS = 50
SHAPES = [((4,), torch.float32), ((3,), torch.float16), ((), torch.int64), ((2, 5), torch.uint8)]


MEMORY = pytest.mark.parametrize(
    ("device", "memory"),
    [
        *(("cpu", memory) for memory in ("auto", "plain")),
        *(
            pytest.param("cuda", memory, marks=NEEDS_GPU)
            for memory in ("auto", "registered", "plain", "cuda")
        ),
    ],
)


@MEMORY
@pytest.mark.parametrize("counts", [(0, 0), (0, 7), (9, 0), (20, 30), (50, 50)], ids=str)
def test_rows_go_from_and_to_their_places(
    device: str, counts: tuple[int, int], memory: str
) -> None:
    evict, load = (some(count, ROWS, seed) for seed, count in enumerate(counts))
    places = some(counts[0], 60, 3, ascending=False), some(counts[1], 55, 4, ascending=False)
    fields = {f"f{k}": shape for k, shape in enumerate(SHAPES)}
    table = speedtorch.HostTable.from_fields(ROWS, fields, memory)
    host = [table[name] for name in fields]
    for k, field in enumerate(host):
        field.copy_(random_rows(ROWS, *SHAPES[k], seed=k))
    leaving, arriving = (
        [random_rows(rows, *shape, seed=rows) for shape in SHAPES] for rows in (60, 55)
    )
    given = [tensor.to(device) for tensor in arriving]
    expected = [field.cpu().clone() for field in host], leaving, evict, arriving, load
    swap_placed(
        *(host, [tensor.to(device) for tensor in leaving], evict.to(device), places[0].to(device)),
        *(given, load.to(device), places[1].to(device)),
    )
    speedtorch.synchronize()
    reference.optimizer_state_swap(*expected, evict_places=places[0], load_places=places[1])
    for actual, wanted in zip([*host, *given], [*expected[0], *arriving], strict=True):
        assert_same_bytes(actual, wanted)


@MEMORY
@pytest.mark.parametrize("counts", [(0, 0), (0, 7), (9, 0), (20, 30)], ids=str)
@pytest.mark.parametrize("with_places", [False, True])
def test_rows_go_from_and_to_their_host_rows(
    device: str, counts: tuple[int, int], with_places: bool, memory: str
) -> None:
    first, row_of = 10**12, some(ROWS, ROWS, 9, ascending=False)  # the host row of `first`, ...
    evict, load = (some(count, ROWS, seed) for seed, count in enumerate(counts))
    places = [some(len(ids), 60, 3, ascending=False) for ids in (evict, load)]
    if not with_places:
        places = [torch.arange(len(ids)) for ids in (evict, load)]
    fields = {f"f{k}": shape for k, shape in enumerate(SHAPES)}
    table = speedtorch.HostTable.from_fields(ROWS, fields, memory)
    for k, name in enumerate(fields):
        table[name].copy_(random_rows(ROWS, *SHAPES[k], seed=k))
    leaving, arriving = (
        [random_rows(60, *shape, seed=seed) for shape in SHAPES] for seed in (5, 6)
    )
    given = [tensor.to(device) for tensor in arriving]
    lists = [
        (ids.to(device) + first, place.to(device) if with_places else None)
        for ids, place in zip((evict, load), places, strict=True)
    ]
    expected = [table[name].cpu()[row_of] for name in fields]
    exchange_rows(
        *([table[name] for name in fields], [tensor.to(device) for tensor in leaving]),
        *(*lists[0], given, *lists[1], 1, None, None),
        *(row_of[ids].to(device) for ids in (evict, load)),
    )
    speedtorch.synchronize()
    reference.optimizer_state_swap(
        *(expected, leaving, evict, arriving, load), evict_places=places[0], load_places=places[1]
    )
    for name, side, rows_after, loaded in zip(fields, given, expected, arriving, strict=True):
        assert_same_bytes(table[name].cpu()[row_of], rows_after)
        assert_same_bytes(side, loaded)


@pytest.mark.parametrize("which", ["evict", "load"])
@pytest.mark.parametrize("bad", [ROWS, -1])
def test_a_bad_host_row_is_an_error_and_is_not_moved(device: str, bad: int, which: str) -> None:
    table = speedtorch.HostTable(ROWS, 2).normal_(seed=0)
    before = table["weight"].clone()
    sides = [torch.full((2, 2), float(number), device=device) for number in (1, 2)]
    ids, none = torch.tensor([70, 80], device=device), torch.zeros(0, 2, device=device).long()[:, 0]
    host_rows = torch.tensor([bad, 3], device=device)
    lists = {"evict": (none, none), "load": (none, none)} | {which: (ids, host_rows)}
    with pytest.raises(IndexError, match=f"id {bad} at position 0 of {which} is out of range"):
        exchange_rows(
            *([table["weight"]], sides[:1], lists["evict"][0], None, sides[1:], lists["load"][0]),
            *(None, 1, None, None, lists["evict"][1], lists["load"][1]),
        )
        speedtorch.synchronize()
    speedtorch.synchronize()  # said once
    if device == "cpu":
        assert torch.equal(table["weight"], before) and sides[1].eq(2).all()
    else:  # the other entry is moved
        before[3] = 1 if which == "evict" else before[3]
        assert torch.equal(table["weight"], before)
        assert torch.equal(sides[1][1].cpu(), before[3]) == (which == "load")


PLAN = speedtorch.plan_rows(torch.tensor([0, 1]), ROWS)
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "evict_places and load_places must be passed together"),
        ({"load_places": PLAN[0], "evict_plan": PLAN}, "without a plan"),
    ],
)
def test_places_go_together_and_without_a_plan(given: Any, message: str) -> None:
    weight, sides = torch.zeros(ROWS, 2), [torch.zeros(3, 2) for _ in range(2)]
    with pytest.raises(ValueError, match=message):
        speedtorch.optimizer_state_swap(
            *([weight], sides[:1], PLAN[0], sides[1:], PLAN[0]), evict_places=PLAN[0], **given
        )


# Several tables in one call


@MEMORY
@pytest.mark.parametrize(
    ("rows", "widths"),
    [([7], 2), ([3, 0, 9, 1], 3), ([2] * 150, 1), ([5] * 11, 17)],
    ids=["one", "few, one without rows", "more than a launch takes", "many fields"],
)
def test_rows_of_several_tables_go_from_and_to_their_places(
    device: str, rows: list[int], widths: int, memory: str
) -> None:
    if (device, memory) == ("cuda", "plain"):
        pytest.skip("several tables in pageable memory are refused")
    total = sum(rows)
    fields = {f"f{k}": SHAPES[k % len(SHAPES)] for k in range(widths)}
    tables = [speedtorch.HostTable.from_fields(count, fields, memory) for count in rows if count]
    empty = {name: torch.empty(0, *shape, dtype=dtype) for name, (shape, dtype) in fields.items()}
    ours = iter(tables)
    hosts = [next(ours) if count else empty for count in rows]
    evict, load = some(total // 2, total, 1), some(total * 2 // 3, total, 2)
    places = [some(len(ids), total, 3, ascending=False) for ids in (evict, load)]
    host, leaving, arriving = (
        [random_rows(total, *shape, seed=seed + k) for k, shape in enumerate(fields.values())]
        for seed in (0, 100, 200)
    )
    for name, values in zip(fields, host, strict=True):
        for table, part in zip(hosts, values.split(rows), strict=True):
            table[name].copy_(part)
    given = [tensor.to(device) for tensor in arriving]
    exchange_rows(
        [table[name] for table in hosts for name in fields],
        *([tensor.to(device) for tensor in leaving], evict.to(device), places[0].to(device)),
        *(given, load.to(device), places[1].to(device), len(hosts)),
    )
    speedtorch.synchronize()
    reference.optimizer_state_swap(
        *(host, leaving, evict, arriving, load), evict_places=places[0], load_places=places[1]
    )
    for name, side, rows_after, loaded in zip(fields, given, host, arriving, strict=True):
        assert_same_bytes(torch.cat([table[name].cpu() for table in hosts]), rows_after)
        assert_same_bytes(side, loaded)


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


@pytest.mark.parametrize("which", ["evict", "load"])
def test_ids_of_several_tables_must_ascend_on_the_cpu(which: str) -> None:
    memory = torch.zeros(60, 2)
    hosts = [memory[10:20], memory[30:40]]
    sides = [torch.full((4, 2), float(number)) for number in (1, 2)]
    bad, none = torch.tensor([5, 9, 12, 3]), torch.tensor([], dtype=torch.int64)
    evict, load = (bad, none) if which == "evict" else (none, bad)
    with pytest.raises(IndexError, match=f"id 3 at position 3 of {which} is not larger"):
        exchange_rows(hosts, sides[:1], evict, None, sides[1:], load, None, 2)
    assert not memory.any() and sides[1].eq(2).all()


@NEEDS_GPU
def test_several_tables_in_pageable_memory_are_refused() -> None:
    ids, side = torch.tensor([1], device="cuda"), torch.zeros(3, 2, device="cuda")
    hosts = [torch.zeros(4, 2), torch.zeros(4, 2)]
    with pytest.raises(ValueError, match="pageable memory, .* with several tables needs .* Pin it"):
        exchange_rows(hosts, [side], ids, ids, [side.clone()], ids, ids, 2)


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
