"""Rows that are copied between two places on a device."""

from __future__ import annotations

import pytest
import torch
from reference import assert_same_bytes

from speedtorch.ops.functions import carry_rows


@pytest.mark.parametrize("fields", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_rows_of_all_fields_have_the_bits_of_their_sources(
    count: int, fields: int, device: str
) -> None:
    shapes = [(2,), (), (3, 2)][:fields]
    rows = [torch.zeros(5, *shape, device=device) for shape in shapes]
    sources = [torch.randn(4, *shape, device=device) for shape in shapes]
    places = torch.tensor([0, 2, 4], device=device)[:count]
    source_places = torch.tensor([3, 0, 3], device=device)[:count]
    expected = [field.clone() for field in rows]
    for field, source in zip(expected, sources, strict=True):
        field[places] = source[source_places]
    carry_rows(rows, places, sources, source_places)
    for actual, field in zip(rows, expected, strict=True):
        assert_same_bytes(actual, field)
