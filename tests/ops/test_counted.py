"""A step whose numbers of rows only its device knows: compare, swap, hold and clear."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from conftest import NEEDS_GPU
from graph_capture import captured
from reference import assert_same_bytes, random_rows
from torch import Tensor

import speedtorch
from speedtorch.ops.functions import plan_batch

ops = torch.ops.speedtorch
ROWS = 50
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
# Of the rows of a field: vectors of 16, 8, 2, 1 and no bytes, and more than the lanes of a warp.
SHAPES = [((4,), torch.float32), ((), torch.int64), ((3,), torch.float16), ((2, 5), torch.uint8)]
SHAPES += [((0,), torch.float32), ((9, 64), torch.float32)]
# Why a batch does not fit.
BAD_IDS, TOO_MANY, FOREIGN = 1, 2, 3
NO_ID = 2**63 - 1  # after the ids that are held


def status_of(count: int, device: str) -> Tensor:
    """The status of a plan of `count` distinct ids."""
    return torch.tensor([0, count, 0, count, ROWS, count, count, 0], device=device)


def some(count: int, of: int, seed: int) -> Tensor:
    """Distinct numbers below `of`, ascending."""
    random = torch.Generator().manual_seed(seed)
    return torch.randperm(of, generator=random)[:count].sort().values


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("named", "held", "padding", "counts", "lists"),
    [
        ([7, 2, 7, 9], [2, 5], -1, [3, 1, 2, 1], [[7, 9], [1, 2], [0], [0], [5], [1]]),
        ([7, 2, 7, 9], [2, 5], 7, [2, 1, 1, 1], [[9], [1], [0], [0], [5], [1]]),
        ([2, 5], [1, 5], 2, [1, 1, 0, 1], [[], [], [0], [1], [1], [0]]),
        ([], [1, 2], -1, [0, 0, 0, 2], [[], [], [], [], [1, 2], [0, 1]]),
        ([1, 2, 3, 4], [], -1, [4, 0, 4, 0], [[1, 2, 3, 4], [0, 1, 2, 3], [], [], [], []]),
        ([1, 2, 3, 4, 5], [], 3, [4, 0, 4, 0], [[1, 2, 4, 5], [0, 1, 2, 3], [], [], [], []]),
    ],
    ids=[
        "both",
        "padding named",
        "padding between held rows",
        "nothing named",
        "full",
        "full and padding",
    ],
)
def test_a_batch_that_fits_is_compared(
    device: str,
    named: list[int],
    held: list[int],
    padding: int,
    counts: list[int],
    lists: list[list[int]],
) -> None:
    block = Block(4, device, held)
    compared = block.compared(plan_of(named, device, padding))
    assert compared[-1].tolist() == counts
    assert listed(compared) == lists
    assert not block.halt.any() and not block.fault.any()


@pytest.mark.parametrize("padding", [-1, 0, 17, 49])
@pytest.mark.parametrize("more", [-1, 0, 4], ids=["smaller", "equal", "larger"])
@pytest.mark.parametrize("device", DEVICES)
def test_what_fits_is_compared_as_without_a_capacity(device: str, more: int, padding: int) -> None:
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        index = torch.randint(ROWS, (int(torch.randint(1, 60, (), generator=random)),))
        distinct = len(set(index.tolist()) - {padding})
        capacity = max(distinct + more, 0)
        held = some(capacity * 2 // 3, ROWS, seed)
        leaving = [id for id in held.tolist() if id != padding]
        plan, block = plan_of(index, device, padding), Block(capacity, device, leaving)
        compared = block.compared(plan)
        if distinct <= capacity:
            rows = index[index != padding].to(device)
            expected = plan_batch(rows, ROWS, -1, -1, block.ids, block.status)
            counts = expected[4][8:]
            assert compared[-1].tolist() == counts.tolist()
            assert listed(compared) == listed([*expected[5:11], counts])
            assert block.halt.tolist() == [0, 0]
        else:
            assert compared[-1].tolist() == [0, 0, 0, len(leaving)]
            assert listed(compared)[4:] == [leaving, list(range(len(leaving)))]
            assert block.halt.tolist() == [1, 0]
            assert block.fault.tolist()[:3] == [TOO_MANY, distinct, capacity]


@pytest.mark.parametrize("device", DEVICES)
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
    ):
        assert batch(given, table_rows) == everything
        assert block.halt.tolist() == [1, 0] and block.fault.tolist() == fault
        for left_out in (1, 2):
            assert batch(good) == everything
            assert block.halt.tolist() == [1, left_out] and block.fault.tolist() == fault
        block.halt.zero_()
        assert batch(good) == ([3, 2, 1, 0], [[6], [2], [0, 1], [0, 1], [], []])
        assert block.halt.tolist() == [0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_of_no_ids_and_a_block_of_no_rows(device: str) -> None:
    block = Block(0, device)
    assert block.compared(plan_of([], device))[-1].tolist() == [0, 0, 0, 0]
    assert block.halt.tolist() == [0, 0]
    assert block.compared(plan_of([], device), table_rows=7)[-1].tolist() == [0, 0, 0, 0]
    assert block.halt.tolist() == [1, 0] and block.fault[0] == FOREIGN
    block.halt.zero_()
    assert block.compared(plan_of([3, 3], device, 3))[-1].tolist() == [0, 0, 0, 0]
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


@pytest.mark.parametrize("memory", ["auto", "registered", "cuda"])
@pytest.mark.parametrize("counts", [(0, 0), (0, 7), (9, 0), (20, 30), (40, 40)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_as_many_rows_are_swapped_as_the_counts_say(
    device: str, counts: tuple[int, int], memory: str
) -> None:
    if device == "cpu" and memory != "auto":
        pytest.skip("needs a GPU")
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


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_in_both_lists_goes_to_the_host_as_well(device: str) -> None:
    host, arriving = counted_swap(device)
    assert host.tolist() == [0, 5, 5, 0, 0, 0]
    assert arriving.tolist() == [0, 7, 7, 5]


@pytest.mark.parametrize("count", [-1, 3, 2**62, -(2**63)])
@pytest.mark.parametrize("device", DEVICES)
def test_a_count_that_is_none_is_an_error_on_the_cpu_and_zero_on_a_gpu(
    device: str, count: int
) -> None:
    for name in ("evict_count", "load_count"):
        if device == "cpu":
            with pytest.raises(ValueError, match=f"{name} must be 0 to 2, got {count}"):
                counted_swap(device, **{name: torch.tensor([count])})
            continue
        host, arriving = counted_swap(device, **{name: torch.tensor([count])})
        assert host.tolist() == ([0] * 6 if name == "evict_count" else [0, 5, 5, 0, 0, 0])
        assert arriving.tolist() == ([0, 7, 7, 0] if name == "evict_count" else [7] * 4)


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
@pytest.mark.parametrize("device", DEVICES)
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
@pytest.mark.parametrize("device", DEVICES)
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


@pytest.mark.parametrize("fields", [1, 16, 17, 40])
@pytest.mark.parametrize("device", DEVICES)
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


@pytest.mark.parametrize("count", [0, 2, 5])
@pytest.mark.parametrize("device", DEVICES)
def test_rows_beyond_the_count_are_cleared(device: str, count: int) -> None:
    fields = [*fields_of(5, 1, device), *fields_of(9, 2, device)]
    expected = [tensor.clone() for tensor in fields]
    for tensor in expected:
        tensor[count:] = 0
    ops.clear_rows(fields, torch.tensor([count], device=device))
    assert_same_fields(fields, expected)


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


@pytest.mark.parametrize("device", DEVICES)
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


# Errors


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_comparisons_that_do_not_fit_are_errors() -> None:
    ids, status = numbers(1, 2), status_of(2, "cpu")
    given = {"named": ids, "named_status": status, "held": ids, "held_status": status}
    given |= {"halt": numbers(0, 0), "fault": torch.zeros(8, dtype=torch.int64)}
    for name, value, message in (
        ("named_status", status[:0], r"named_status has shape \[0\], expected \[8\]"),
        ("held_status", status[:0], r"held_status has shape \[0\], expected \[8\]"),
        ("halt", numbers(0), r"halt has shape \[1\], expected \[2\]"),
        ("halt", torch.zeros(2), "halt must be a contiguous int64 tensor"),
        ("fault", numbers(0), r"fault has shape \[1\], expected \[8\]"),
        ("named_status", status_of(3, "cpu"), "named_status must report 0 to 2 .* got 3"),
        ("held_status", status_of(-1, "cpu"), "held_status must report 0 to 2 .* got -1"),
    ):
        *plans, halt, fault = (given | {name: value}).values()
        with pytest.raises(ValueError, match=f"diff_ids: {message}"):
            ops.diff_ids(*plans, ROWS, halt, fault)
        assert not given["halt"].any() and not given["fault"].any()


def test_counts_of_another_kind_are_errors() -> None:
    for name in ("evict_count", "load_count"):
        with pytest.raises(ValueError, match=rf"{name} has shape \[2\], expected \[1\]"):
            counted_swap("cpu", **{name: numbers(1, 1)})
        with pytest.raises(ValueError, match=f"{name} must be a contiguous int64 tensor"):
            counted_swap("cpu", **{name: torch.ones(1)})
    host, side = torch.zeros(6), torch.zeros(4)
    with pytest.raises(ValueError, match="evict_count and load_count must be passed together"):
        ops.exchange_rows(
            *([host], [side], *[numbers(1)] * 2, [side.clone()], *[numbers(1)] * 2, 1, numbers(1))
        )


@NEEDS_GPU
def test_pageable_memory_is_refused_with_the_remedy() -> None:
    block = Block(2, "cuda")
    block.fault = block.fault.cpu()
    with pytest.raises(ValueError, match="fault is in pageable memory.*pin_memory_"):
        block.compared(plan_of([1], "cuda"))
    ids, side = torch.tensor([1], device="cuda"), torch.zeros(2, device="cuda")
    with pytest.raises(ValueError, match="a host field is in pageable memory.*pin_memory_"):
        ops.exchange_rows([torch.zeros(6)], [side], ids, ids, [side.clone()], ids, ids, 1, ids, ids)


def test_rows_that_cannot_be_held_are_errors() -> None:
    rows, three = torch.ones(2, 3), numbers(0, 1, 2)
    names = ["held", "incoming", "evicted"]
    names += ["kept_places", "kept_from", "evicted_ids", "evicted_places"]
    values = ([rows], [rows + 1], [rows + 2], *(numbers(0, 1) for _ in range(4)))
    given = dict(zip(names, values, strict=True)) | {"counts": numbers(2, 2, 0, 2)}
    given |= {"ids": numbers(4, 5), "held_ids": numbers(1, 3), "held_status": status_of(2, "cpu")}
    given |= {"saved_ids": numbers(0, 0), "saved_count": numbers(0)}
    for name, value, message in (
        ("held", [], "held must have at least one field, got an empty list"),
        ("incoming", [], "must have the same length .evicted may be empty., got 1, 0 and 1"),
        ("evicted", [rows + 2] * 2, "length .evicted may be empty., got 1, 1 and 2"),
        (
            "incoming",
            [torch.ones(3, 3)],
            r"incoming\[0\] has 3 rows, expected 2, the length of held_ids",
        ),
        ("incoming", [torch.ones(2, 4)], r"incoming\[0\] has shape \[2, 4\], expected \[2, 3\]"),
        (
            "evicted",
            [rows.double()],
            r"evicted\[0\] has dtype Double, expected Float, the dtype of held\[0\]",
        ),
        ("evicted", [torch.ones(3, 2).t()], r"each row of evicted\[0\] must be contiguous"),
        ("held", [torch.ones(2, 6)[:, :3]], r"held\[0\] must be contiguous"),
        ("evicted_ids", three, r"evicted_ids has shape \[3\], expected \[2\]"),
        ("saved_ids", three, r"saved_ids has shape \[3\], expected \[2\]"),
        ("saved_count", three, r"saved_count has shape \[3\], expected \[1\]"),
        ("kept_from", three, r"kept_from has shape \[3\], expected \[2\]"),
        ("counts", three, r"counts has shape \[3\], expected \[4\]"),
        ("held_status", three, r"held_status has shape \[3\], expected \[8\]"),
        ("ids", torch.ones(2), "ids must be a contiguous int64 tensor"),
        ("counts", numbers(3, 0, 0, 0), r"counts\[0\] must be 0 to 2, got 3"),
        ("counts", numbers(0, -1, 0, 0), r"counts\[1\] must be 0 to 2, got -1"),
        ("counts", numbers(0, 0, 0, 3), r"counts\[3\] must be 0 to 2, got 3"),
        ("ids", numbers(4), r"counts\[0\] must be 0 to 1, got 2"),
        ("kept_places", numbers(0, 2), "kept_places has 2 at position 1, .* for 2 rows"),
        ("kept_from", numbers(-1, 0), "kept_from has -1 at position 0, .* for 2 rows"),
        ("evicted_places", numbers(0, 9), "evicted_places has 9 at position 1, .* for 2 rows"),
    ):
        with pytest.raises(ValueError, match=f"hold_rows: .*{message}"):
            ops.hold_rows(*(given | {name: value}).values())
        assert rows.eq(1).all() and given["held_ids"].tolist() == [1, 3]
    ops.hold_rows(*given.values())
    assert given["held_ids"].tolist() == [4, 5]


def test_rows_that_cannot_be_cleared_are_errors() -> None:
    rows = torch.ones(3, 2)
    for fields, count, message in (
        ([], numbers(1), "rows must have at least one field, got an empty list"),
        ([rows[:, :1]], numbers(1), r"rows\[0\] must be contiguous"),
        ([rows], numbers(1, 1), r"count has shape \[2\], expected \[1\]"),
        ([rows, torch.ones(2)], numbers(3), "count must be 0 to 2, got 3"),
        ([rows], numbers(-1), "count must be 0 to 3, got -1"),
    ):
        with pytest.raises(ValueError, match=f"clear_rows: {message}"):
            ops.clear_rows(fields, count)
        assert rows.eq(1).all()
