"""The padding's row is held as the others are, gets no gradient and is never written back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import assert_same_bytes
from torch import Tensor, nn, optim

import speedtorch

ROWS, PADDING, ROW = 20, 4, (1.0, 2.0, 3.0)
BATCHES = ([4, 1, 4, 2], [4, 2, 5], [7, 8], [4, 4], [], [4, 7, 1])
# With weight decay an optimizer changes a row whose gradient is zeros.
DECAYS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda rows: optim.SGD(rows, 0.1, momentum=0.9, weight_decay=0.5),
    "Adam": lambda rows: optim.Adam(rows, 0.1, weight_decay=0.3),
    "AdamW": lambda rows: optim.AdamW(rows, 0.1),
}


def trained(decays: str, device: str, capacity: int | None, *, ahead: bool) -> list[Tensor]:
    """All rows after a loop in which each lookup of the padding gives its row.

    Behind them what the optimizer kept of the padding's row after each step.
    """
    torch.manual_seed(0)
    row = torch.tensor(ROW)
    embedding = speedtorch.Embedding(
        ROWS, len(ROW), padding_idx=PADDING, device=device, capacity=capacity
    )
    embedding.table["weight"][PADDING] = row
    optimizer = DECAYS[decays](embedding.parameters())
    speedtorch.attach(optimizer, embedding)
    kept: list[Tensor] = []
    batches: Any = [torch.tensor(ids, dtype=torch.int64, device=device) for ids in BATCHES]
    if ahead:
        batches = speedtorch.prefetch(batches, embedding, ids=lambda ids: ids)
    for ids in batches:
        optimizer.zero_grad()
        looked_up = embedding(ids)
        assert (looked_up[ids == PADDING].cpu() == row).all()
        looked_up.square().sum().backward()
        gradient = embedding.weight.grad
        assert gradient is not None and not gradient[-1].any()
        optimizer.step()
        state = optimizer.state[embedding.weight].values()
        kept += [each[-1].cpu().clone() for each in state if each.dim() == 2]
        assert (embedding(ids)[ids == PADDING].cpu() == row).all()
    assert torch.equal(embedding.weight[PADDING].cpu(), row)
    rows: Tensor = embedding.state_dict()["weight"]
    assert torch.equal(rows[PADDING], row)
    return [rows.clone(), *kept]


@pytest.mark.parametrize("decays", DECAYS)
def test_a_step_that_decays_rows_leaves_the_padding(decays: str, device: str) -> None:
    plain = trained(decays, device, None, ahead=False)
    for capacity, ahead in ((None, True), (6, False), (6, True)):
        again = trained(decays, device, capacity, ahead=ahead)
        assert len(again) == len(plain) == 1 + len(BATCHES) * (1 if decays == "SGD" else 2)
        assert all(map(torch.equal, again, plain))


def test_rows_that_were_prefetched_in_vain_leave_the_padding(device: str) -> None:
    embedding = speedtorch.Embedding(ROWS, 1, padding_idx=PADDING, device=device)
    optimizer = optim.SGD(embedding.parameters(), 0.1)
    batches = [torch.tensor([PADDING, k], device=device) for k in range(5, 9)]
    loop = iter(speedtorch.prefetch(batches, embedding, ids=lambda ids: ids))
    embedding(next(loop)).sum().backward()
    optimizer.step()
    embedding(next(loop)).sum().backward()  # the rows of the third batch are sent for
    view = embedding.table["weight"]
    view[PADDING] = 7.0
    del loop
    embedding.flush()
    assert embedding.table["weight"][PADDING].item() == 7.0


@pytest.mark.parametrize("capacity", [None, 4])
@pytest.mark.parametrize("ahead", [False, True], ids=["at-once", "prefetch"])
def test_a_padding_that_was_shortened_stays_so(
    ahead: bool, capacity: int | None, device: str
) -> None:
    first = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0)) + 2
    theirs = torch.nn.Embedding(ROWS, 3, padding_idx=0, max_norm=1.0, _weight=first.clone())
    ours = speedtorch.Embedding(
        ROWS, 3, padding_idx=0, max_norm=1.0, _weight=first, device=device, capacity=capacity
    )
    given = [torch.tensor(ids) for ids in ([5, 4], [0, 4], [1], [2, 4], [3])]
    loop: Any = speedtorch.prefetch(given, ours, ids=lambda ids: ids) if ahead else given
    for module, batches in ((theirs, given), (ours, loop)):
        sgd = optim.SGD(module.parameters(), lr=0.1)
        for ids in batches:
            module(ids).sum().backward()
            sgd.step()
            sgd.zero_grad()
    found = ours.state_dict()["weight"]
    assert torch.equal(found[0], theirs.weight.detach()[0])
    torch.testing.assert_close(found, theirs.weight.detach())


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("ids", [[PADDING], [1, PADDING, 7]], ids=str)
def test_a_gradient_is_assigned_before_the_first_lookup(
    ids: list[int], value: float, device: str
) -> None:
    theirs = nn.Embedding(ROWS, len(ROW), padding_idx=PADDING, device=device)
    ours = speedtorch.Embedding.from_module(theirs)
    for module in (theirs, ours):
        weight: Any = module.weight
        for _ in range(2):
            weight.grad = torch.zeros_like(weight)
            weight.grad[PADDING + 1 :] = value
            module.state_dict()
        looked_up = module(torch.tensor(ids, device=device))
        assert_same_bytes(looked_up.detach().cpu(), weight.detach()[ids].cpu())
        looked_up.sum().backward()
        optim.SGD(module.parameters(), lr=0.5).step()
    assert_same_bytes(ours.weight.detach().cpu().clone(), theirs.weight.detach().cpu())
