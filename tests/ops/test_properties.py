"""Properties: whatever table and ids hypothesis thinks of, the ops equal their references."""

from __future__ import annotations

import pytest
import reference
import torch
from conftest import Place
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import (
    DTYPES,
    DTYPES_WITH_ADDITION,
    assert_same_bytes,
    assert_same_storage,
    layout_copy,
    random_rows,
    small_numbers,
)
from test_optimizer_state_swap import check
from torch import Tensor

import speedtorch

pytestmark = pytest.mark.slow


SHAPES = st.lists(st.integers(0, 6), max_size=2).map(tuple)
GAPS = st.integers(0, 5)
SEEDS = st.integers(0, 2**16)


def ids_of(draw: st.DrawFn, rows: int) -> Tensor:
    """Ids of some of so many rows."""
    ids = draw(st.lists(st.integers(0, rows - 1), max_size=20)) if rows else []
    return torch.tensor(ids, dtype=draw(st.sampled_from([torch.int32, torch.int64])))


@st.composite
def gathers(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """A table and ids of some of its rows."""
    shape, dtype = draw(SHAPES), draw(st.sampled_from(DTYPES))
    layout = {"gap": draw(GAPS), "offset": draw(GAPS), "seed": draw(SEEDS)}
    values = random_rows(draw(st.integers(0, 12)), shape, dtype, **layout)
    index = ids_of(draw, len(values))
    if draw(st.booleans()):
        index = index.reshape(-1, 1).expand(-1, draw(st.integers(0, 3)))
    return values, index


def test_any_gather_equals_the_reference(place: Place, examples: int) -> None:
    @settings(max_examples=examples)
    @given(batch=gathers())
    def compare(batch: tuple[Tensor, Tensor]) -> None:
        values, index = batch
        ids = index.to(place.device)
        table = place.table(values)
        expected = reference.pinned_gather(values, index)
        assert_same_bytes(speedtorch.pinned_gather(table, ids), expected)
        plan = speedtorch.plan_rows(ids, len(values))
        assert_same_bytes(speedtorch.pinned_gather(table, ids, plan=plan), expected)
        out = torch.empty(expected.shape, dtype=expected.dtype, device=place.device)
        assert_same_bytes(speedtorch.pinned_gather(table, index, out=out), expected)

    compare()


@st.composite
def scatters(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, bool]:
    """A table, ids of some of its rows, rows to write or to add."""
    rows, shape, accumulate = draw(st.integers(0, 12)), draw(SHAPES), draw(st.booleans())
    dtype = draw(st.sampled_from(DTYPES_WITH_ADDITION if accumulate else DTYPES))
    make = small_numbers if accumulate else random_rows
    index, seed = ids_of(draw, rows), draw(SEEDS)
    values = make(rows, shape, dtype, gap=draw(GAPS), offset=draw(GAPS), seed=seed)
    src = make(len(index), shape, dtype, gap=draw(GAPS), offset=draw(GAPS), seed=seed + 1)
    return values, index, src, accumulate


def test_any_scatter_equals_the_reference(place: Place, examples: int) -> None:
    @settings(max_examples=examples)
    @given(batch=scatters(), ids=st.sampled_from(["on the CPU", "at work", "planned"]))
    def compare(batch: tuple[Tensor, Tensor, Tensor, bool], ids: str) -> None:
        values, index, src, accumulate = batch
        expected = layout_copy(values)
        reference.pinned_scatter(expected, index, src, accumulate=accumulate)
        table = place.table(values)
        if ids != "on the CPU":
            index = index.to(place.device)
        plan = speedtorch.plan_rows(index, len(values)) if ids == "planned" else None
        speedtorch.pinned_scatter(table, index, place.work(src), accumulate=accumulate, plan=plan)
        speedtorch.synchronize()
        assert_same_storage(table, expected)

    compare()


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[list[Tensor], Tensor, Tensor]:
    """Fields of one number of rows, distinct ids that leave and distinct ids that arrive."""
    rows = draw(st.integers(1, 12))
    gaps = st.integers(0, 4)
    host = [
        random_rows(
            rows,
            draw(st.lists(st.integers(0, 5), max_size=2).map(tuple)),
            draw(st.sampled_from(DTYPES)),
            gap=draw(gaps),
            offset=draw(gaps),
            seed=seed,
        )
        for seed in range(draw(st.integers(1, 3)))
    ]
    lists = st.lists(st.integers(0, rows - 1), unique=True)
    dtypes = st.sampled_from([torch.int32, torch.int64])
    evict, load = (torch.tensor(draw(lists), dtype=draw(dtypes)) for _ in range(2))
    return host, evict, load


def test_any_swap_equals_the_reference(place: Place, examples: int) -> None:
    @settings(max_examples=examples)
    @given(exchange=exchanges(), spare=st.integers(0, 2), planned=st.booleans())
    def compare(exchange: tuple[list[Tensor], Tensor, Tensor], spare: int, planned: bool) -> None:
        host, evict, load = exchange
        ids = evict.to(place.device), load.to(place.device)
        check(place, host, *ids, spare=spare, planned=planned)

    compare()
