"""Long random programs of gather, scatter and swap, beside a mirror of plain torch tensors.

The mirror lies on the device that does the work. Each batch's result is compared as it comes and
the whole table at the end, both bit for bit. `make soak` moves 10^9 rows on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from conftest import Place
from ordinary_run import soaked
from reference import record_fields
from torch import Tensor

import speedtorch

FORMATS: dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""The columns of each field of a record."""
FORMATS = {
    "16 B": (torch.float32, (4,)),
    "100 B": (torch.float16, (50,)),
    "128 B": (torch.int32, (32,)),
    "3 x 16 B": (torch.float32, (4, 4, 4)),
    "3 x 128 B": (torch.int64, (16, 16, 16)),
    "1,536 B": (torch.bfloat16, (768,)),
}
MAPPED_KINDS = 4
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CALLS = ["gather", "gather", "gather_out", "scatter", "scatter", "accumulate", "swap", "swap"]


def rows_to_move(place: Place) -> int:
    """Rows of one test: those of all formats in all memory that a GPU reaches are 10^9."""
    if place.device == "cuda" and place.mapped:
        return soaked(20_000, 10**9 // (MAPPED_KINDS * len(FORMATS)))
    return soaked(20_000, 2_000_000)


class Mirror:
    """Fields of the records of a table, and what they must hold.

    Args:
        place: where the table lies, and where its rows go.
        dtype: of all fields.
        columns: of each field.
        moved: rows that a program moves, which the size of the table follows.
        seed: of all that is random.
    """

    def __init__(
        self, place: Place, dtype: torch.dtype, columns: tuple[int, ...], moved: int, seed: int
    ) -> None:
        self.chance = random.Random(seed)
        self.place, self.dtype, self.columns = place, dtype, columns
        self.generator = torch.Generator(place.device).manual_seed(seed)
        record_bytes = sum(columns) * dtype.itemsize
        self.rows = min(moved, (1 << 29) // record_bytes)
        self.most = min(self.rows, moved // 8, 4_000_000)  # of a batch
        self.expected = [self.made(self.rows, count) for count in columns]
        record = place.allocate(self.rows * record_bytes).view(self.rows, record_bytes)
        self.fields = record_fields(record, [((count,), dtype) for count in columns])
        for field, rows in zip(self.fields, self.expected, strict=True):
            field.copy_(rows)

    def made(self, rows: int, columns: int) -> Tensor:
        """Rows of random bits."""
        count = rows * columns * self.dtype.itemsize
        words = torch.empty(-(-count // 8), dtype=torch.int64, device=self.place.device)
        words.random_(-(2**63), None, generator=self.generator)
        return words.view(torch.uint8)[:count].view(self.dtype).view(rows, columns)

    def ids(self, *, distinct: bool = False) -> Tensor:
        """Ids of a batch, at random places, in a run, or of few rows."""
        count = self.chance.randint(0, self.most)
        kind = self.chance.choice(["anywhere", "anywhere", "ascending", "run", "few"])
        few = max(7, self.rows >> 12)
        where = {"device": self.place.device, "generator": self.generator}
        if kind == "run":
            start = self.chance.randint(0, self.rows - count)
            ids = torch.arange(start, start + count, device=self.place.device)
        elif distinct or kind == "ascending":
            ids = torch.randperm(self.rows, **where)[:count]
        else:
            ids = torch.randint(few if kind == "few" else self.rows, (count,), **where)
        ids = ids.sort().values if kind == "ascending" else ids
        return ids.to(self.chance.choice([torch.int32, torch.int64]))

    def plan(self, ids: Tensor) -> list[Tensor] | None:
        """The plan of a batch, or none."""
        return speedtorch.plan_rows(ids, self.rows) if self.chance.random() < 0.3 else None

    def places(self, ids: Tensor) -> Tensor:
        """`[rows]`: where in a batch each row is last, or -1."""
        positions = torch.arange(len(ids), device=ids.device)
        return torch.full((self.rows,), -1, device=ids.device).scatter_reduce_(
            0, ids.long(), positions, "amax"
        )

    def gather(self, *, out: bool = False) -> int:
        number = self.chance.randrange(len(self.fields))
        ids, columns = self.ids(), self.columns[number]
        given = self.made(len(ids), columns) if out else None
        plan = self.plan(ids)
        rows = speedtorch.pinned_gather(self.fields[number], ids, out=given, plan=plan)
        assert_same_bits(rows, self.expected[number].index_select(0, ids.long()))
        return len(ids)

    def gather_out(self) -> int:
        return self.gather(out=True)

    def scatter(self) -> int:
        number, ids = self.chance.randrange(len(self.fields)), self.ids()
        source = self.made(len(ids), self.columns[number])
        speedtorch.pinned_scatter(self.fields[number], ids, source, plan=self.plan(ids))
        ids = ids.long()
        last = self.places(ids)[ids] == torch.arange(len(ids), device=ids.device)
        self.expected[number].index_copy_(0, ids[last], source[last])
        return len(ids)

    def accumulate(self) -> int:
        """Whole numbers alone: their sums are the same in any order."""
        if self.dtype.is_floating_point:
            return self.scatter()
        number, ids = self.chance.randrange(len(self.fields)), self.ids()
        source = self.made(len(ids), self.columns[number])
        speedtorch.pinned_scatter(
            self.fields[number], ids, source, accumulate=True, plan=self.plan(ids)
        )
        self.expected[number].index_add_(0, ids.long(), source)
        return len(ids)

    def swap(self) -> int:
        evict, load = self.ids(distinct=True), self.ids(distinct=True)
        leaving = [self.made(len(evict), columns) for columns in self.columns]
        arriving = [self.made(len(load), columns) for columns in self.columns]
        plans = {"evict_plan": self.plan(evict), "load_plan": None}
        if plans["evict_plan"] is not None:
            plans["load_plan"] = speedtorch.plan_rows(load, self.rows)
        speedtorch.optimizer_state_swap(self.fields, leaving, evict, arriving, load, **plans)
        evict, load = evict.long(), load.long()
        place = self.places(evict)[load]
        is_kept, is_evicted = place >= 0, self.places(load)[evict] < 0
        for rows, out_rows, in_rows in zip(self.expected, leaving, arriving, strict=True):
            loaded = rows.index_select(0, load)
            loaded[is_kept] = out_rows[place[is_kept]]
            assert_same_bits(in_rows, loaded)
            rows.index_copy_(0, evict[is_evicted], out_rows[is_evicted])
        return len(evict) + len(load)

    def check(self) -> None:
        """Compares the whole table."""
        speedtorch.synchronize()
        for field, rows in zip(self.fields, self.expected, strict=True):
            assert_same_bits(field.to(self.place.device), rows)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """As reference.assert_same_bytes, on the device."""
    assert actual.dtype == expected.dtype
    bits = BITS[expected.dtype.itemsize]
    assert torch.equal(actual.contiguous().view(bits), expected.contiguous().view(bits))


@pytest.fixture
def no_cache_left() -> Iterator[None]:
    """Memory of the GPU that other processes could use goes back at the end."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.mark.soak
@pytest.mark.dealt("place")
@pytest.mark.usefixtures("no_cache_left")
@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_long_random_programs_are_those_of_a_mirror(place: Place, name: str) -> None:
    dtype, columns = FORMATS[name]
    most = rows_to_move(place)
    mirror = Mirror(place, dtype, columns, most, seed=most + len(name))
    moved = 0
    while moved < most:
        moved += getattr(mirror, mirror.chance.choice(CALLS))()
    mirror.check()
