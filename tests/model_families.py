"""Every family of ModelFactory, for the tests that hold for all of them."""

from __future__ import annotations

from typing import Any

import torch
from reference import random_rows
from torch import Tensor, nn

from speedtorch import (
    CPUPytorchModelFactory,
    GPUPytorchModelFactory,
    ModelFactory,
    ModelFactoryMM,
    PytorchModelFactory,
)

ROWS, WIDTH = 12, 5
FAMILIES: dict[str, Any] = {
    "ModelFactory": ModelFactory,
    "ModelFactory-pinned": lambda *a, **k: ModelFactory(*a, CPUPinn=True, **k),
    "GPUPytorch": GPUPytorchModelFactory,
    "CPUPytorch": CPUPytorchModelFactory,
    "Pytorch-device": PytorchModelFactory,
    "Pytorch-pinned": lambda *a, **k: PytorchModelFactory(*a, deviceType="cpu", pinType=True, **k),
    "Pytorch-pageable": lambda *a, **k: PytorchModelFactory(*a, deviceType="cpu", **k),
    "MM": ModelFactoryMM,
}


def layer(device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Embedding:
    return nn.Embedding(3, WIDTH, device=device, dtype=dtype)


def filled(switcher: Any) -> Tensor:
    """Gives a switcher known rows and returns a copy of them."""
    switcher.zerosInit()
    values = random_rows(ROWS, (WIDTH,), switcher.table["weight"].dtype)
    switcher.table["weight"].copy_(values)
    return values


def started(
    make: Any = ModelFactory, device: str = "cpu", **given: Any
) -> tuple[nn.Embedding, Any, Tensor]:
    """A layer, its switcher, and the switcher's rows."""
    embedding = layer(device)
    switcher = make(embedding, ROWS, WIDTH, **given)
    return embedding, switcher, filled(switcher)


def table_rows(switcher: Any) -> Tensor:
    switcher.table.settle()
    return switcher.table["weight"].detach().cpu()
