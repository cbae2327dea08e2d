"""A layer with all kinds of tensors that a module can have, for tests of offloaded modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from speedtorch.layers import OffloadedModule

COMMON_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adam-foreach": partial(optim.Adam, foreach=True),
    "Adagrad": partial(optim.Adagrad, lr=0.1),
    "RMSprop": partial(optim.RMSprop, momentum=0.5, centered=True),
    "Adadelta": optim.Adadelta,
    "Adamax": optim.Adamax,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "ASGD": optim.ASGD,
    "Rprop": optim.Rprop,
}
"""Those of every test of modules, by name."""


class Layer(nn.Module):
    """A tied weight, a batch norm, a frozen part and one of 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 4)
        self.back = nn.Linear(4, 4)
        self.back.weight = self.into.weight
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.narrow = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.back(torch.tanh(self.into(x)) * self.scale))
        y: Tensor = self.narrow(self.frozen(x).bfloat16())
        return y.float()


def with_steps(module: nn.Module, *optimizers: Optimizer, **options: Any) -> OffloadedModule:
    """An offloaded module that is told of its optimizers' steps."""
    offloaded = OffloadedModule(module, *optimizers, **options)
    for optimizer in optimizers:
        optimizer.register_step_post_hook(offloaded.changes.note_step)
    return offloaded


def tensors_of(layer: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """All that a step reads and writes."""
    found: dict[str, Tensor] = dict(layer.named_parameters(remove_duplicate=False))
    found |= layer.named_buffers()
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{key} of {name}"] = value
    return found


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.detach().cpu().clone() for name, each in tensors.items()}


def assert_equal(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, each in tensors.items():
        assert torch.equal(each.cpu(), expected[name].cpu()), name
