"""A step whose numbers of rows only its device knows: compare, swap, hold and clear."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from conftest import NEEDS_GPU
from graph_capture import captured
from reference import assert_same_bytes, random_rows, some
from torch import Tensor

import speedtorch
from speedtorch.ops.functions import plan_batch

ops = torch.ops.speedtorch
ROWS = 50
# Of the rows of a field: vectors of 16, 8, 2, 1 and no bytes, and more than the lanes of a warp.
SHAPES = [((4,), torch.float32), ((), torch.int64), ((3,), torch.float16), ((2, 5), torch.uint8)]
SHAPES += [((0,), torch.float32), ((9, 64), torch.float32)]
# Why a batch does not fit.
BAD_IDS, TOO_MANY, FOREIGN = 1, 2, 3
NO_ID = 2**63 - 1  # after the ids that are held


def status_of(count: int, device: str) -> Tensor:
    """The status of a plan of `count` distinct ids."""
    return torch.tensor([0, count, 0, count, ROWS, count, count, 0], device=device)


def padded(numbers: Tensor, size: int, rest: int = -1) -> Tensor:
    """The numbers, and `rest` after them up to `size` entries."""
    return torch.cat([numbers, torch.full((size - len(numbers),), rest)])


@dataclass
class Block:
    """Held rows of a capacity, and the word of a batch that does not fit it."""

    capacity: int
    device: str
    rows: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = padded(torch.tensor(self.rows, dtype=torch.int64), self.capacity).to(self.device)
        self.status = status_of(len(self.rows), self.device)
        self.halt = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.fault = torch.zeros(8, dtype=torch.int64, device=self.device)

    def compared(self, plan: list[Tensor], *, table_rows: int = ROWS) -> list[Tensor]:
        lists: tuple[Tensor, ...] = ops.diff_ids(
            *(plan[0], plan[4], self.ids, self.status), *(table_rows, self.halt, self.fault)
        )
        assert [len(tensor) for tensor in lists] == [*[self.capacity] * 6, 4]
        return list(lists)


def plan_of(ids: list[int] | Tensor, device: str, padding: int = -1) -> list[Tensor]:
    index = torch.as_tensor(ids, dtype=torch.int64)
    return plan_batch(index.to(device), ROWS, padding, -1)[:5]


def listed(lists: list[Tensor]) -> list[list[int]]:
    """The entries that count: ids and places arriving, places staying, ids and places leaving."""
    _, kept, loaded, evicted = lists[-1].tolist()
    sizes = [loaded] * 2 + [kept] * 2 + [evicted] * 2
    return [tensor[:size].tolist() for tensor, size in zip(lists, sizes, strict=False)]


# diff_ids


def compared(named: list[int], held: list[int], capacity: int) -> list[list[int]]:
    """The reference: entries of the lists that count, of ids that both ascend."""
    named = named if len(named) <= capacity else []
    loaded = [(id, place) for place, id in enumerate(named) if id not in held]
    kept = [(place, held.index(id)) for place, id in enumerate(named) if id in held]
    evicted = [(id, place) for place, id in enumerate(held) if id not in named]
    return [[pair[k] for pair in pairs] for pairs in (loaded, kept, evicted) for k in (0, 1)]


@pytest.mark.parametrize("padding", [-1, 0, 17, 49])
@pytest.mark.parametrize("more", [-1, 0, 4], ids=["smaller", "equal", "larger"])
def test_a_batch_is_compared_with_held_rows_as_far_as_it_fits(
    device: str, more: int, padding: int
) -> None:
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        index = torch.randint(ROWS, (3 * seed,), generator=random)
        if seed == 0 and padding >= 0:
            index = torch.full((2,), padding)
        named = sorted(set(index.tolist()) - {padding})
        capacity = max(len(named) + more, 0)
        held = [id for id in some(capacity * 2 // 3, ROWS, seed).tolist() if id != padding]
        block = Block(capacity, device, held)
        found = block.compared(plan_of(index, device, padding))
        loaded, _, kept, _, evicted, _ = expected = compared(named, held, capacity)
        fits = len(named) <= capacity
        assert found[-1].tolist() == [len(named) * fits, len(kept), len(loaded), len(evicted)]
        assert listed(found) == expected
        assert block.halt.tolist() == [not fits, 0]
        assert block.fault.tolist()[:3] == ([0] * 3 if fits else [TOO_MANY, len(named), capacity])


def test_the_first_batch_that_does_not_fit_is_reported_and_halts(device: str) -> None:
    block, plan = Block(3, device, [2, 5]), plan_of([1, 2, 3, 4, 2], device)
    bad, good = plan_of([2, 3], device), plan_of([2, 5, 6], device)
    bad[4][:3] = torch.tensor([4, 1, 99])
    everything = [0, 0, 0, 2], [[], [], [], [], [2, 5], [0, 1]]

    def batch(plan: list[Tensor], table_rows: int = ROWS) -> tuple[list[int], list[list[int]]]:
        compared = block.compared(plan, table_rows=table_rows)
        return compared[-1].tolist(), listed(compared)

    for given, table_rows, fault in (
        (plan, ROWS, [TOO_MANY, 4, 3, 0, 5, 0, 5, ROWS]),
        (bad, ROWS, [BAD_IDS, 2, 3, 4, 1, 99, 2, ROWS]),
        (good, ROWS + 1, [FOREIGN, 3, 3, 0, 3, 0, 3, ROWS + 1]),
        (plan_of([], device), 7, [FOREIGN, 0, 3, 0, 0, 0, 0, 7]),
    ):
        assert batch(given, table_rows) == everything
        assert block.halt.tolist() == [1, 0] and block.fault.tolist() == fault
        for left_out in (1, 2):
            assert batch(good) == everything
            assert block.halt.tolist() == [1, left_out] and block.fault.tolist() == fault
        block.halt.zero_()
        assert batch(good) == ([3, 2, 1, 0], [[6], [2], [0, 1], [0, 1], [], []])
        assert block.halt.tolist() == [0, 0]


@NEEDS_GPU
@pytest.mark.parametrize("memory", ["torch_pinned", "registered", "managed"])
def test_the_host_sees_a_fault_without_waiting(memory: str) -> None:
    block, plan = Block(2, "cuda"), plan_of([1, 2, 3], "cuda")
    if memory == "torch_pinned":
        block.fault = torch.zeros(8, dtype=torch.int64, pin_memory=True)
    else:
        block.fault = speedtorch.empty(8, dtype=torch.int64, memory=memory).zero_()
    block.compared(plan)
    until = time.monotonic() + 20
    while block.fault[0] == 0 and time.monotonic() < until:
        time.sleep(0.001)
    assert block.fault.tolist() == [TOO_MANY, 3, 2, 0, 3, 0, 3, ROWS]


# exchange_rows, of counts on the device


def fields_of(rows: int, seed: int, device: str = "cpu") -> list[Tensor]:
    return [
        random_rows(rows, shape, dtype, seed=seed + k).to(device)
        for k, (shape, dtype) in enumerate(SHAPES)
    ]


def assert_same_fields(actual: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        assert_same_bytes(mine, theirs)


@pytest.mark.parametrize(
    ("device", "memory"),
    [
        ("cpu", "auto"),
        *(pytest.param("cuda", to, marks=NEEDS_GPU) for to in ("auto", "registered", "cuda")),
    ],
)
@pytest.mark.parametrize("counts", [(0, 0), (0, 7), (9, 0), (20, 30), (40, 40)], ids=str)
def test_as_many_rows_are_swapped_as_the_counts_say(
    device: str, counts: tuple[int, int], memory: str
) -> None:
    named = {f"f{k}": shape for k, shape in enumerate(SHAPES)}
    table = speedtorch.HostTable.from_fields(ROWS, named, memory)
    host = [table[name] for name in named]
    leaving, arriving = fields_of(60, 10), fields_of(55, 20)
    lists = [some(count, ROWS, seed) for seed, count in enumerate(counts)]
    places = [torch.randperm(of)[:count] for count, of in zip(counts, (60, 55), strict=True)]
    expected_host, expected = fields_of(ROWS, 0), [tensor.clone() for tensor in arriving]
    for into, values in zip(host, expected_host, strict=True):
        into.copy_(values)
    speedtorch.optimizer_state_swap(
        *(expected_host, leaving, lists[0], expected, lists[1]),
        evict_places=places[0],
        load_places=places[1],
    )
    for into, side in zip(expected_host, leaving, strict=True):  # those in both lists, too
        into[lists[0]] = side[places[0]]
    garbage = [padded(tensor, 40, -7).to(device) for tensor in (lists[0], lists[1], *places)]
    number = [torch.tensor([count], device=device) for count in counts]
    arriving = [tensor.to(device) for tensor in arriving]
    ops.exchange_rows(
        *(host, [tensor.to(device) for tensor in leaving], garbage[0], garbage[2]),
        *(arriving, garbage[1], garbage[3], 1, *number),
    )
    speedtorch.synchronize()
    assert_same_fields(host, expected_host)
    assert_same_fields(arriving, expected)


NOTHING = ([0.0] * 6, [7.0] * 4)


def counted_swap(
    device: str, moved: tuple[list[float], list[float]] = NOTHING, **changes: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows 1 and 2 leave, 2 and 3 arrive; the host's rows and those that arrived.

    Where that raises, these are `moved`.
    """
    host = speedtorch.empty((6,)) if device == "cuda" else torch.empty(6)
    host.zero_()
    side, arriving = (torch.full((4,), value, device=device) for value in (5.0, 7.0))
    given = {"evict": [1, 2], "evict_places": [0, 1], "load": [2, 3], "load_places": [3, 0]}
    given |= {"evict_count": [2], "load_count": [2]}
    lists = {name: torch.tensor(values) for name, values in given.items()} | changes
    evict, places, *more = (tensor.to(device) for tensor in lists.values())
    load, load_places, *counts = more
    try:
        ops.exchange_rows([host], [side], evict, places, [arriving], load, load_places, 1, *counts)
        speedtorch.synchronize()
    except (IndexError, ValueError):
        assert (host.tolist(), arriving.tolist()) == moved
        raise
    return host, arriving.cpu()


@NEEDS_GPU
@pytest.mark.parametrize("count", [-1, 3, 2**62, -(2**63)])
def test_a_count_that_is_none_is_zero_on_a_gpu(count: int) -> None:
    for name, rows in (
        ("evict_count", ([0] * 6, [0, 7, 7, 0])),
        ("load_count", ([0, 5, 5, 0, 0, 0], [7] * 4)),
    ):
        host, arriving = counted_swap("cuda", **{name: torch.tensor([count])})
        assert (host.tolist(), arriving.tolist()) == rows


@pytest.mark.parametrize(
    ("changes", "message", "moved"),
    [
        (
            {"evict": [1, 6]},
            "id 6 at position 1 of evict is out of range.* 6 rows",
            ([0, 5, 0, 0, 0, 0], [0, 7, 7, 0]),
        ),
        (
            {"load_places": [0, 4]},
            "place 4 of the row at position 1 of load",
            ([0, 5, 5, 0, 0, 0], [5, 7, 7, 7]),
        ),
    ],
    ids=["id", "place"],
)
def test_ids_and_places_that_count_are_checked(
    device: str, changes: dict[str, list[int]], message: str, moved: tuple[list[float], list[float]]
) -> None:
    lists = {name: torch.tensor(values) for name, values in changes.items()}
    with pytest.raises(IndexError, match=message):
        counted_swap(device, moved if device == "cuda" else NOTHING, **lists)
    (name,) = changes
    counted_swap(device, **lists, **{f"{name.removesuffix('_places')}_count": torch.tensor([1])})


@NEEDS_GPU
def test_long_lists_are_checked_as_short_ones_are() -> None:
    table, count = speedtorch.empty((40_000, 2)).zero_(), torch.tensor([30_000], device="cuda")
    ids, places = (torch.arange(35_000, device="cuda") for _ in range(2))
    ids[30_000:], places[30_000:] = -7, 10**9
    side, arriving = (torch.full((35_000, 2), value, device="cuda") for value in (5.0, 7.0))
    arguments = [table], [side], ids, places, [arriving], ids, places, 1, count, count
    ops.exchange_rows(*arguments)
    speedtorch.synchronize()
    assert table[:30_000].eq(5).all() and not table[30_000:].any()
    assert arriving[:30_000].eq(5).all() and arriving[30_000:].eq(7).all()
    ids[29_999] = 40_000
    ops.exchange_rows(*arguments)
    with pytest.raises(IndexError, match=r"id 40000 at position 29999 of (evict|load)"):
        speedtorch.synchronize()


# hold_rows and clear_rows


def held_after(
    held: list[Tensor],
    incoming: list[Tensor],
    saved: list[Tensor],
    changes: list[Tensor],
    named: int,
) -> list[list[Tensor]]:
    """The reference: held, incoming and saved rows after a step of hold_rows."""
    kept_places, kept_from, evicted_places = changes
    after = [[tensor.clone() for tensor in fields] for fields in (incoming, saved)]
    for k, rows in enumerate(held):
        after[0][k][kept_places] = rows[kept_from]
        after[0][k][named:] = 0
        if saved:
            after[1][k][: len(evicted_places)] = rows[evicted_places]
    return [[tensor.clone() for tensor in after[0]], *after]


@pytest.mark.parametrize("aside", [True, False], ids=["put aside", "let go"])
@pytest.mark.parametrize(
    "counts", [(0, 0, 0), (0, 0, 23), (23, 23, 0), (10, 0, 5), (15, 9, 14)], ids=str
)
def test_rows_are_held_as_the_places_say(
    device: str, counts: tuple[int, int, int], aside: bool
) -> None:
    rows, (named, kept, evicted) = 23, counts
    held, incoming = fields_of(rows, 1), fields_of(rows, 2)
    saved = fields_of(rows, 3) if aside else []
    changes = [some(kept, max(named, 1), 1), some(kept, rows, 2), some(evicted, rows, 3)]
    ids = some(named, ROWS, 4)
    expected = held_after(held, incoming, saved, changes, named)
    actual = [[tensor.to(device) for tensor in fields] for fields in (held, incoming, saved)]
    held_ids, saved_ids = (torch.full((rows,), 77, device=device) for _ in range(2))
    status, saved_count = (torch.full((size,), 99, device=device) for size in (8, 1))
    lists = [padded(tensor, rows, 10**9).to(device) for tensor in changes]
    evicted_ids = padded(some(evicted, ROWS, 5), rows).to(device)
    ops.hold_rows(
        *(*actual, *lists[:2], evicted_ids, lists[2]),
        torch.tensor([named, kept, 99, evicted], device=device),
        *(padded(ids, rows + 3, 88).to(device), held_ids, status, saved_ids, saved_count),
    )
    for mine, theirs in zip(actual, expected, strict=True):
        assert_same_fields(mine, theirs)
    assert held_ids.tolist() == padded(ids, rows, NO_ID).tolist()
    assert saved_ids.tolist() == (evicted_ids.tolist() if aside else [77] * rows)
    assert saved_count.tolist() == [evicted if aside else 99]
    assert status.tolist() == [0, named, 0, named, 99, named, named, 0]
    ops.clear_rows([*actual[0], *actual[1]], torch.tensor([kept], device=device))
    for tensor in (*expected[0], *expected[1]):
        tensor[kept:] = 0
    assert_same_fields([*actual[0], *actual[1]], [*expected[0], *expected[1]])


def test_of_no_held_rows_none_is_saved(device: str) -> None:
    held, incoming, saved = ([torch.zeros(0, 3, device=device)] for _ in range(3))
    none = torch.zeros(0, dtype=torch.int64, device=device)
    status, count = status_of(0, device), torch.tensor([99], device=device)
    ops.hold_rows(
        *(held, incoming, saved, none, none, none, none, torch.zeros(4, device=device).long()),
        *(none, none.clone(), status, none.clone(), count),
    )
    assert count.tolist() == [0]


@pytest.mark.parametrize("fields", [1, 16, 17, 40])
def test_any_number_of_fields_is_held_and_cleared(device: str, fields: int) -> None:
    held, incoming, saved = (
        [torch.full((3, k % 5 + 1), value, device=device) for k in range(fields)]
        for value in (1.0, 2.0, 3.0)
    )
    places = torch.tensor([1, 0, 0], device=device)
    numbers = torch.tensor([2, 1, 1, 1], device=device)
    ids, status = torch.zeros(3, dtype=torch.int64, device=device), status_of(0, device)
    more = [places.clone(), ids, status, ids.clone(), numbers[:1].clone()]
    ops.hold_rows(held, incoming, saved, places, places, places, places, numbers, *more)
    for now, kept in zip(held, saved, strict=True):
        assert now[:, 0].tolist() == [2, 1, 0] and kept[:, 0].tolist() == [1, 3, 3]
    ops.clear_rows([*held, incoming[0][:1]], numbers[1:2])
    for now in held:
        assert now[0].eq(2).all() and not now[1:].any()


@NEEDS_GPU
def test_counts_and_places_that_are_none_touch_nothing_else() -> None:
    random = torch.Generator().manual_seed(0)
    numbers = torch.tensor([-1, 0, 3, 7, 8, 2**31, 2**62, -(2**63)])
    for seed in range(50):
        # Rows of one piece of memory, with others before and after them.
        arena = torch.full((9, 8, 5), seed, dtype=torch.uint8, device="cuda")
        before = arena.clone()
        picked = numbers[torch.randint(8, (5, 8), generator=random)].cuda()
        ids, status = torch.zeros(8, dtype=torch.int64, device="cuda"), status_of(0, "cuda")
        ops.hold_rows(
            *([arena[1]], [arena[3]], [arena[5]], picked[0], picked[1], picked[2], picked[2]),
            *(picked[3, :4], picked[4], ids, status, ids.clone(), status[:1].clone()),
        )
        ops.clear_rows([arena[7]], picked[3, :1])
        torch.cuda.synchronize()
        for untouched in (0, 2, 4, 6, 8):
            assert torch.equal(arena[untouched], before[untouched])
        assert torch.equal(arena[1], arena[3])
        named = int(picked[3, 0].clamp(0, 8))
        assert not arena[3, named:].any() and not arena[7, named:].any()
        assert torch.equal(arena[7, :named], before[7, :named])


# A step of all four


class Training:
    """Rows that are counted up while a block holds them, and the same in plain torch."""

    def __init__(self, device: str, capacity: int, entries: int) -> None:
        memory = "plain" if device == "cpu" else "auto"
        self.table = speedtorch.empty((ROWS, 3), memory=memory).zero_()
        self.block = Block(capacity, device)
        self.held, self.incoming = (torch.zeros(capacity, 3, device=device) for _ in range(2))
        self.index = torch.zeros(entries, dtype=torch.int64, device=device)
        self.expected = torch.zeros(ROWS, 3)

    def step(self) -> None:
        block, plan = self.block, speedtorch.plan_rows(self.index, ROWS)
        lists = block.compared(plan)
        incoming, incoming_places, *kept, evicted, evicted_places, counts = lists
        ops.exchange_rows(
            *([self.table], [self.held], evicted, evicted_places),
            *([self.incoming], incoming, incoming_places, 1, counts[3:], counts[2:3]),
        )
        ops.hold_rows(
            *([self.held], [self.incoming], [], *kept, evicted, evicted_places),
            *(counts, plan[0], block.ids, block.status, block.ids.clone(), counts[:1].clone()),
        )
        self.held += 1
        ops.clear_rows([self.held], counts[:1])

    def take(self, ids: list[int], work: Callable[[], object]) -> None:
        self.index.copy_(torch.tensor(ids))
        work()
        rows = set(ids)
        if len(rows) <= self.block.capacity:
            self.expected[sorted(rows)] += 1

    def check(self) -> None:
        """All rows are in the table once a batch did not fit."""
        speedtorch.synchronize()
        assert_same_bytes(self.table, self.expected)
        assert not self.held.any() and not self.block.status[3]
        assert self.block.ids.eq(NO_ID).all() and self.block.fault[0] == TOO_MANY

    def reset(self) -> None:
        for tensor in (self.table, self.held, self.incoming, self.block.halt, self.block.fault):
            tensor.zero_()
        self.block.ids.fill_(-1)
        self.block.status.copy_(status_of(0, "cpu"))


def train(training: Training, work: Callable[[], object]) -> None:
    entries, random = len(training.index), torch.Generator().manual_seed(1)
    for _ in range(3):
        for _ in range(10):
            wide = int(torch.randint(1, training.block.capacity, (), generator=random))
            rows = torch.randperm(ROWS, generator=random)[:wide]
            index = rows[torch.randint(wide, (entries,), generator=random)]
            training.take(index.tolist(), work)
        training.take(torch.randperm(ROWS)[:entries].tolist(), work)
        training.check()
        training.block.halt.zero_()


def test_rows_are_trained_without_a_count_on_the_host(device: str) -> None:
    training = Training(device, capacity=12, entries=20)
    train(training, training.step)


@NEEDS_GPU
def test_a_captured_step_trains_the_rows_of_all_replays() -> None:
    training = Training("cuda", capacity=12, entries=20)
    training.block.fault = torch.zeros(8, dtype=torch.int64, pin_memory=True)
    graph = captured(training.step)
    training.reset()
    train(training, graph.replay)


@NEEDS_GPU
def test_nothing_is_waited_for() -> None:
    training = Training("cuda", capacity=12, entries=20)
    training.block.fault = torch.zeros(8, dtype=torch.int64, pin_memory=True)
    training.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            training.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@NEEDS_GPU
def test_pageable_memory_is_refused_with_the_remedy() -> None:
    block = Block(2, "cuda")
    block.fault = block.fault.cpu()
    with pytest.raises(ValueError, match="fault is in pageable memory.*pin_memory_"):
        block.compared(plan_of([1], "cuda"))
    ids, side = torch.tensor([1], device="cuda"), torch.zeros(2, device="cuda")
    with pytest.raises(ValueError, match="a host field is in pageable memory.*pin_memory_"):
        ops.exchange_rows([torch.zeros(6)], [side], ids, ids, [side.clone()], ids, ids, 1, ids, ids)
