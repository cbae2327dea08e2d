"""Sharded rows beside FSDP, a GradScaler, DistributedDataParallel and accumulated gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_backends import BACKENDS, ON_RANKS
from rank_processes import own_device
from sharded_training import (
    ROWS,
    WIDTH,
    Biased,
    assert_own_rows,
    factors,
    ids_of_rank,
    own_gradient,
    raises,
    share_of,
    train_both,
)
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor

import speedtorch
from speedtorch.parallel.clip import clip_grad_norm_
from speedtorch.parallel.grad_scaler import GradScaler
from speedtorch.parallel.row_parameters import row_parameters
from speedtorch.parallel.shard import shard

pytestmark = ON_RANKS

STEPS = 6
DataParallel = nn.parallel.DistributedDataParallel


def ids_of(step: int, rank: int) -> Tensor:
    """Some of several ranks, and none of some."""
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(ROWS, ((step + 2 * rank) % 4, 2), generator=random)


def losses_of(found: Tensor, step: int, ranks: Sequence[int]) -> Iterator[Tensor]:
    """The loss of each rank, a whole number of what one lookup found for all of them."""
    parts = found.split([len(ids_of(step, rank)) for rank in ranks])
    for rank, part in zip(ranks, parts, strict=True):
        yield (part * factors(part, 100 * step + rank)).sum()


def loss_of(model: nn.Module, step: int, ranks: Sequence[int]) -> Tensor:
    found = model(torch.cat([ids_of(step, rank) for rank in ranks]))
    return torch.stack([*losses_of(found, step, ranks)]).sum()


class Scored(nn.Module):
    """Rows, whose gradient comes through dense layers if it is asked to."""

    def __init__(self, *, through: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.rows = speedtorch.Embedding(ROWS, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 2))
        self.through = through
        self.to(own_device())

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        found = self.rows(ids)
        return found, self.layers(found if self.through else found.detach())


def shared_out(module: nn.Module, ignored: set[nn.Parameter] | None = None) -> None:
    """fully_shard, on the device where ranks train."""
    mesh = init_device_mesh(own_device().type, (dist.get_world_size(),))
    fully_shard(module, mesh=mesh, ignored_params=ignored)


@pytest.mark.parametrize(
    ("through", "scaled"),
    [(False, False), (True, False), (False, True)],
    ids=["exact", "through dense layers", "scaled"],
)
@BACKENDS
def test_fully_shard_trains_the_dense_part(through: bool, scaled: bool) -> None:
    """With `scaled` rows and dense layers have an optimizer each, under a GradScaler."""

    def wrap(model: Scored) -> Scored:
        weights = row_parameters(model)
        shared_out(model.layers[0])
        shared_out(model, weights)
        assert weights == {model.rows.weight}
        assert all(isinstance(param, DTensor) for param in model.layers.parameters())
        return model

    def train(model: Scored, ranks: Sequence[int]) -> None:
        # torch steps parameters of a group together on a GPU, but none with those of fully_shard.
        groups = [{"params": [model.rows.weight]}, {"params": model.layers.parameters()}]
        apart = [[group] for group in groups] if scaled else [groups]
        made = [optim.AdamW(some, lr=0.1) for some in apart]
        speedtorch.attach(made[0], model)
        scaler = GradScaler(own_device().type, init_scale=4.0, enabled=scaled)
        for step in range(STEPS):
            model.zero_grad()
            found, scored = model(torch.cat([ids_of(step, rank) for rank in ranks]))
            loss = scored.square().sum()
            for rank, of_rank in zip(ranks, losses_of(found, step, ranks), strict=True):
                is_infinite = (step, rank, scaled) == (2, 0, True)
                loss = loss + of_rank * (float("inf") if is_infinite else 1.0)
            scaler.scale(loss / len(ranks)).backward()
            for optimizer in made:
                scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == (2.0 if scaled else 1.0)

    model, whole = train_both(lambda: Scored(through=through), train, wrap=wrap)
    for found, expected in zip(model.layers.parameters(), whole.layers.parameters(), strict=True):
        torch.testing.assert_close(found.full_tensor(), expected)
    if not through:
        return assert_own_rows(model, whole)
    for entry in whole.rows.table.fields:
        own = share_of(whole.rows.table[entry])
        torch.testing.assert_close(model.rows.table[entry], own)


@BACKENDS
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_rows_are_clipped_by_a_norm_with_the_parameters_of_fully_shard(norm_type: float) -> None:
    def wrap(model: Scored) -> Scored:
        shared_out(model, row_parameters(model))
        return model

    def train(model: Scored, ranks: Sequence[int]) -> None:
        batches = [torch.tensor([1, 2, 3 + rank]) for rank in ranks]
        torch.stack([model(ids)[1].sum() for ids in batches]).mean().backward()

    model, whole = train_both(lambda: Scored(through=True), train, wrap=wrap)
    found = clip_grad_norm_(model.parameters(), 0.25, norm_type)
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.25, norm_type)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(model.layers.parameters(), whole.layers.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    clipped = torch.linalg.vector_norm(own_gradient(model.rows), float("inf"))
    assert 0 < clipped <= 0.25
    if dist.get_rank() == 1:
        next(model.layers.parameters()).grad.to_local().fill_(float("nan"))
    assert clip_grad_norm_(model.parameters(), 0.25, norm_type).isnan()


def test_row_parameters_are_those_of_a_module() -> None:
    with pytest.raises(TypeError, match="model: expected an nn.Module, got list"):
        row_parameters([nn.Linear(2, 2)])


@BACKENDS
def test_fully_shard_of_rows_raises_and_names_row_parameters() -> None:
    """No row has been copied."""
    wrapped = FullyShardedDataParallel
    for frozen, wrap, message in (
        (False, shared_out, r"ignored_params=speedtorch.row_parameters\(model\)"),
        (True, shared_out, r"ignored_params=speedtorch.row_parameters\(model\)"),
        (
            False,
            lambda model: wrapped(model, device_id=torch.device("cpu")),
            "FullyShardedDataParallel: ignored_states=",
        ),
    ):
        model = nn.Sequential(speedtorch.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 2))
        model[0].weight.requires_grad_(not frozen)
        shard(model)
        with pytest.raises(NotImplementedError, match=message):
            wrap(model)


def test_row_parameters_are_those_of_every_module() -> None:
    """Of modules and of collections, sharded or not."""
    config = speedtorch.EmbeddingBagConfig
    tables = [config(9, 4, "a"), config(5, 4, "b"), config(7, 2, "c")]
    collection = speedtorch.EmbeddingBagCollection(tables=tables)
    bags = speedtorch.EmbeddingBag(ROWS, WIDTH, mode="sum")
    model = nn.ModuleList([collection, nn.Sequential(bags), nn.Linear(2, 2)])
    before = row_parameters(model)
    assert before == set(collection.parameters()) | {bags.weight} and len(before) == 3
    shard(model)
    assert row_parameters(model) == before
    assert row_parameters(model[2]) == set()


MAKES: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.25, momentum=0.5),
    "Adam": lambda p: optim.Adam(p, lr=0.25),
    "fused Adam": lambda p: optim.Adam(p, lr=0.25, fused=True),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] if name == "Adam" else []) for name in MAKES],
)
@pytest.mark.parametrize(
    ("unscaled", "apart"),
    [(False, False), (True, False), (False, True)],
    ids=["scaled", "unscaled", "apart"],
)
def test_all_ranks_skip_the_step_that_one_must(name: str, unscaled: bool, apart: bool) -> None:
    """A gradient that is infinite on one rank halves the scale of all.

    With `unscaled` somebody unscales before the step; with `apart` rows and the dense layer have
    an optimizer each.
    """

    def train(model: nn.Module, ranks: Sequence[int]) -> None:
        groups = [row_parameters(model), set(model.parameters()) - row_parameters(model)]
        made = [MAKES[name](group) for group in (groups if apart else [model.parameters()])]
        speedtorch.attach(made[0], model)
        scaler = GradScaler("cpu", init_scale=4.0, growth_interval=3)
        scales = []
        for step in range(STEPS):
            for optimizer in made:
                optimizer.zero_grad()
            # The row of id 0 is of one rank alone, and only rows have an infinite gradient.
            ids, factor = torch.arange(int(0 in ranks)), float("inf") if step == 2 else 1.0
            loss = loss_of(model, step, ranks) + model(ids, factor=factor)[:, 0].sum()
            scaler.scale(loss / len(ranks)).backward()
            for optimizer in made:
                if unscaled:
                    scaler.unscale_(optimizer)
                    clip_grad_norm_(model.parameters(), 1e6)
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales == [4.0, 4.0, 2.0, 2.0, 2.0, 4.0]

    model, whole = train_both(Biased, train, wrap=DataParallel)
    assert torch.equal(model.bias, whole.bias) and bool((model.bias != 0).all())
    assert_own_rows(model, whole)


@pytest.mark.parametrize("name", MAKES)
def test_a_rank_without_gradients_skips_with_the_other_ranks(name: str) -> None:
    rank, module = dist.get_rank(), speedtorch.Embedding(ROWS, WIDTH)
    shard(module)
    optimizer = MAKES[name](module.parameters())
    speedtorch.attach(optimizer, module)
    scaler = GradScaler("cpu", init_scale=4.0)
    before = module.table["weight"].clone()
    for factor, scale in ((float("inf"), 2.0), (1.0, 2.0)):
        optimizer.zero_grad()
        ids = torch.tensor(ids_of_rank(0)[: int(rank == 1)], dtype=torch.int64)
        scaler.scale((module(ids) * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
        changed = bool((module.table["weight"] != before).any())
        assert changed is (factor == 1.0 and rank == 0)


def test_a_scaler_of_one_rank_alone_is_refused() -> None:
    """Rows of one process need no other."""
    module = speedtorch.Embedding(ROWS, WIDTH)
    shard(module)
    message = "gradient of Embedding needs the rows of all ranks, .* and speedtorch.GradScaler"
    for fused in (False, True):
        optimizer = optim.SGD(module.parameters(), fused=fused)
        for kind in (torch.amp.GradScaler, ShardedGradScaler):
            scaler = kind("cpu")
            scaler.scale(module(torch.tensor([1])).sum()).backward()
            with pytest.raises(NotImplementedError, match=message):
                scaler.step(optimizer)
    for kind in (torch.amp.GradScaler, GradScaler):
        alone = Biased()
        optimizer = optim.SGD(alone.parameters(), lr=1.0)
        scaler = kind("cpu", init_scale=4.0)
        scaler.scale(alone(torch.tensor([1])).sum()).backward()
        scaler.step(optimizer)
        assert alone.bias.tolist() == [-1.0] * WIDTH


def test_data_parallel_may_wrap_a_part_and_names_the_module_to_shard() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole, part = nn.Sequential(Biased()), Biased()
    shard(whole)
    shard(part)
    for module in (whole[0], whole):
        wrapped = DataParallel(module)
        (wrapped(torch.tensor([rank])) * (rank + 1.0)).sum().backward()
        averaged = sum(range(1, ranks + 1)) / ranks
        assert whole[0].bias.grad.tolist() == [averaged] * WIDTH
        wrapped.zero_grad()
    message = r"Call speedtorch.shard\(\) with the whole module that DistributedDataParallel wraps"
    raises(NotImplementedError, message, lambda: DataParallel(nn.ModuleDict({"part": part})))
    alone = DataParallel(Biased())
    raises(NotImplementedError, "the whole Biased instead of", lambda: alone(torch.tensor([1])))


@pytest.mark.parametrize("synchronised", [True, False], ids=["each", "no_sync"])
def test_gradients_of_several_backwards_add_up(synchronised: bool) -> None:
    """Also what lookups in between find."""
    every, seen = torch.arange(ROWS), []

    def train(model: Any, ranks: Sequence[int]) -> None:
        optimizer = optim.AdamW(model.parameters(), lr=0.25, weight_decay=0.5)
        speedtorch.attach(optimizer, model)
        seen.append([])
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in range(3):
                alone = isinstance(model, DataParallel) and number < 2 and not synchronised
                with model.no_sync() if alone else nullcontext():
                    (loss_of(model, 10 * step + number, ranks) / len(ranks)).backward()
                model.eval()
                with torch.no_grad():
                    seen[-1].append(model(every if number else every[:0]).clone())
                model.train()
            optimizer.step()
            with torch.inference_mode():
                seen[-1].append(model(every).clone())

    model, whole = train_both(Biased, train, wrap=DataParallel)
    assert torch.equal(model.bias, whole.bias) and bool((model.bias != 0).all())
    assert all(map(torch.equal, *seen))
    assert_own_rows(model, whole)


def test_a_rank_that_nobody_asks_counts_its_steps() -> None:
    """A batch may be empty."""

    def train(model: Biased, ranks: Sequence[int]) -> None:
        optimizer = optim.Adam(model.rows.parameters(), lr=0.25)
        speedtorch.attach(optimizer, model.rows)
        for step in range(STEPS):
            optimizer.zero_grad()
            owner, looks = step % dist.get_world_size(), step // dist.get_world_size()
            ids = torch.tensor([ids_of_rank(owner)[step % 3]])
            ids = ids[: int(looks % dist.get_world_size() in ranks)]  # the others have none
            (model.rows(ids) * 2 / len(ranks)).sum().backward()
            optimizer.step()
        assert int(optimizer.state_dict()["state"][0]["step"]) == STEPS

    assert_own_rows(*train_both(Biased, train))
