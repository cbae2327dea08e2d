"""Every family of OptimizerFactory, and a model, for the tests that hold for all of them."""

from __future__ import annotations

from typing import Any

import torch
from reference import random_rows
from torch import Tensor, nn, optim

from speedtorch import (
    CPUPytorchOptimizerFactory,
    GPUPytorchOptimizerFactory,
    OptimizerFactory,
    OptimizerFactoryMM,
    PytorchOptimizerFactory,
)

ROWS, WIDTH = 12, 5


class Model(nn.Module):
    """Two embeddings, one of them within another module, and a variable without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(3, WIDTH)
        self.inner = nn.ModuleDict({"books": nn.Embedding(3, WIDTH)})
        self.bias = nn.Parameter(torch.zeros(3, WIDTH))


def build(make: Any = optim.Adamax, device: str = "cpu") -> tuple[Model, Any]:
    model = Model().to(device)
    return model, make(model.parameters())


def started(
    family: Any = OptimizerFactory, make: Any = optim.Adamax, device: str = "cpu", **given: Any
) -> tuple[Model, Any, Any]:
    """A model, its optimizer, and the switcher of its users after optInit."""
    model, optimizer = build(make, device)
    switcher = family(optimizer, ROWS, WIDTH, model, "users", **given)
    switcher.optInit()
    return model, optimizer, switcher


FAMILIES: dict[str, Any] = {
    "OptimizerFactory": OptimizerFactory,
    "OptimizerFactory-pinned": lambda *a, **k: OptimizerFactory(*a, CPUPinn=True, **k),
    "GPUPytorch": GPUPytorchOptimizerFactory,
    "CPUPytorch": CPUPytorchOptimizerFactory,
    "Pytorch": PytorchOptimizerFactory,
    "Pytorch-pageable": lambda *a, **k: PytorchOptimizerFactory(*a, deviceType="cpu", **k),
    "MM": OptimizerFactoryMM,
}


def filled(switcher: Any) -> dict[str, Tensor]:
    """Gives a started switcher known state and returns a copy of it."""
    rows = {name: random_rows(ROWS, (WIDTH,), seed=len(name)) for name in switcher.table.fields}
    for name, values in rows.items():
        switcher.table[name].copy_(values)
    return rows


def state_rows(switcher: Any) -> dict[str, Tensor]:
    switcher.table.settle()
    return {name: switcher.table[name].detach().cpu() for name in switcher.table.fields}


def train_on(batch: list[int], model: Model, optimizer: Any, switcher: Any) -> None:
    """A step with gradients of ones for the state of a batch."""
    switcher.beforeForwardPass(batch)
    model.users.weight.data = torch.zeros(len(batch), WIDTH)
    gradient = torch.ones(len(batch), WIDTH)
    sparse = isinstance(optimizer, optim.SparseAdam)
    model.users.weight.grad = gradient.to_sparse(1) if sparse else gradient
    optimizer.step()
    switcher.afterOptimizerStep(batch)
