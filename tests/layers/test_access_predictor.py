"""AccessPredictor: what comes next, and when something is used next."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from speedtorch.layers.auto import HORIZON, AccessPredictor


def keys(call: str) -> Iterator[str]:
    yield call.lower()
    if call.isupper():
        yield call


def noted(calls: str) -> AccessPredictor[str, str]:
    order: AccessPredictor[str, str] = AccessPredictor(keys)
    for call in calls:
        order.note(call)
    return order


def test_earlier_calls_are_expected_again() -> None:
    order = noted("abcCBAa")
    assert not order.expected
    order.note("b")
    assert "".join(order.expected)[:7] == "cCBAabc"
    assert [order.next_use(key) for key in "abcABC"] == [4, 3, 1, 4, 3, 2]
    order.note("c")
    assert [order.next_use(key) for key in "abcABC"] == [3, 2, 1, 3, 2, 1]
    assert order.next_use("d") == inf


def test_another_call_than_the_one_expected_changes_what_follows() -> None:
    order = noted("abcabdab")
    assert "".join(order.expected)[:3] == "dab"
    for call in "cab":
        order.note(call)
    assert "".join(order.expected)[:3] == "cab"
    assert order.next_use("d") == inf


@given(st.text("abcAB", min_size=2, max_size=40))
def test_the_forecast_is_that_of_all_calls_so_far(calls: str) -> None:
    after = {calls[place : place + 2]: call for place, call in enumerate(calls[2:])}
    found, told = calls[-2:], ""
    while len(told) < HORIZON and found in after:
        told += after[found]
        found = found[-1] + after[found]
    order = noted(calls)
    assert "".join(order.expected) == told
    for key in "abcAB":
        uses = [place for place, call in enumerate(told, 1) if key in keys(call)]
        assert order.next_use(key) == (uses[0] if uses else inf)
