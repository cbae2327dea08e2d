"""Ids that no table has, or that a list may not repeat: an error that says all, and no row moves.

Ids on the CPU are checked at once. A bad id on the GPU is reported by the first later call, at the
latest by `speedtorch.synchronize()`, in the same words.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
import torch
from conftest import Place
from ordinary_run import soaked
from reference import assert_same_bytes, assert_same_storage, dtype_name, random_rows, small_numbers
from torch import Tensor

import speedtorch

pytestmark = pytest.mark.dealt("place", "gpu_place")

ROWS = 37
IDS = [3, 0, 36, 17, 5, 21, 8, 2, 11]
CPU = Place("cpu", "plain")

# What each call is named in a message, and the list that holds its ids.
CALLS = {
    "gather": ("pinned_gather", "index"),
    "gather_out": ("pinned_gather", "index"),
    "scatter": ("pinned_scatter", "index"),
    "accumulate": ("pinned_scatter", "index"),
    "swap_evict": ("optimizer_state_swap", "evict"),
    "swap_load": ("optimizer_state_swap", "load"),
}
# Low 32 bits of some are those of a good id.
BAD_INT64 = [-1, ROWS, ROWS + 1, -ROWS, 2**31, 2**32, 2**32 + 5, -(2**32), 2**63 - 1, -(2**63)]
BAD_INT32 = [-1, ROWS, 2**31 - 1, -(2**31)]


class Attempt:
    """One call on a table, and everything that the call could change."""

    def __init__(
        self, call: str, place: Place, index: Tensor, *, rows: int = ROWS, planned: bool = False
    ) -> None:
        self.call, self.place, self.index, self.planned = call, place, index, planned
        count = index.numel()
        # The bits of a sum with a NaN differ between processors, so accumulate gets finite numbers.
        make = small_numbers if call == "accumulate" else random_rows
        self.values = make(rows, (5,))
        self.given = [make(count, (5,), seed=seed) for seed in (1, 2)]
        self.table = place.table(self.values)
        self.source, self.result = (place.work(rows) for rows in self.given)
        self.other = torch.arange(min(count, rows), device=index.device)

    def __call__(self) -> Tensor | None:
        """Makes the call; returns what a gather gives."""
        table, source, result = self.table, self.source, self.result
        if self.call == "gather":
            return speedtorch.pinned_gather(table, self.index)
        if self.call == "gather_out":
            return speedtorch.pinned_gather(table, self.index, out=result)
        given = [self.index, self.other]
        evict, load = given if self.call == "swap_evict" else given[::-1]
        plans = {}
        if self.planned:
            rows = len(table)
            plans = {"evict_plan": speedtorch.plan_rows(evict, rows)}
            plans["load_plan"] = speedtorch.plan_rows(load, rows)
        if self.call.startswith("swap"):
            speedtorch.optimizer_state_swap([table], [source], evict, [result], load, **plans)
        else:
            add = self.call == "accumulate"
            speedtorch.pinned_scatter(table, self.index, source, accumulate=add)
        return None

    def assert_nothing_moved(self) -> None:
        """No row of the table or of the batch changed; a gather on the GPU gave zeros.

        The staged path of pageable tables checks ids on the CPU and raises at once, like the CPU.
        """
        assert_same_storage(self.table, self.values)
        assert_same_storage(self.source, self.given[0])
        if self.call == "gather_out" and self.index.is_cuda and self.place.mapped:
            assert not self.result.any()
        else:
            assert_same_storage(self.result, self.given[1])


def message_of(call: Callable[[], object], error: type[Exception] = IndexError) -> str:
    """The message of the error that a call raises, at once or when the GPU is waited for."""
    with pytest.raises(error) as caught:
        call()
        speedtorch.synchronize()
    return str(caught.value)


def with_bad(*bad: tuple[int, int]) -> list[int]:
    """The ids with others at some positions: (position, id)."""
    ids = list(IDS)
    for position, row in bad:
        ids[position] = row
    return ids


def numbers(message: str) -> list[int]:
    """All whole numbers that a message names."""
    return [int(number) for number in re.findall(r"-?\d+", message)]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("good", [True, False], ids=["some bad", "all bad"])
def test_the_message_says_all_and_no_row_moves(place: Place, call: str, good: bool) -> None:
    bad = with_bad((4, 1234), (7, -99)) if good else [1234 + row for row in IDS]
    attempt = Attempt(call, place, place.ids(bad))
    message = message_of(attempt)
    op, name = CALLS[call]
    assert message.startswith(f"{op}: ")
    assert re.search(rf"\b{name}\b", message)
    assert "out of range" in message
    assert numbers(message) == ([1234, 4, ROWS, 2, 9] if good else [1237, 0, ROWS, 9, 9])
    attempt.assert_nothing_moved()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("bad", "dtype"),
    [(bad, torch.int64) for bad in BAD_INT64] + [(bad, torch.int32) for bad in BAD_INT32],
    ids=lambda value: dtype_name(value) if isinstance(value, torch.dtype) else str(value),
)
def test_every_id_out_of_range_is_found_and_the_next_call_works(
    place: Place, call: str, bad: int, dtype: torch.dtype
) -> None:
    attempt = Attempt(call, place, place.ids(with_bad((3, bad)), dtype))
    assert f"id {bad} at position 3 of" in message_of(attempt)
    attempt.assert_nothing_moved()
    assert_works(call, place, IDS, dtype)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("position", [0, 31, 32, 4095, 65_535, 65_536, 99_999])
def test_one_bad_among_many_is_found_anywhere(place: Place, call: str, position: int) -> None:
    ids = torch.arange(100_000)
    ids[position] = 100_000
    attempt = Attempt(call, place, ids.to(place.device), rows=100_000)
    message = message_of(attempt)
    assert f"id 100000 at position {position} of" in message
    assert "(1 of 100000 ids" in message
    attempt.assert_nothing_moved()


@pytest.mark.parametrize("count", [600, 1024, 1025, 4096, 4097])
def test_a_gather_finds_bad_ids_on_both_sides_of_every_change_of_path(
    place: Place, count: int
) -> None:
    ids = torch.arange(count) % ROWS
    ids[count - 1], ids[count - 7] = ROWS, -5
    attempt = Attempt("gather_out", place, ids.to(place.device))
    assert numbers(message_of(attempt)) == [-5, count - 7, ROWS, 2, count]
    attempt.assert_nothing_moved()


@pytest.mark.soak
def test_random_batches_with_bad_ids_move_no_row_and_the_next_is_right(place: Place) -> None:
    chance = random.Random(str(place))
    for _ in range(soaked(30, 2000)):
        call, dtype = chance.choice([*CALLS]), chance.choice([torch.int32, torch.int64])
        ids = chance.sample(range(ROWS), chance.randint(1, ROWS))
        bad = BAD_INT32 if dtype == torch.int32 else BAD_INT64
        places = sorted(chance.sample(range(len(ids)), chance.randint(1, len(ids))))
        spoilt = [chance.choice(bad) if at in places else id for at, id in enumerate(ids)]
        attempt = Attempt(call, place, place.ids(spoilt, dtype), planned=chance.random() < 0.3)
        message, first = message_of(attempt), places[0]
        assert f"id {spoilt[first]} at position {first} of " in message
        assert f"({len(places)} of {len(ids)} ids" in message
        attempt.assert_nothing_moved()
        assert_works(call, place, ids, dtype)


@pytest.mark.parametrize("call", ["gather", "scatter", "accumulate", "swap_load"])
def test_a_table_without_rows_has_no_good_id(place: Place, call: str) -> None:
    message = message_of(Attempt(call, place, place.ids([0]), rows=0))
    assert "table of 0 rows" in message


def test_rows_without_columns_are_checked_too(place: Place) -> None:
    table = place.table(torch.zeros(4, 0))
    message_of(lambda: speedtorch.pinned_gather(table, place.ids([4])))
    message_of(lambda: speedtorch.pinned_scatter(table, place.ids([-1]), place.work(table[:1])))


def test_the_position_counts_through_all_dimensions(place: Place) -> None:
    index = place.ids(with_bad((5, 40))).reshape(3, 3).t()
    assert "id 40 at position 7 of index" in message_of(Attempt("gather", place, index))


def assert_works(call: str, place: Place, ids: list[int], dtype: torch.dtype) -> None:
    """Makes a call with good ids, whose results are those on the CPU."""
    attempt, expected = (Attempt(call, at, at.ids(ids, dtype)) for at in (place, CPU))
    rows, expected_rows = attempt(), expected()
    speedtorch.synchronize()
    assert_same_storage(attempt.table, expected.table)
    assert_same_storage(attempt.result, expected.result)
    if rows is not None and expected_rows is not None:
        assert_same_bytes(rows, expected_rows)


@pytest.mark.parametrize("call", [call for call in CALLS if call != "gather"])
def test_ids_on_the_cpu_are_refused_at_once(place: Place, call: str) -> None:
    attempt = Attempt(call, place, torch.tensor(with_bad((6, -3))))
    with pytest.raises(IndexError, match="id -3 at position 6"):
        attempt()
    attempt.assert_nothing_moved()


# A swap's lists must not repeat an id

SWAPS = pytest.mark.parametrize("call", ["swap_evict", "swap_load"])


@SWAPS
@pytest.mark.parametrize(
    ("dtype", "planned"),
    [(torch.int32, False), (torch.int64, False), (torch.int64, True)],
    ids=["int32", "int64", "planned"],
)
def test_an_id_twice_in_one_list_is_refused(
    place: Place, call: str, dtype: torch.dtype, planned: bool
) -> None:
    attempt = Attempt(call, place, place.ids(with_bad((6, 36)), dtype), planned=planned)
    message = message_of(attempt)
    assert message.startswith(f"optimizer_state_swap: id 36 at position 6 of {CALLS[call][1]}")
    assert "twice" in message
    attempt.assert_nothing_moved()


@SWAPS
def test_an_id_twice_among_many_is_found(place: Place, call: str) -> None:
    ids = torch.randperm(100_000, generator=torch.Generator().manual_seed(7))
    ids[77_777] = ids[1]
    attempt = Attempt(call, place, ids.to(place.device), rows=100_000)
    message = message_of(attempt)
    assert f"id {int(ids[1])} at position 77777 of" in message
    assert "twice" in message
    attempt.assert_nothing_moved()


# On the GPU


FAULTS = [(call, 1234) for call in CALLS] + [("swap_evict", 36), ("swap_load", 36)]


@pytest.mark.parametrize(("call", "bad"), FAULTS, ids=str)
def test_both_devices_use_the_same_words(gpu_place: Place, call: str, bad: int) -> None:
    ids = with_bad((4, bad))
    messages = [message_of(Attempt(call, where, where.ids(ids))) for where in (gpu_place, CPU)]
    assert messages[0] == messages[1]


@pytest.mark.parametrize("call", CALLS)
def test_a_later_call_raises_and_does_nothing(gpu_place: Place, call: str) -> None:
    bad = Attempt(call, gpu_place, gpu_place.ids(with_bad((2, -4))))
    later = Attempt("scatter", gpu_place, gpu_place.ids(IDS))
    with pytest.raises(IndexError, match=rf"{CALLS[call][0]}: id -4 at position 2 of"):
        bad()
        torch.cuda.synchronize()
        later()
    bad.assert_nothing_moved()
    later.assert_nothing_moved()
    speedtorch.synchronize()


def test_a_gather_with_a_bad_id_returns_zeros(gpu_place: Place) -> None:
    attempt = Attempt("gather", gpu_place, gpu_place.ids(with_bad((8, ROWS))))
    results = []
    message_of(lambda: results.append(attempt()))
    if gpu_place.mapped:
        (result,) = results
        assert result is not None
        assert result.shape == (len(IDS), 5)
        assert not result.any()


def test_a_plan_of_bad_ids_moves_no_row(place: Place) -> None:
    attempt = Attempt("scatter", place, place.ids(with_bad((1, 55))))

    def planned() -> None:
        plan = speedtorch.plan_rows(attempt.index, ROWS)
        if place.device == "cuda":
            assert plan[4][:3].tolist() == [1, 1, 55]
        speedtorch.pinned_scatter(attempt.table, attempt.index, attempt.source, plan=plan)

    assert "id 55 at position 1 of index" in message_of(planned)
    attempt.assert_nothing_moved()


def test_synchronize_without_an_error_is_silent(device: str) -> None:
    speedtorch.synchronize()
    speedtorch.synchronize(device)


@pytest.mark.parametrize("was_used", [True, False])
@pytest.mark.parametrize("device", [None, "cuda:1", torch.device("cuda"), "cpu", 1], ids=str)
def test_synchronize_waits_for_a_gpu_that_was_used(
    device: str | int | torch.device | None, was_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: was_used)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    speedtorch.synchronize(device)
    assert waits == ([device] if was_used and device != "cpu" else [])
