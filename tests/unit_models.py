"""A layer of all that a unit can have, and all tensors of it, for the tests of units."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


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


def assert_equal(tensors: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert tensors.keys() == others.keys()
    for name, each in tensors.items():
        assert torch.equal(each.cpu(), others[name].cpu()), name
