"""Results of modules under auto: of other modules, views, and those changed in place later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from offloaded_models import Pair
from torch import Tensor, nn, optim
from torch.autograd.function import once_differentiable

from speedtorch.layers import Swapper

MODULES, WIDTH = 6, 16


class Biased(nn.Module):
    """The first makes a bias that all of them return, as T5's position bias."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        # Of two layers: the backward of the second needs its weights, which have left meanwhile.
        made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.bias = made if first else None

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.bias is not None:
            bias = self.bias(torch.ones(WIDTH, device=x.device))
        return torch.tanh(self.linear(x) + bias), bias


class Dropped(nn.Linear):
    """Returns its input in every second call, as stochastic depth does."""

    def __init__(self, calls: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls % 2 else torch.tanh(super().forward(x))


class Scaled(torch.autograd.Function):
    """Returns a view of its input, and needs a parameter in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        return gradient * factor, None


class Viewed(nn.Linear):
    """Its result is a view by a function of its own."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Scaled.apply(torch.tanh(super().forward(x)), self.bias)
        return found


def biased(layers: nn.ModuleList, x: Tensor) -> Tensor:
    bias = None
    for layer in layers:
        x, bias = layer(x, bias)
    return x


def in_turn(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def residual(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        y = layer(x)
        y += x
        x = y
    return x


def parts(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """Changes a part of each result in place."""
    for layer in layers:
        x = layer(x)
        x[:, :1].mul_(0.5)
    return x


def rectified(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = torch.relu_(layer(x))
    return x


def linears() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(MODULES)]


def with_activations() -> list[nn.Module]:
    """Modules that change their input in place, or return it."""
    return [each for linear in linears() for each in (linear, nn.ReLU(inplace=True), nn.Identity())]


PROGRAMS: dict[str, tuple[Callable[[], list[nn.Module]], Callable[..., Tensor]]] = {
    "another's": (lambda: [Biased(first=not number) for number in range(MODULES)], biased),
    "its input": (lambda: [Dropped(number) for number in range(MODULES)], in_turn),
    "its input in place": (with_activations, in_turn),
    "views of a function": (lambda: [Viewed(WIDTH, WIDTH) for _ in range(MODULES)], in_turn),
    "residual in place": (linears, residual),
    "part in place": (linears, parts),
    "activation in place": (linears, rectified),
}


@pytest.mark.parametrize("steps", [False, True], ids=["optimizer steps", "backward steps"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_results_that_a_module_did_not_make_or_that_change_in_place(
    device: str, program: str, steps: bool
) -> None:
    make, forward = PROGRAMS[program]
    torch.manual_seed(1)
    budget = "20KiB" if program == "another's" else "7KiB"
    pair = Pair(nn.ModuleList(make()), device, optim.Adam, budget=budget)
    with pair.swapper.auto(step=steps):
        for step in range(4):
            x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
            pair.train(lambda model, x=x: forward(model, x.clone()).square().mean())
    pair.assert_same()


def test_a_module_whose_result_changes_in_place_is_stepped_within_the_backward() -> None:
    layers = nn.ModuleList(linears())
    optimizer = optim.SGD(layers.parameters(), lr=0.1)
    left: list[int] = []

    def count(*_: object) -> None:
        left.append(sum(each.weight.grad is not None for each in layers))  # type: ignore[misc]

    x = torch.ones(2, 3, WIDTH, requires_grad=True)
    x.register_hook(count)
    with Swapper(layers, optimizer, device="cpu").auto(step=True):
        residual(layers, x.clone()).sum().backward()
    assert left == [1]


def test_a_result_of_another_module_needs_no_module_that_returned_it() -> None:
    layers = nn.ModuleList(Biased(first=not number) for number in range(2))
    swapper = Swapper(layers, device="cpu")
    with swapper.use(layers[0]):
        _, bias = layers[0](torch.ones(WIDTH), None)
        with swapper.use(layers[1]):
            _, bias = layers[1](torch.ones(WIDTH), bias)
        swapper.evict(layers[1])
        bias.sum().backward()
