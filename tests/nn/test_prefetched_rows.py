"""Long training with prefetch, beside a mirror of plain torch tensors on the same device.

The mirror steps the distinct rows of a batch with an optimizer of its own. Gradients are small
whole numbers, whose sums are exact in any order. Each lookup is compared as it comes, and the
tables at the end, bit for bit. `make soak` looks up 10^8 rows on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from ordinary_run import soaked
from torch import Tensor, nn, optim

import speedtorch

MOMENTUM = {"lr": 0.25, "momentum": 0.5, "weight_decay": 0.5}
SETTINGS: dict[str, dict[str, object]] = {
    "4 columns": {"width": 4},
    "64 columns": {"width": 64},
    "192 columns": {"width": 192},
    "cache": {"width": 32, "cached": True},
    "capacity": {"width": 32, "with_capacity": True},
}


class Mirror:
    """All rows and their momentum, and an optimizer of the rows of a step."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.momentum = rows, torch.zeros_like(rows)

    def step(self, ids: Tensor, gradient: Tensor) -> None:
        held, places = ids.long().unique(return_inverse=True)
        parameter = nn.Parameter(self.rows[held])
        sgd = optim.SGD([parameter], **MOMENTUM)  # type: ignore[arg-type]
        sgd.state[parameter] = {"momentum_buffer": self.momentum[held]}
        parameter.grad = torch.zeros_like(parameter).index_add_(0, places, gradient)
        sgd.step()
        self.rows.index_copy_(0, held, parameter.detach())
        self.momentum.index_copy_(0, held, sgd.state[parameter]["momentum_buffer"])


def batches(chance: random.Random, rows: int, most: int, looked_up: int) -> Iterator[Tensor]:
    """Random batches of so many ids together, on the CPU; many ids are also of the batch before."""
    generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
    before = torch.zeros(1, dtype=torch.int64)
    while looked_up > 0:
        count = chance.randint(1, most)
        ids = torch.randint(rows, (count,), generator=generator)
        if chance.random() < 0.7:
            kept = chance.randint(0, count)
            ids[:kept] = before[torch.randint(len(before), (kept,), generator=generator)]
        before, looked_up = ids, looked_up - count
        yield ids.to(chance.choice([torch.int32, torch.int64]))


@pytest.mark.soak
@pytest.mark.parametrize("name", SETTINGS)
def test_prefetched_rows_are_those_of_a_mirror(device: str, name: str) -> None:
    looked_up = soaked(10_000, 20_000_000 if device == "cuda" else 1_000_000)
    train(device, looked_up, **SETTINGS[name])  # type: ignore[arg-type]


def train(
    device: str, looked_up: int, width: int, cached: bool = False, with_capacity: bool = False
) -> None:
    """Looks up so many rows, and compares each."""
    chance = random.Random(looked_up + width)
    rows, most = min(looked_up // 4, (1 << 27) // width), min(looked_up // 20, 250_000)
    generator = torch.Generator(device).manual_seed(width)
    mirror = Mirror(torch.randint(-9, 9, (rows, width), generator=generator, device=device) / 8)
    embedding = speedtorch.Embedding(
        rows,
        width,
        device=device,
        _weight=mirror.rows.cpu(),
        cache=rows * width if cached else None,
        capacity=most if with_capacity else None,
    )
    sgd = optim.SGD(embedding.parameters(), **MOMENTUM)  # type: ignore[arg-type]
    speedtorch.attach(sgd, embedding)
    given = (ids.to(device) for ids in batches(chance, rows, most, looked_up))
    for ids in speedtorch.prefetch(given, embedding, ids=lambda ids: ids):
        factor = torch.empty(len(ids), width, device=device).random_(-2, 3, generator=generator)
        sgd.zero_grad()
        found = embedding(ids)
        assert torch.equal(found.view(torch.int32), mirror.rows[ids].view(torch.int32))
        (found * factor).sum().backward()
        sgd.step()
        mirror.step(ids, factor)
        if chance.random() < 0.02:
            embedding.flush()
    embedding.flush()
    for field, expected in (("weight", mirror.rows), ("momentum_buffer", mirror.momentum)):
        actual = embedding.table[field].to(device)
        assert torch.equal(actual.contiguous().view(torch.int32), expected.view(torch.int32)), field
