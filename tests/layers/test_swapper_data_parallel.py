"""Modules of a model in DistributedDataParallel: the bits of plain data parallel, or an error."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from offloaded_models import assert_equal, copies
from rank_backends import NEEDS_GPU, on_ranks
from rank_processes import own_device
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from speedtorch.layers import StateSwapper, Swapper, tensor_group

MODULES, WIDTH = 4, 16


def pair() -> tuple[list[nn.Sequential], list[optim.Optimizer]]:
    """The same model twice: modules and a head."""
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(MODULES)), nn.Linear(WIDTH, 1))
    models = [copy.deepcopy(whole), whole]
    return models, [optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in models]


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


@contextmanager
def nodes_are_lost() -> Iterator[None]:
    """Lets each move of a module do what one to another device does: torch makes other nodes."""
    moves = tensor_group.set_versions

    def move(tensors: tuple[Tensor, ...], versions: tuple[int, ...]) -> None:
        for each in tensors:
            home = each.data
            each.data = home.double()
            each.data = home
        moves(tensors, versions)

    with patch.object(tensor_group, "set_versions", move):
        yield


def check_modules(way: str, made: str) -> None:
    """Modules by themselves (`auto`), or all in use."""
    device, (models, optimizers) = own_device(), pair()
    for each in (models[1], models[0][MODULES], *(models[0] if made == "before" else ())):
        each.to(device)
    if made == "before":  # of the swapper
        wrapped = [DistributedDataParallel(each) for each in models]
    budget = "7KiB" if way == "auto" else None
    swapper = Swapper(list(models[0])[:MODULES], optimizers[0], device=device, budget=budget)
    if made == "after":
        with swapper.use(models[0]):
            wrapped = [DistributedDataParallel(each) for each in models]
        swapper.evict()
    if way == "auto":
        swapper.auto()
    hooked: list[float] = []
    models[0][0].weight.register_hook(lambda gradient: hooked.append(float(gradient.sum())))
    for step in range(5):
        for model, optimizer in zip(wrapped, optimizers, strict=True):
            is_used = way == "use" and model is wrapped[0]
            within: AbstractContextManager[None] = nullcontext()
            if is_used:
                within = swapper.use(models[0])
            with within, model.no_sync() if step == 3 else nullcontext():
                model(batch(step).to(device)).square().mean().backward()
            if is_used:
                swapper.evict()
            if step == 3:  # it accumulates
                continue
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    swapper.evict()
    assert len(hooked) == 5
    assert_equal(dict(models[0].named_parameters()), dict(models[1].named_parameters()))
    flat = torch.cat([each.detach().flatten().to(device) for each in models[0].parameters()])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    assert all(torch.equal(each, flat) for each in every)


WAYS = pytest.mark.parametrize("way", ["auto", "use"])
MADE = pytest.mark.parametrize("made", ["before", "after"])


@pytest.mark.slow
@on_ranks
@WAYS
def test_modules_train_as_in_plain_data_parallel(way: str) -> None:
    check_modules(way, "after")


@NEEDS_GPU
@on_ranks
@WAYS
@MADE
@pytest.mark.parametrize("backend", ["nccl"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_modules_train_as_in_plain_data_parallel_on_gpus(way: str, made: str) -> None:
    check_modules(way, made)


@pytest.mark.slow
@on_ranks
@WAYS
@MADE
def test_modules_whose_moves_lose_nodes_train_as_in_plain_data_parallel(
    way: str, made: str
) -> None:
    """As on a GPU, where each move of a module is one to another device."""
    with nodes_are_lost():
        check_modules(way, made)


class Direct(nn.Module):
    """Uses the weights of its layers, and calls none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(MODULES))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.linear(x, layer.weight, layer.bias).tanh()
        return x


@pytest.mark.slow
@on_ranks
@pytest.mark.parametrize(
    "case",
    ["another", "two", "hooks", "closed", "copied", "unfrozen", "direct", "one module", "join"],
)
def test_what_happens_beside_data_parallel_changes_no_number(case: str) -> None:
    """Where moves lose nodes."""
    with nodes_are_lost():
        models: list[Any] = list(pair()[0])
        if case in ("direct", "one module"):
            torch.manual_seed(0)
            models = [whole := Direct(), copy.deepcopy(whole)]
        wrapped = [DistributedDataParallel(each) for each in models]
        optimizers = [optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in models]
        if case == "one module":
            found = [models[0].layers]
        else:
            found = list(models[0].layers) if case == "direct" else list(models[0])[:MODULES]
        first = [next(each.parameters()) for each in models]
        if case == "unfrozen":
            for each in first:
                each.requires_grad_(False)
        swapper: Swapper | None = Swapper(found, optimizers[0], device="cpu", budget=None)
        swapper.auto()
        for each in first:
            each.requires_grad_(True)
        other_wrappers: list[Any] = []
        called = [0, 0]

        def halve(gradient: Tensor, at: int) -> None:
            called[at] += 1
            gradient.mul_(0.5)

        for step in range(4):
            if swapper is not None:
                swapper.evict()
            if step == 1 and case == "another":
                other_wrappers.append(DistributedDataParallel(nn.Linear(2, 2)))
            if step == 1 and case == "two":
                other_wrappers += [DistributedDataParallel(each) for each in models]
            if step == 1 and case == "copied":
                other_wrappers = [copy.deepcopy(each) for each in wrapped]
            if step == 1 and case == "hooks":  # later than ours
                for at, each in enumerate(first):
                    each.register_post_accumulate_grad_hook(
                        lambda parameter, at=at: halve(parameter.grad, at)
                    )
            if step == 2 and case == "closed":
                swapper.close()
                swapper, found = None, []
                gc.collect()
            for model, optimizer in zip(wrapped, optimizers, strict=True):
                with model.join() if case == "join" else nullcontext():
                    for _ in range(1 if case != "join" else 1 + dist.get_rank()):
                        model(batch(step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for other_wrapper in other_wrappers if case == "copied" else ():
            other_wrapper(batch(0)).sum().backward()
        if swapper is not None:
            swapper.close()
        assert called == ([3, 3] if case == "hooks" else [0, 0])
        known = [dict(each.named_parameters()) for each in models]
        assert_equal(*known)


@pytest.mark.slow
@on_ranks
def test_a_search_for_lost_nodes_is_refused_by_name() -> None:
    """No error would tell that they are missing."""
    models, optimizers = pair()
    with nodes_are_lost():
        swapper = Swapper(list(models[0])[:MODULES], optimizers[0], device="cpu")
        with swapper.use(models[0]):
            wrapper = DistributedDataParallel(models[0], find_unused_parameters=True)
        swapper.evict()
        message = r"module '0': .*Use find_unused_parameters"
        with swapper.auto(), pytest.raises(NotImplementedError, match=message):
            wrapper(batch(0))


@pytest.mark.slow
@on_ranks
def test_what_data_parallel_would_get_wrong_is_refused_by_name() -> None:
    """Steps in the backward, and gradients that are views, raise before anything is stepped."""
    for steps, is_view, text in (
        (True, False, r"auto\(step=True\) steps with the gradients of this rank"),
        (False, True, "Use gradient_as_bucket_view=False"),
    ):
        models, optimizers = pair()
        modules = list(models[0])[:MODULES]
        wrapper = DistributedDataParallel(models[0], gradient_as_bucket_view=is_view)
        before = copies(dict(models[0].named_parameters()))
        swapper = Swapper(modules, optimizers[0], device="cpu")
        ways = [swapper.auto(step=steps)] if steps else [swapper.auto(), swapper.use(*modules)]
        for way in ways:
            with way, pytest.raises(NotImplementedError, match=f"module '0': .*{text}"):
                wrapper(batch(0))
            assert_equal(dict(models[0].named_parameters()), before)


@pytest.mark.slow
@on_ranks
def test_modules_that_data_parallel_ignores_may_be_stepped_in_backward() -> None:
    models, optimizers = pair()
    modules = list(models[0])[:MODULES]
    names = [f"{number}.{name}" for number in range(MODULES) for name in ("weight", "bias")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(models[0], names)
    before = copies(dict(models[0].named_parameters()))
    with Swapper(modules, optimizers[0], device="cpu").auto(step=True):
        DistributedDataParallel(models[0])(batch(0)).sum().backward()
    assert not torch.equal(modules[0].weight, before["0.weight"])


class Named(nn.Module):
    """A parameter of its own, one of two layers, and a layer with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.first, self.second, layer = (nn.Linear(1, 1, bias=False) for _ in range(3))
        self.second.weight = self.first.weight
        self.layer = self.again = layer

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x)) + self.layer(x) + self.scale
        return found


@on_ranks
def test_only_parameters_that_data_parallel_averages_raise_if_stepped_from_host_memory() -> None:
    """The number of averaged parameters also states what torch does with each name."""
    for ignored, count in (
        (["layer.weight"], 2),
        (["again.weight"], 3),
        (["first.weight"], 3),
        (["first.weight", "second.weight"], 2),
        (["scale"], 3),
    ):
        model = Named()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        wrapper = DistributedDataParallel(model)
        wrapper(torch.full((1, 1), 1.0 + dist.get_rank())).sum().mul(1 + dist.get_rank()).backward()
        for param in model.parameters():
            assert param.grad is not None
            gradients = [torch.empty_like(param.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(gradients, param.grad)
            optimizer = optim.SGD([param], lr=0.1)
            StateSwapper(optimizer, budget="1KiB", device="cpu")
            if not torch.equal(*gradients):
                optimizer.step()
                continue
            count -= 1
            with pytest.raises(ValueError, match="DistributedDataParallel would not find its"):
                optimizer.step()
            param.requires_grad_(False)
            optimizer.step()
        assert count == 0
