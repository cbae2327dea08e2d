"""append_ids finds ids in a list and appends the others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speedtorch.ops.functions import append_ids


def memory(held: list[int], space: int = 64) -> tuple[Tensor, Tensor]:
    """A new hash table, and a list that begins with these ids."""
    ids = torch.full((space,), -7)
    ids[: len(held)] = torch.tensor(held, dtype=torch.int64)
    return torch.full((2 * space + 1,), -1), ids


def test_ids_are_found_or_appended() -> None:
    table, held = memory([5, 0, 1 << 62])
    places, more = append_ids(table, held, 3, torch.tensor([0, 9, 1 << 62, 3]))
    assert places.tolist() == [1, 3, 2, 4] and more.tolist() == [9, 3]
    assert held[:5].tolist() == [5, 0, 1 << 62, 9, 3]
    places, more = append_ids(table, held, 5, torch.tensor([3, 9, 5]))
    assert places.tolist() == [4, 3, 0] and more.tolist() == []


def test_ids_of_a_call_that_is_not_continued_are_forgotten() -> None:
    table, held = memory([5])
    append_ids(table, held, 1, torch.tensor([8, 9]))
    places, more = append_ids(table, held, 1, torch.tensor([9, 5]))
    assert places.tolist() == [1, 0] and more.tolist() == [9]


@pytest.mark.parametrize("step", [1, 64, 1 << 40])
def test_many_ids_of_each_spacing(step: int) -> None:
    table, held = memory([], space=4096)
    random = torch.Generator().manual_seed(step)
    known: dict[int, int] = {}
    for _ in range(40):
        ids = torch.randperm(2500, generator=random)[:100] * step
        places, more = append_ids(table, held, len(known), ids)
        assert more.tolist() == [each for each in ids.tolist() if each not in known]
        for each in more.tolist():
            known[each] = len(known)
        assert places.tolist() == [known[each] for each in ids.tolist()]


def test_memory_that_is_too_small_is_refused() -> None:
    table, held = memory([5], space=4)
    ids = torch.arange(4)
    with pytest.raises(ValueError, match="append_ids: count must be .*0, got 1"):
        append_ids(table, held, 1, ids)
    for spoiled in (table[:8], table[:1], table[:6]):
        with pytest.raises(ValueError, match="append_ids: table has . entries, expected a power"):
            append_ids(spoiled, held, 0, ids)
    assert held.tolist() == [5, -7, -7, -7] and table.eq(-1).all()
