"""Training of a table in place: the reference for Embedding, which knows nothing of our classes.

Full-size tensors for the weight and for every field of state. Each step takes the rows that its ids
name out with index_select, looks them up with torch.nn.functional, runs the same optimizer on them,
and puts them back with index_copy_.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from optimizer_cases import Case, first_scalars, make_optimizer
from torch import Tensor, nn, optim

# Computes a loss from the rows' lookups: loss(look, part of a batch), look(ids) -> rows.
Loss = Callable[[Callable[[Tensor], Tensor], Any], Tensor]


class Trained(NamedTuple):
    """What training leaves behind."""

    weight: Tensor
    rows: dict[str, Tensor]
    scalars: dict[str, Any]
    scale: Tensor
    scale_state: dict[str, Any]


def trained(
    case: Case,
    optimizer: optim.Optimizer,
    weight: nn.Parameter,
    fields: Mapping[str, Tensor],
    scale: nn.Parameter,
) -> Trained:
    """What training has left of some rows, whose `fields` are the weight and what is kept of it."""
    return Trained(
        fields["weight"].clone(),
        {name: fields[name].clone() for name in case.rows},
        {n: value for n, value in optimizer.state[weight].items() if n not in case.rows},
        scale.detach(),
        dict(optimizer.state.get(scale, {})),
    )


def first_weight(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def random_ids(
    rows: int, steps: int, overlap: float, *, most: int = 40, seed: int = 2
) -> list[Tensor]:
    """Ids with duplicates, in changing numbers; a share of each step's are of the step before."""
    random = torch.Generator().manual_seed(seed)
    batches: list[Tensor] = []
    for step in range(steps):
        count = 1 + (step * 7) % most
        ids = torch.randint(rows, (count,), generator=random)
        if batches:
            before = batches[-1]
            kept = round(overlap * count)
            ids[:kept] = before[torch.randint(len(before), (kept,), generator=random)]
            if overlap == 0:
                free = torch.ones(rows, dtype=torch.bool)
                free[before] = False
                left = free.nonzero().flatten()
                ids = left[torch.randint(len(left), (count,), generator=random)]
        batches.append(ids[torch.randperm(count, generator=random)])
    return batches


class Squares:
    """A loss of the looked-up rows, a trained scale, and random targets."""

    def __init__(self, width: int, device: str, *, dense: bool) -> None:
        self.scale = nn.Parameter(torch.full((width,), 0.5, device=device), requires_grad=dense)
        self._random = torch.Generator().manual_seed(3)

    def __call__(self, rows: Tensor) -> Tensor:
        targets = torch.randn(rows.shape, generator=self._random).to(rows.device)
        # Small enough that no optimizer's numbers grow without end.
        return (rows * self.scale - targets).square().sum() / 64


def train_in_place(
    case: Case,
    variant: str,
    width: int,
    device: str,
    rows: int,
    batches: Sequence[Tensor],
    bags: Sequence[Tensor] = (),
    *,
    in_order: bool = False,
    distinct: bool = False,
) -> Trained:
    """Trains on batches of ids; with the offsets of their bags on the sums of these.

    A sparse gradient is that of torch, which adds up the rows of an id in any order, or with
    `in_order` in that of the batch. The optimizer gets the rows of the distinct ids in ascending
    order, or with `distinct` those of the batch, whose ids are distinct, in the batch's order: a
    fused optimizer rounds a number by its place.
    """
    is_sparse = case.make is optim.SparseAdam
    loss = Squares(width, device, dense=not is_sparse)
    held = nn.Parameter(torch.empty(0, width, device=device))
    optimizer = make_optimizer(case, variant, held, [] if is_sparse else [loss.scale])
    sparse = is_sparse and not in_order
    weight = first_weight(rows, width).to(device)
    fields = case.first_fields(weight)
    scalars = first_scalars(case, variant, device)
    for number, ids in enumerate(batches):
        touched, local = torch.unique(ids.to(device), return_inverse=True)
        if distinct:
            touched, local = ids.to(device), torch.arange(len(ids), device=device)
        optimizer.zero_grad()
        loss.scale.grad = None
        rows_now = weight.index_select(0, touched).requires_grad_()
        looked_up = nn.functional.embedding(local, rows_now, sparse=sparse)
        if bags:
            lengths = bags[number].diff().to(device)
            of_ids = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
            looked_up = looked_up.new_zeros(len(lengths), width).index_add(0, of_ids, looked_up)
        loss(looked_up).backward()
        held.data, held.grad = rows_now.detach(), rows_now.grad
        if is_sparse and in_order:
            assert rows_now.grad is not None
            numbers = torch.arange(len(touched), device=device)
            held.grad = torch.sparse_coo_tensor(
                numbers[None], rows_now.grad, is_coalesced=True, check_invariants=False
            )
        taken = {name: each.index_select(0, touched) for name, each in fields.items()}
        optimizer.state[held] = {**scalars, **taken}
        optimizer.step()
        state = optimizer.state[held]
        weight.index_copy_(0, touched, held.data)
        for name, each in fields.items():
            each.index_copy_(0, touched, state[name])
        scalars = {name: state[name] for name in scalars}
    scale_state = dict(optimizer.state.get(loss.scale, {}))
    return Trained(weight, fields, scalars, loss.scale.detach(), scale_state)
