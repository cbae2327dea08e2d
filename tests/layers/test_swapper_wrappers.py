"""Optimizers that other libraries wrap, and several at once: modules are stepped by each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from offloaded_models import assert_equal, tensors_of
from torch import nn, optim

from speedtorch.layers import Swapper


class AcceleratedOptimizer(optim.Optimizer):
    """As accelerate's: of torch's kind, without its constructor, and everything is passed on."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


class CombinedOptimizer:
    """As torchrec's: steps several."""

    def __init__(self, *optimizers: optim.Optimizer) -> None:
        self.optimizers = [(str(number), each) for number, each in enumerate(optimizers)]

    def step(self) -> None:
        for _, each in self.optimizers:
            each.step()


@pytest.mark.parametrize("way", ["use", "auto", "auto, backward steps"])
def test_a_wrapped_optimizer_steps_modules(device: str, way: str) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    made = copy.deepcopy(whole)
    whole.to(device)
    within = [optim.Adam(each.parameters()) for each in (made, whole)]
    optimizers = [AcceleratedOptimizer(each) for each in within]
    swapper = Swapper(made, optimizers[0], device=device)
    assert swapper.optimizer is optimizers[0]
    on = swapper.use(made) if way == "use" else swapper.auto(step="steps" in way)
    with on:
        for step in range(3):
            for model, optimizer in zip((made, whole), optimizers, strict=True):
                model(torch.ones(2, 8, device=device)).sum().backward()
                if step % 2 and model is made:
                    swapper.step()
                else:
                    optimizer.step()
                optimizer.zero_grad()
    swapper.evict()
    assert_equal(tensors_of(made, within[0]), tensors_of(whole, within[1]))


HOW: dict[str, Callable[[list[optim.Optimizer]], Any]] = {
    "listed": lambda optimizers: optimizers,
    "combined": lambda optimizers: CombinedOptimizer(*optimizers),
}


@pytest.mark.parametrize("way", ["use", "auto", "auto, backward steps"])
@pytest.mark.parametrize("how", HOW)
def test_several_optimizers_step_modules(device: str, how: str, way: str) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    made = copy.deepcopy(whole)
    whole.to(device)
    pairs: list[list[optim.Optimizer]] = []
    for model in (made, whole):
        matrices = [each for each in model.parameters() if each.dim() == 2]
        biases = [each for each in model.parameters() if each.dim() < 2]
        # The biases of two layers are stepped by both.
        both = [optim.Muon(matrices), optim.AdamW(biases), optim.SGD(biases[:2], 0.1, 0.9)]
        pairs.append(both)
    budget = "64KiB" if way == "use" else "6KiB"
    swapper = Swapper(made, HOW[how](pairs[0]), device=device, budget=budget)
    on = swapper.use(made) if way == "use" else swapper.auto(step="steps" in way)
    with on:
        for step in range(4):
            for model, optimizers in zip((made, whole), pairs, strict=True):
                model(torch.ones(2, 16, device=device)).square().sum().backward()
                if step % 2 and model is made:
                    swapper.step()
                else:
                    for each in optimizers:
                        each.step()
                model.zero_grad()
    swapper.evict()
    for number in range(3):
        mine, other = pairs[0][number], pairs[1][number]
        assert len(mine.state) == [4, 4, 2][number]
        assert_equal(tensors_of(made, mine), tensors_of(whole, other))
        assert {each.device.type for of_one in mine.state.values() for each in of_one.values()} == {
            "cpu"
        }


def test_a_closure_is_for_one_optimizer() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizers = [optim.SGD(each.parameters()) for each in layers]
    swapper = Swapper(layers, optimizers, device="cpu")
    assert swapper.optimizer == tuple(optimizers)
    with pytest.raises(TypeError, match="2 optimizers would call it 2 times. Call the"):
        swapper.step(lambda: 1)


def test_an_optimizer_that_steps_all_parameters_at_once_is_refused() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(TypeError, match="optimizer: LBFGS steps all parameters at once"):
        Swapper(layers, optim.LBFGS(layers.parameters()), device="cpu")
    Swapper(layers, optim.SGD(layers.parameters()), device="cpu").close()  # nothing was taken


@pytest.mark.parametrize(
    ("optimizers", "kind", "message"),
    [
        (lambda o: [o, o], ValueError, "one optimizer occurs twice"),
        (lambda o: [o, AcceleratedOptimizer(o)], ValueError, "one optimizer occurs twice"),
        (lambda o: [o, "adam"], TypeError, "expected a torch.optim.Optimizer, got str"),
        (lambda _: "adam", TypeError, "expected a torch.optim.Optimizer, got str"),
    ],
    ids=["twice", "twice, wrapped", "no optimizer", "a string"],
)
def test_what_is_no_list_of_optimizers_is_refused(
    optimizers: Callable[[optim.Optimizer], Any], kind: type[Exception], message: str
) -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(kind, match=message):
        Swapper(layers, optimizers(optim.SGD(layers.parameters())), device="cpu")
    Swapper(layers, device="cpu").close()  # nothing has been left
