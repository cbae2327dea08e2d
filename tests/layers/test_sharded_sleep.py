"""Training states on ranks of DistributedDataParallel and FSDP2: offloaded, or state in buckets."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from offloaded_models import COMMON_OPTIMIZERS
from rank_backends import ON_RANKS, TWO_AND_THREE_RANKS
from rank_processes import own_device
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from speedtorch.layers import StateSwapper, TrainingState

pytestmark = [*ON_RANKS, TWO_AND_THREE_RANKS]

STEPS = 4
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    **{name: make for name, make in COMMON_OPTIMIZERS.items() if name != "Rprop"},
    "SGD-foreach": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "AdamW": partial(optim.AdamW, lr=0.05),
    "AdamW-fused": partial(optim.AdamW, lr=0.05, fused=True),
    "Muon": lambda parameters: optim.Muon([each for each in parameters if each.dim() == 2]),
}
"""Torch's Rprop steps no DTensor."""


def _model(way: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(3)]
    model: nn.Module = nn.Sequential(*layers).to(own_device())
    if way.startswith("ddp"):
        return DistributedDataParallel(model, gradient_as_bucket_view="views" in way)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if "bfloat16" in way else None
    more: dict[str, Any] = {"mp_policy": policy} if policy else {}
    if "offloaded" in way:
        more["offload_policy"] = CPUOffloadPolicy(pin_memory=own_device().type == "cuda")
    mesh = init_device_mesh(own_device().type, (dist.get_world_size(),))
    for each in (*model, model):
        fully_shard(each, mesh=mesh, **more)
    return model


def _batch(step: int) -> Tensor:
    random = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(5, 6, generator=random).to(own_device())


def _trained(way: str, name: str, *, sleeps: bool, keep_addresses: bool = False) -> list[Tensor]:
    """All that the state has at the end, on the CPU."""
    model = _model(way)
    optimizer = OPTIMIZERS[name](model.parameters())
    state = TrainingState(model, optimizer, keep_addresses=keep_addresses)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model(_batch(step)).square().mean().backward()
        if sleeps and step % 3 == 1:  # with gradients
            before = _all_of(model, optimizer)
            with state.asleep() as report:
                assert report.left == () and sum(report.asleep.values()) > 0
                for asleep, awake in zip(_all_of(model, optimizer), before, strict=True):
                    assert torch.equal(asleep, awake)
        optimizer.step()
        if sleeps:
            with state.asleep(["weights", "optimizer"]):
                dist.barrier()
    return _all_of(model, optimizer)


def _all_of(model: nn.Module, optimizer: optim.Optimizer) -> list[Tensor]:
    found = tree_leaves(get_state_dict(model, optimizer))
    found += [each.grad for each in model.parameters()]
    local = (each.to_local() if isinstance(each, DTensor) else each for each in found)
    return [each.detach().cpu().clone() for each in local if isinstance(each, Tensor)]


def _stepped(way: str, name: str, budget: int | None) -> list[Tensor]:
    model = _model(way)
    optimizer = OPTIMIZERS[name](model.parameters())
    if budget is not None:
        at = own_device() if "offloaded" in way else None
        swapper = StateSwapper(optimizer, budget=budget, device=at)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(_batch(step)).square().mean().backward()
        optimizer.step()
    if budget is not None:
        report = swapper.report()
        assert report.num_buckets > 1 and report.device_bytes == 0 < report.bytes_in
    return _all_of(model, optimizer)


def _names(way: str) -> list[str]:
    """The optimizers; in the ordinary run each way and number of ranks has a third of them."""
    if own_device().type == "cuda" or "SPEEDTORCH_PROGRAMS" in os.environ:
        return list(OPTIMIZERS)
    return list(OPTIMIZERS)[(len(way) + dist.get_world_size()) % 3 :: 3]


def _same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    assert len(ours) == len(theirs) > 20
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "way",
    [
        "ddp",
        "fully_shard",
        "fully_shard bfloat16",
        "fully_shard offloaded",
        "fully_shard bfloat16 offloaded",
    ],
)
def test_ranks_step_as_with_all_state_on_the_device(way: str) -> None:
    for name in _names(way):
        theirs = _stepped(way.replace("offloaded", ""), name, None)
        assert _same(_stepped(way, name, 600), theirs), name


def _written_asleep(how: str, *, sleeps: bool) -> list[Tensor]:
    """All that a state has which was written between a forward and the next, asleep or awake."""
    model = _model("fully_shard")
    model.set_reshard_after_forward(False)
    optimizer = optim.AdamW(model.parameters(), lr=0.05)
    state = TrainingState(model, optimizer)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(_batch(number)).square().mean().backward()
        optimizer.step()

    step(0)
    with torch.no_grad():
        seen = [model(_batch(1))]  # layers have all of their parameters from here on
    if sleeps:
        state.sleep()
    with torch.no_grad():
        if how == "set_state_dict":
            weights, kept = get_state_dict(model, optimizer)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=kept)
        elif how == "load_state_dict":
            model.load_state_dict({name: each / 2 for name, each in model.state_dict().items()})
        else:
            for each in model.state_dict().values():
                each.mul_(0.5)
        seen.append(model(_batch(1)))
    if sleeps:
        state.wake()
    for number in (2, 3):
        step(number)
        with state.asleep() if sleeps else nullcontext(), torch.no_grad():
            seen.append(model(_batch(1)))
    return [*seen, *_all_of(model, optimizer)]


@pytest.mark.parametrize("how", ["set_state_dict", "load_state_dict", "in place"])
def test_ranks_compute_with_values_written_while_offloaded(how: str) -> None:
    """While the state is offloaded and after that."""
    assert _same(_written_asleep(how, sleeps=True), _written_asleep(how, sleeps=False))


@pytest.mark.parametrize("way", ["ddp", "ddp views", "fully_shard", "fully_shard bfloat16"])
def test_ranks_train_as_if_they_had_not_slept(way: str) -> None:
    for name in _names(way):
        theirs = _trained(way, name, sleeps=False)
        for keep_addresses in (False, True)[: 1 + (own_device().type == "cuda")]:
            ours = _trained(way, name, sleeps=True, keep_addresses=keep_addresses)
            assert _same(ours, theirs), name
