"""A swap's lists must not repeat an id: an error that says which and where, and no row moves."""

from __future__ import annotations

import pytest
import torch
from conftest import Place
from reference import dtype_name
from test_index_errors import CALLS, ROWS, Attempt, message_of, with_bad

import speedtorch


@pytest.mark.parametrize("call", ["swap_evict", "swap_load"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=dtype_name)
def test_an_id_twice_in_one_list_is_refused(place: Place, call: str, dtype: torch.dtype) -> None:
    attempt = Attempt(call, place, place.ids(with_bad((6, 36)), dtype))
    message = message_of(attempt)
    assert message.startswith(f"optimizer_state_swap: id 36 at position 6 of {CALLS[call][1]}")
    assert "twice" in message
    attempt.assert_nothing_moved()


@pytest.mark.parametrize("call", ["swap_evict", "swap_load"])
def test_an_id_twice_among_many_is_found(place: Place, call: str) -> None:
    ids = torch.randperm(100_000, generator=torch.Generator().manual_seed(7))
    ids[77_777] = ids[1]
    attempt = Attempt(call, place, ids.to(place.device), rows=100_000)
    message = message_of(attempt)
    assert f"id {int(ids[1])} at position 77777 of" in message
    assert "twice" in message
    attempt.assert_nothing_moved()


@pytest.mark.parametrize("call", ["swap_evict", "swap_load"])
def test_an_id_twice_in_a_plan_is_refused(place: Place, call: str) -> None:
    attempt = Attempt(call, place, place.ids(with_bad((6, 36))))
    lists = [attempt.index, attempt.other]
    evict, load = lists if call == "swap_evict" else lists[::-1]
    plans = [speedtorch.plan_rows(ids, ROWS) for ids in (evict, load)]
    message = message_of(
        lambda: speedtorch.optimizer_state_swap(
            [attempt.table],
            [attempt.source],
            evict,
            [attempt.result],
            load,
            evict_plan=plans[0],
            load_plan=plans[1],
        )
    )
    assert f"id 36 at position 6 of {CALLS[call][1]}" in message
    assert "twice" in message
    attempt.assert_nothing_moved()
