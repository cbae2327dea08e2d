"""What else trains a model beside its sharded rows, and one process that does the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import own_device
from sharded_training import (
    ROWS,
    WIDTH,
    Biased,
    assert_own_rows,
    factors,
    own_gradient,
    raises,
    share_of,
)
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor

import speedtorch
from speedtorch.parallel.block_cyclic import BlockCyclic
from speedtorch.parallel.clip import clip_grad_norm_
from speedtorch.parallel.grad_scaler import GradScaler
from speedtorch.parallel.row_parameters import row_parameters
from speedtorch.parallel.shard import shard
from speedtorch.table.row_blocks import rows_of_a_block

STEPS = 6
DataParallel = nn.parallel.DistributedDataParallel


def ids_of(step: int, rank: int) -> Tensor:
    """Some of several ranks, and none of some."""
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(ROWS, ((step + 2 * rank) % 4, 2), generator=random)


def ids_of_rank(rank: int) -> list[int]:
    """Those of the rows that a rank owns."""
    sharding = BlockCyclic.of(ROWS, dist.get_world_size(), rows_of_a_block((WIDTH,)))
    return [row for rows, _ in sharding.blocks(rank) for row in rows]


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


def loss_of(model: nn.Module, step: int, ranks: Sequence[int], **more: Any) -> Tensor:
    """The sum of the losses of ranks, each a whole number of results, one lookup for all."""
    batch = [ids_of(step, rank) for rank in ranks]
    found = model(torch.cat(batch), **more)
    parts = found.split([len(ids) for ids in batch])
    losses = [
        (p * factors(p, 100 * step + rank)).sum() for rank, p in zip(ranks, parts, strict=True)
    ]
    return torch.stack(losses).sum()


def shared_out(module: nn.Module, ignored: set[nn.Parameter] | None = None) -> None:
    """fully_shard, on the device where ranks train."""
    mesh = init_device_mesh(own_device().type, (dist.get_world_size(),))
    fully_shard(module, mesh=mesh, ignored_params=ignored)


def check_fully_shard(through: bool, scaled: bool) -> None:
    """fully_shard trains the dense layers, and each rank its rows.

    With `scaled` rows and dense layers have an optimizer each, under a GradScaler.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, whole = Scored(through=through), Scored(through=through)
    shard(model)
    weights = row_parameters(model)
    shared_out(model.layers[0])
    shared_out(model, weights)
    assert weights == {model.rows.weight}
    assert all(isinstance(param, DTensor) for param in model.layers.parameters())
    for training, of_ranks in ((model, [rank]), (whole, range(ranks))):
        # torch steps parameters of a group together on a GPU, but none with those of fully_shard.
        groups = [{"params": [training.rows.weight]}, {"params": training.layers.parameters()}]
        apart = [[group] for group in groups] if scaled else [groups]
        made = [optim.AdamW(some, lr=0.1) for some in apart]
        speedtorch.attach(made[0], training)
        scaler = GradScaler(own_device().type, init_scale=4.0, enabled=scaled)
        for step in range(STEPS):
            training.zero_grad()
            batch = [ids_of(step, k) for k in of_ranks]
            found, scored = training(torch.cat(batch))
            loss = scored.square().sum()
            for k, part in zip(of_ranks, found.split([len(ids) for ids in batch]), strict=True):
                factor = float("inf") if (step, k, scaled) == (2, 0, True) else 1.0
                loss = loss + (part * factors(part, 10 * step + k) * factor).sum()
            scaler.scale(loss / len(of_ranks)).backward()
            for optimizer in made:
                scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == (2.0 if scaled else 1.0)
    for found, expected in zip(model.layers.parameters(), whole.layers.parameters(), strict=True):
        torch.testing.assert_close(found.full_tensor(), expected)
    if not through:
        return assert_own_rows(model.rows, whole.rows)
    for entry in whole.rows.table.fields:
        own = share_of(whole.rows.table[entry], rank, ranks)
        torch.testing.assert_close(model.rows.table[entry], own)


def check_fully_shard_clipped() -> None:
    """The norm is that of rows and of what fully_shard shares out."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ids = [torch.tensor([1, 2, 3 + k]) for k in range(ranks)]
    for norm_type in (2.0, float("inf")):
        model, whole = Scored(through=True), Scored(through=True)
        shard(model)
        shared_out(model, row_parameters(model))
        model(ids[rank])[1].sum().backward()
        torch.stack([whole(batch)[1].sum() for batch in ids]).mean().backward()
        found = clip_grad_norm_(model.parameters(), 0.25, norm_type)
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.25, norm_type)
        torch.testing.assert_close(found, expected)
        for ours, theirs in zip(model.layers.parameters(), whole.layers.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        clipped = torch.linalg.vector_norm(own_gradient(model.rows), float("inf"))
        assert 0 < clipped <= 0.25


def check_fully_shard_refused() -> None:
    """What would share out the rows of a table says what to do instead; no row has been copied."""
    for frozen in (False, True):
        model = nn.Sequential(speedtorch.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 2))
        model[0].weight.requires_grad_(not frozen)
        shard(model)
        raises(
            NotImplementedError,
            r"ignored_params=speedtorch.row_parameters\(model\)",
            lambda model=model: shared_out(model),  # type: ignore[misc]
        )
    model = nn.Sequential(speedtorch.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 2))
    shard(model)
    raises(
        NotImplementedError,
        "FullyShardedDataParallel: ignored_states=",
        lambda: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    )


def check_row_parameters() -> None:
    """Those of modules and of collections, shared out or not."""
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


def check_scaled(name: str) -> None:
    """With one optimizer and several, also where somebody unscales before the step."""
    for unscaled, apart in ((False, False), (True, False), (False, True)):
        check_scaled_by(name, unscaled, apart)


def check_scaled_by(name: str, unscaled: bool, apart: bool) -> None:
    """A gradient that is infinite on one rank lets all of them skip the step, and halve the scale.

    With `unscaled` somebody unscales before the step; with `apart` rows and the dense layer have
    an optimizer each.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, whole = Biased(), Biased()
    shard(model)
    wrapped = DataParallel(model)
    for training, of_ranks in ((wrapped, [rank]), (whole, range(ranks))):
        groups = [row_parameters(training), set(training.parameters()) - row_parameters(training)]
        made = [MAKES[name](group) for group in (groups if apart else [training.parameters()])]
        speedtorch.attach(made[0], training)
        scaler = GradScaler("cpu", init_scale=4.0, growth_interval=3)
        scales = []
        for step in range(STEPS):
            for optimizer in made:
                optimizer.zero_grad()
            # The row of id 0 is of one rank alone, and only rows have an infinite gradient.
            factor = float("inf") if step == 2 else 1.0
            loss = loss_of(training, step, of_ranks)
            if 0 in of_ranks:
                loss = loss + training(torch.tensor([0]), factor=factor)[0, 0]
            elif training is wrapped:
                loss = loss + training(torch.tensor([], dtype=torch.int64)).sum()
            loss = loss / (ranks if training is whole else 1)
            scaler.scale(loss).backward()
            for optimizer in made:
                if unscaled:
                    scaler.unscale_(optimizer)
                    clip_grad_norm_(training.parameters(), 1e6)
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales == [4.0, 4.0, 2.0, 2.0, 2.0, 4.0]
    assert torch.equal(model.bias, whole.bias) and bool((model.bias != 0).all())
    assert_own_rows(model.rows, whole.rows)


def check_scaled_without_gradients() -> None:
    """A rank of whose rows a step has none asks the others all the same."""
    rank = dist.get_rank()
    for name, make in MAKES.items():
        module = speedtorch.Embedding(ROWS, WIDTH)
        shard(module)
        optimizer = make(module.parameters())
        speedtorch.attach(optimizer, module)
        scaler = GradScaler("cpu", init_scale=4.0)
        before = module.table["weight"].clone()
        for factor, scale in ((float("inf"), 2.0), (1.0, 2.0)):
            optimizer.zero_grad()
            ids = torch.tensor(ids_of_rank(0)[: int(rank == 1)], dtype=torch.int64)
            scaler.scale((module(ids) * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scale, name
            changed = bool((module.table["weight"] != before).any())
            assert changed is (factor == 1.0 and rank == 0), name


def check_scalers_refused() -> None:
    """Those that would look at one rank's gradients alone; rows of one process need no other."""
    module = speedtorch.Embedding(ROWS, WIDTH)
    shard(module)
    for make in (optim.SGD, lambda p: optim.SGD(p, fused=True)):
        optimizer = make(module.parameters())
        for kind in (torch.amp.GradScaler, ShardedGradScaler):
            scaler = kind("cpu")
            scaler.scale(module(torch.tensor([1])).sum()).backward()
            raises(
                NotImplementedError,
                "gradient of Embedding needs the rows of all ranks, .* and speedtorch.GradScaler",
                lambda: scaler.step(optimizer),  # noqa: B023
            )
    for kind in (torch.amp.GradScaler, GradScaler):
        alone = Biased()
        optimizer = optim.SGD(alone.parameters(), lr=1.0)
        scaler = kind("cpu", init_scale=4.0)
        scaler.scale(alone(torch.tensor([1])).sum()).backward()
        scaler.step(optimizer)
        assert alone.bias.tolist() == [-1.0] * WIDTH


def check_wrapped_modules() -> None:
    """DistributedDataParallel may wrap what was sharded, or a part of it, and nothing else."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = nn.Sequential(Biased())
    shard(whole)
    for part in (whole[0], whole):
        wrapped = DataParallel(part)
        (wrapped(torch.tensor([rank])) * (rank + 1.0)).sum().backward()
        averaged = sum(range(1, ranks + 1)) / ranks
        assert whole[0].bias.grad.tolist() == [averaged] * WIDTH
        wrapped.zero_grad()
    part = Biased()
    shard(part)
    message = r"Call speedtorch.shard\(\) with the whole module that DistributedDataParallel wraps"
    raises(NotImplementedError, message, lambda: DataParallel(nn.ModuleDict({"part": part})))
    alone = DataParallel(Biased())
    raises(NotImplementedError, "the whole Biased instead of", lambda: alone(torch.tensor([1])))


def check_accumulation(synchronised: bool) -> None:
    """Gradients of several backwards add up to those of one process, also within no_sync()."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, whole = Biased(), Biased()
    shard(model)
    wrapped = DataParallel(model)
    every = torch.arange(ROWS)
    seen: list[list[Tensor]] = []
    for training, of_ranks in ((wrapped, [rank]), (whole, range(ranks))):
        optimizer = optim.AdamW(training.parameters(), lr=0.25, weight_decay=0.5)
        speedtorch.attach(optimizer, training)
        seen.append([])
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in range(3):
                alone = training is wrapped and number < 2 and not synchronised
                with wrapped.no_sync() if alone else nullcontext():
                    loss = loss_of(training, 10 * step + number, of_ranks)
                    (loss / (ranks if training is whole else 1)).backward()
                training.eval()
                with torch.no_grad():
                    seen[-1].append(training(every if number else every[:0]).clone())
                training.train()
            optimizer.step()
            with torch.inference_mode():
                seen[-1].append(training(every).clone())
    assert torch.equal(model.bias, whole.bias) and bool((model.bias != 0).all())
    assert all(map(torch.equal, *seen))
    assert_own_rows(model.rows, whole.rows)


def check_rows_of_one_rank() -> None:
    """A rank that nobody asks for rows counts a step as the others do; a batch may be empty."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, whole = Biased(), Biased()
    shard(model)
    for rows in (model.rows, whole.rows):
        optimizer = optim.Adam(rows.parameters(), lr=0.25)
        speedtorch.attach(optimizer, rows)
        for step in range(STEPS):
            optimizer.zero_grad()
            ids = torch.tensor([ids_of_rank(step % ranks)[step % 3]])
            if rows is model.rows:
                ids = ids[: int(rank == step // ranks % ranks)]  # the others have none
            (rows(ids) * (2.0 if rows is model.rows else 1.0)).sum().backward()
            optimizer.step()
        assert int(optimizer.state_dict()["state"][0]["step"]) == STEPS
    assert_own_rows(model.rows, whole.rows)
