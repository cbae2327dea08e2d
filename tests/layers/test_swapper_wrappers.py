"""Optimizers that other libraries wrap: units are stepped by the one within."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim
from unit_models import assert_equal, tensors_of

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


@pytest.mark.parametrize("way", ["use", "auto", "auto, backward steps"])
def test_a_wrapped_optimizer_steps_units(device: str, way: str) -> None:
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


def test_a_wrapper_of_several_optimizers_is_refused_by_name() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    several: Any = CombinedOptimizer(*(optim.SGD(each.parameters()) for each in layers))
    with pytest.raises(TypeError, match="CombinedOptimizer steps 2 optimizers: give the one"):
        Swapper(layers, several, device="cpu")
