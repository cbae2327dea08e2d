"""Every loop gives the same numbers in every way to train it."""

from __future__ import annotations

from typing import Any

import pytest
from loops import CACHED, CAPACITY, JOINING, LOOPS, PLAIN, ROWS, TORCH, Way, assert_same_numbers
from loops import WAYS as UNCACHED
from torch import optim

pytestmark = pytest.mark.usefixtures("deterministic", "restless")
WAYS = UNCACHED | CACHED
GRID = [(name, way) for name in LOOPS for way in WAYS]
GRID += [
    (name, way) for name in JOINING for way in ("plain", "prefetch", "cache", "cache-prefetch")
]


@pytest.mark.parametrize(("loop", "way"), GRID)
def test_rows_are_those_of_torchs_embedding(loop: str, way: str, device: str) -> None:
    train = {**LOOPS, **JOINING}[loop]
    assert_same_numbers(train, (WAYS[way], TORCH), optim.SGD, device)


@pytest.mark.dealt("way")
@pytest.mark.parametrize(("loop", "way"), [each for each in GRID if each[1] != "plain"])
def test_rows_and_state_are_those_of_the_plain_loop(loop: str, way: str, device: str) -> None:
    train = {**LOOPS, **JOINING}[loop]
    assert_same_numbers(train, (WAYS[way], PLAIN), optim.Adam, device)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"padding_idx": 3},
    "max_norm": {"max_norm": 0.5},
    "both": {"padding_idx": 3, "max_norm": 0.5},
    "bags": {"bags": True, "mode": "sum", "padding_idx": 3},
    "SparseAdam": {"make": optim.SparseAdam},
    "sparse": {"sparse": True, "make": optim.SparseAdam},
}


@pytest.mark.dealt("overlap", "way")
@pytest.mark.parametrize("way", [way for way in WAYS if way != "plain"])
@pytest.mark.parametrize("overlap", [0, 0.5, 1], ids=["apart", "half", "same"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(
    "loop",
    [
        "one_lookup_a_step",
        "no_ids_before_others",
        "evaluation_between_and_within_steps",
        "all_of_these_by_turns",
    ],
)
def test_settings_of_lookups_and_overlaps_train_alike(
    loop: str, settings: dict[str, Any], overlap: float, way: str, device: str
) -> None:
    ways = WAYS[way], PLAIN
    assert_same_numbers(LOOPS[loop], ways, device=device, overlap=overlap, **settings)


@pytest.mark.parametrize("capacity", [CAPACITY + 1, ROWS, 100])
def test_larger_capacities_train_alike(device: str, capacity: int) -> None:
    ways = Way(capacity=capacity), PLAIN
    assert_same_numbers(LOOPS["one_lookup_a_step"], ways, device=device)
