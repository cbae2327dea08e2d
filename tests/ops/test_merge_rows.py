"""merge_rows makes room for more rows among held ones."""

from __future__ import annotations

import pytest
import torch
from reference import assert_same_bytes
from torch import Tensor

from speedtorch.ops.functions import merge_rows

SHAPES = [((), torch.float32), ((3,), torch.bfloat16), ((4, 8), torch.float32), ((0,), torch.int64)]


def lists(held: int, more: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ascending ids, none in both."""
    random = torch.Generator().manual_seed(seed)
    every = torch.randperm(2 * (held + more) + 1, generator=random)[: held + more]
    return every[:held].sort().values, every[held:].sort().values


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize(
    ("held", "more"), [(0, 0), (0, 3), (3, 0), (1, 1), (40, 7), (7, 40), (3000, 2000)]
)
def test_rows_go_where_their_ids_are(held: int, more: int, padding: int, device: str) -> None:
    ids, new = lists(held, more, seed=held + more)
    rows = [
        torch.arange((held + padding) * torch.Size(shape).numel(), dtype=torch.float32)
        .reshape(held + padding, *shape)
        .to(device, dtype)
        for shape, dtype in SHAPES
    ]
    merged, places, new_places, *moved = merge_rows(rows, ids.to(device), new.to(device))
    expected = torch.cat([ids, new]).sort().values
    assert_same_bytes(merged.cpu(), expected)
    assert_same_bytes(expected[new_places.cpu()], new)
    own = places.cpu()
    assert_same_bytes(expected[own[:held]], ids)
    assert own[held:].tolist() == [held + more] * padding
    for before, after in zip(rows, moved, strict=True):
        assert after.shape == (held + more + padding, *before.shape[1:])
        assert_same_bytes(after[places].cpu(), before.cpu())


def test_many_fields_are_more_than_one_launch(device: str) -> None:
    ids, new = lists(5, 4, seed=1)
    rows = [torch.full((5, 2), k, device=device) for k in range(20)]
    _, places, _, *moved = merge_rows(rows, ids.to(device), new.to(device))
    assert [int(tensor[places[0], 0]) for tensor in moved] == list(range(20))
