"""What the ordinary run takes of grids, and how many processes run it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import conftest
import pytest
from conftest import PLACES, left_to_nightly
from ordinary_run import dealt, process_count, soaked

GIB = 1 << 30


# ------------------------------------------------------------------------------------------------
# Grids


@pytest.mark.parametrize("facts", [1, 3, 5, 38, 300])
@pytest.mark.parametrize("circumstances", [1, 5, 48])
def test_each_fact_and_each_circumstance_is_taken(facts: int, circumstances: int) -> None:
    cases = [*itertools.product(range(facts), range(circumstances))]
    taken = [cases[number] for number in dealt(cases)]
    assert {fact for fact, _ in taken} == set(range(facts))
    assert {circumstance for _, circumstance in taken} == set(range(circumstances))
    assert max(facts, circumstances) <= len(taken) < facts + circumstances


def test_what_is_not_in_the_grid_is_not_missed() -> None:
    assert dealt([]) == []
    assert dealt([("a", 1), ("b", 2)]) == [0, 1]


def test_the_same_cases_are_taken_each_time_and_in_order() -> None:
    cases = [*itertools.product("abcdef", range(7))]
    assert dealt(cases) == sorted(dealt(cases))


def test_neighbours_of_a_grid_are_not_all_under_the_first_circumstance() -> None:
    cases = [*itertools.product(range(100), range(5))]
    taken = [cases[number][1] for number in dealt(cases)]
    assert min(map(taken.count, range(5))) > 10


class Item:
    """A case as pytest collects it, of a grid with the mark `dealt`, or without."""

    def __init__(self, *names: str, nightly: bool = False, **values: Any) -> None:
        self.parent, self.originalname = "test_file.py", "test_a_fact"
        self.callspec = SimpleNamespace(params=values)
        dealt_mark = SimpleNamespace(args=names) if names else None
        self._marks = {"dealt": dealt_mark, "nightly": nightly or None}

    def get_closest_marker(self, name: str) -> Any:
        return self._marks[name]


def taken(items: list[Any]) -> list[dict[str, Any]]:
    left_out = [*left_to_nightly(items)]
    return [each.callspec.params for each in items if each not in left_out]


def test_the_cpu_has_every_case_and_the_gpu_each_in_one_kind_of_memory() -> None:
    places = [each.values[0] for each in PLACES]
    values = [["lists", "are", "not hashable"], 1, 2, 3, 4, 5, 6, 7]
    items = [Item("place", place=place, value=each) for each in values for place in places]
    found = taken(items)
    assert [each["value"] for each in found if each["place"].device == "cpu"] == values
    on_gpu = [each for each in found if each["place"].device == "cuda"]
    assert {str(each["value"]) for each in on_gpu} == set(map(str, values))
    assert {each["place"].memory for each in on_gpu} == {each.memory for each in places[1:]}
    assert len(on_gpu) < 2 * len(values)


def test_what_is_not_dealt_is_taken() -> None:
    items = [Item(number=number) for number in range(3)]
    items += [Item("place", number=number) for number in range(3)]
    assert len(taken(items)) == 6


def test_nothing_is_dealt_to_cases_that_run_by_night_anyway() -> None:
    items = [
        Item("way", nightly=number > 0, number=number, way=way)
        for number in range(9)
        for way in "abc"
    ]
    ordinary = [each for each in taken(items) if each["number"] == 0]
    assert [each["way"] for each in ordinary] == [*"abc"]


# ------------------------------------------------------------------------------------------------
# Soaks


@pytest.mark.parametrize(("share", "count"), [(None, 20), ("0", 20), ("0.5", 500), ("1", 1000)])
def test_a_soak_is_a_share_of_its_full_size(
    share: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPEEDTORCH_SOAK", raising=False)
    if share is not None:
        monkeypatch.setenv("SPEEDTORCH_SOAK", share)
    assert soaked(20, 1000) == count


# ------------------------------------------------------------------------------------------------
# Processes


@pytest.mark.parametrize(
    ("cores", "host", "gpu", "count"),
    [
        (2, 20, None, 2),  # a machine for CI
        (16, 124, 139, 16),  # an H200
        (64, 500, 139, 44),
        (128, 500, 78, 24),  # an H100: its memory is for so many
        (16, 60, 23, 5),  # a GPU of 24 GiB
        (16, 60, 7, 1),  # a small one
        (16, 7, None, 3),  # little host memory
        (4, 1, None, 1),
        (1, 100, 139, 1),
    ],
)
def test_a_process_for_each_core_as_far_as_memory_goes(
    cores: int, host: int, gpu: int | None, count: int
) -> None:
    assert process_count(cores, host * GIB, None if gpu is None else gpu * GIB) == count


def test_runs_beside_each_other_have_a_part_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "process_count", lambda cores, *_: cores)
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "3")
    assert conftest.pytest_xdist_auto_num_workers() == 3
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS")
    monkeypatch.setattr(conftest.os, "sched_getaffinity", lambda _: {0, 1, 5, 7})
    assert conftest.pytest_xdist_auto_num_workers() == 4
