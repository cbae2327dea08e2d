"""append_batch finds the ids of a lookup among a step's rows, and appends and loads the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import assert_same_bytes
from torch import Tensor

from speedtorch.ops.functions import append_batch

ROWS, PADDING = 5000, 7


def table() -> list[Tensor]:
    return [torch.arange(ROWS * 3.0).view(ROWS, 3), torch.arange(ROWS, dtype=torch.int32)]


class Step:
    """A step's rows, appended by calls of append_batch."""

    def __init__(self, host: list[Tensor], held: list[int]) -> None:
        self.host, self.size = host, len(held)
        self.ids = torch.tensor(held, dtype=torch.int64)
        self.rows = [field[self.ids] for field in host]
        self.table = self.ids[:0]

    def append(self, *parts: Tensor, padding: int = -1, **changed: Any) -> list[Tensor]:
        given = {name: [None, None, []][k] for k, name in enumerate(("evict", "places", "leaving"))}
        given |= {"host": self.host, "table": self.table, "size": self.size} | changed
        lists = given["host"], given["leaving"], given["evict"], given["places"]
        step = self.rows, self.ids, given["table"], given["size"]
        return append_batch(*lists, *step, [*parts], ROWS, padding)

    def take(self, made: list[Tensor]) -> None:
        """Continues with the results of append()."""
        self.size += len(made[8])
        if len(made) > 10:
            self.ids, self.table, *self.rows = made[9:-1]


def test_rows_are_found_or_appended_and_loaded() -> None:
    host = table()
    step = Step(host, [5, 0, 4999])
    for given in ([0, 9, 4999, 3, 9], [3, 9, 5], [], [1, 2, 3, 4, 5, 6], [8]):
        ids = torch.tensor(given, dtype=torch.int64)
        before = step.ids[: step.size].clone()
        made = step.append(ids)
        unique = ids.unique()
        assert_same_bytes(made[5], unique)
        assert_same_bytes(made[6], unique)
        assert_same_bytes(made[8], unique[~torch.isin(unique, before)])
        assert_same_bytes(made[-1], ids)
        step.take(made)
        assert_same_bytes(step.ids[: step.size], torch.cat([before, made[8]]))
        assert_same_bytes(step.ids[made[7]], ids)
        for mine, field in zip(step.rows, host, strict=True):
            assert_same_bytes(mine[: step.size], field[step.ids[: step.size]])


def test_the_padding_is_found_last() -> None:
    step = Step(table(), [2, 9, PADDING])
    made = step.append(torch.tensor([9, PADDING]), torch.tensor([3], dtype=torch.int32), padding=7)
    assert made[5].tolist() == [3, 9] and made[6].tolist() == [3, 9, PADDING]
    assert made[7].tolist() == [1, 2, 3] and made[8].tolist() == [3]


def test_rows_that_leave_are_written_if_others_join() -> None:
    host, expected = table(), table()
    step = Step(host, [2, 9])
    leaving = [torch.full((4, 3), -1.0), torch.full((4,), -2, dtype=torch.int32)]
    given = {"leaving": leaving, "evict": torch.tensor([4, 30]), "places": torch.tensor([1, 3])}
    step.append(torch.tensor([9]), **given)
    for mine, field in zip(host, expected, strict=True):
        assert_same_bytes(mine, field)
    made = step.append(torch.tensor([4, 6]), **given)
    step.take(made)
    for mine, field, new in zip(host, expected, step.rows, strict=True):
        field[30] = -1 - (field.dim() == 1)
        field[4] = mine[4]  # row 4 is carried, and may be written here, too
        assert_same_bytes(mine, field)
        assert_same_bytes(new[3], field[6])
        assert torch.all(new[2] == -1 - (field.dim() == 1))


def test_without_a_table_no_row_is_loaded() -> None:
    step = Step(table(), [2])
    made = step.append(torch.tensor([3]), host=[])
    assert made[7].tolist() == [1] and made[9][:2].tolist() == [2, 3]
    assert_same_bytes(made[11][:1], step.rows[0])


def test_ids_of_a_call_that_is_not_continued_are_forgotten() -> None:
    step = Step(table(), [5])
    step.take(step.append(torch.tensor([5])))
    step.append(torch.tensor([8]))
    made = step.append(torch.tensor([9, 5]))
    assert made[7].tolist() == [1, 0] and made[8].tolist() == [9]


@pytest.mark.parametrize("spacing", [1, 64, 1 << 40])
def test_many_ids_of_each_spacing(spacing: int) -> None:
    """Without host fields ids may be those of any table."""
    random = torch.Generator().manual_seed(spacing)
    ids, rows, entries, size = torch.empty(0, dtype=torch.int64), [torch.empty(0, 1)], None, 0
    known: dict[int, int] = {}
    for _ in range(40):
        part = torch.randperm(2500, generator=random)[:100] * spacing
        entries = ids[:0] if entries is None else entries
        lists = rows, ids, entries, size, [part]
        made = append_batch([], [], None, None, *lists, 2500 * spacing, -1)
        unique = part.sort().values.tolist()
        assert made[8].tolist() == [each for each in unique if each not in known]
        for each in made[8].tolist():
            known[each] = len(known)
        assert made[7].tolist() == [known[each] for each in part.tolist()]
        size += len(made[8])
        if len(made) > 10:
            ids, entries, *rows = made[9:-1]


def test_memory_that_does_not_fit_is_refused() -> None:
    step = Step(table(), [5, 6, 8])
    with pytest.raises(ValueError, match="append_batch: count must be .*3, got 4"):
        step.append(torch.tensor([1]), size=4)
    for entries in (3, 4, 6, 12):
        with pytest.raises(ValueError, match=f"append_batch: table has {entries} entries, exp"):
            step.append(torch.tensor([1]), table=torch.full((entries + 1,), -1))
    with pytest.raises(IndexError, match=f"id {ROWS} at position 1 of index"):
        step.append(torch.tensor([1, ROWS]))
    step.rows[1] = step.rows[1][:2]
    with pytest.raises(ValueError, match="append_batch: ids must be .*2, got 3"):
        step.append(torch.tensor([1]))
    assert step.ids.tolist() == [5, 6, 8]
