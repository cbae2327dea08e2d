"""Optimizers that other libraries wrap, and several at once: modules are stepped by each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from offloaded_models import assert_equal, linears, tensors_of
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


GIVEN: dict[str, Callable[[list[optim.Optimizer]], Any]] = {
    "wrapped": lambda optimizers: AcceleratedOptimizer(*optimizers),
    "listed": lambda optimizers: optimizers,
    "combined": lambda optimizers: CombinedOptimizer(*optimizers),
}


def optimizers_of(model: nn.Module, given: str) -> list[optim.Optimizer]:
    if given == "wrapped":
        return [optim.Adam(model.parameters())]
    matrices = [each for each in model.parameters() if each.dim() == 2]
    biases = [each for each in model.parameters() if each.dim() < 2]
    # The biases of two layers are stepped by both.
    return [optim.Muon(matrices), optim.AdamW(biases), optim.SGD(biases[:2], 0.1, 0.9)]


@pytest.mark.parametrize("way", ["use", "auto", "auto, backward steps"])
@pytest.mark.parametrize("given", GIVEN)
def test_wrapped_and_several_optimizers_step_modules(device: str, given: str, way: str) -> None:
    made = linears(4, 16)
    models = made, copy.deepcopy(made).to(device)
    pairs = [optimizers_of(model, given) for model in models]
    whole = [GIVEN[given](optimizers) for optimizers in pairs]
    budget = "64KiB" if way == "use" else "6KiB"
    swapper = Swapper(made, whole[0], device=device, budget=budget)
    if given == "wrapped":
        assert swapper.optimizer is whole[0]
    with swapper.use(*made) if way == "use" else swapper.auto(step="steps" in way):
        for step in range(4):
            for model, optimizer in zip(models, whole, strict=True):
                model(torch.ones(2, 16, device=device)).square().sum().backward()
                if step % 2 and model is made:
                    swapper.step()
                else:
                    for each in optimizer if given == "listed" else [optimizer]:
                        each.step()
                model.zero_grad()
    swapper.evict()
    for optimizer, other in zip(*pairs, strict=True):
        assert_equal(tensors_of(models[0], optimizer), tensors_of(models[1], other))
        kept = [tensor for state in optimizer.state.values() for tensor in state.values()]
        assert {tensor.device.type for tensor in kept} == {"cpu"}
    if given != "wrapped":
        assert [len(optimizer.state) for optimizer in pairs[0]] == [4, 4, 2]


def test_a_closure_is_for_one_optimizer() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizers = [optim.SGD(each.parameters()) for each in layers]
    swapper = Swapper(layers, optimizers, device="cpu")
    assert swapper.optimizer == tuple(optimizers)
    with pytest.raises(TypeError, match="2 optimizers would call it 2 times. Call the"):
        swapper.step(lambda: 1)


@pytest.mark.parametrize(
    ("optimizers", "kind", "message"),
    [
        (lambda o: [o, o], ValueError, "one optimizer occurs twice"),
        (lambda o: [o, AcceleratedOptimizer(o)], ValueError, "one optimizer occurs twice"),
        (lambda o: [o, "adam"], TypeError, "expected a torch.optim.Optimizer, got str"),
        (lambda _: "adam", TypeError, "expected a torch.optim.Optimizer, got str"),
        (
            lambda o: optim.LBFGS(o.param_groups[0]["params"]),
            TypeError,
            "optimizer: LBFGS steps all parameters at once",
        ),
    ],
    ids=["twice", "twice, wrapped", "no optimizer", "a string", "all at once"],
)
def test_wrong_optimizers_are_refused(
    optimizers: Callable[[optim.Optimizer], Any], kind: type[Exception], message: str
) -> None:
    layers = linears(2)
    sgd = optim.SGD(layers.parameters())
    with pytest.raises(kind, match=message):
        Swapper(layers, optimizers(sgd), device="cpu")
    Swapper(layers, sgd, device="cpu").close()  # nothing was taken
