"""auto(step=True) and gradients that are changed between the backward and optimizer.step()."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from offloaded_models import assert_equal, copies, linears
from torch import nn, optim

from speedtorch.layers import Swapper


def divide(parameters: list[nn.Parameter]) -> None:
    for each in parameters:
        if each.grad is not None:
            each.grad = each.grad / 2


CHANGES: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0),
    "norm, one by one": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1, foreach=False),
    "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.1),
    "replaced": divide,
}


def made() -> tuple[nn.Sequential, optim.Optimizer, Swapper]:
    model = linears(4)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, Swapper(model[:3], optimizer, device="cpu")


@pytest.mark.parametrize("change", CHANGES)
def test_clipping_of_stepped_modules_is_refused_by_name(change: str) -> None:
    model, optimizer, swapper = made()
    with swapper.auto(step=True):
        model(torch.ones(2, 4)).sum().backward()
        CHANGES[change](list(model.parameters()))
        before = copies(dict(model.named_parameters()))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="was changed between backward"):
                optimizer.step()
        assert_equal(dict(model.named_parameters()), before)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    model(torch.ones(2, 4)).sum().backward()
    CHANGES[change](list(model.parameters()))
    optimizer.step()


@pytest.mark.parametrize("to_none", [False, True])
def test_gradients_that_add_up_or_become_zero_are_no_clipping(to_none: bool) -> None:
    model, optimizer, swapper = made()
    with swapper.auto(step=True):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        optimizer.step()


def test_hooks_clip_the_gradients_of_modules_that_are_stepped_in_backward() -> None:
    found = []
    for steps in (False, True):
        model, optimizer, swapper = made()
        for each in model.parameters():
            each.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        with swapper.auto(step=steps):
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(copies(dict(model.named_parameters())))
    assert_equal(*found)


def test_clipping_in_another_module_s_swapper_is_none() -> None:
    """Modules of a second Swapper move, which counts as no change of their gradients."""
    layers = linears(4)
    optimizer = optim.SGD(layers.parameters(), lr=0.1)
    first, second = (Swapper(some, optimizer, device="cpu") for some in (layers[:2], layers[2:]))
    with first.auto(step=True), second.auto():
        layers(torch.ones(2, 4)).sum().backward()
        second.evict()
        optimizer.step()
