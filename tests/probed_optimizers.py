"""Optimizers to probe in tests: torch's with their first state, and a base for own ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from optimizer_cases import CASES, MOMENTS, Case, settings_of
from torch import Tensor, nn, optim

from speedtorch.optim.probe import OptimizerProbe, probe_optimizer

Make = Callable[[list[nn.Parameter]], optim.Optimizer]


def probed(make: Make, *shape: int, dtype: torch.dtype = torch.float32) -> OptimizerProbe:
    parameter = nn.Parameter(torch.ones(shape or (2, 5), dtype=dtype))
    return probe_optimizer(make([parameter]), parameter)


MORE = {
    "SGD-maximize": Case(
        optim.SGD,
        {"momentum_buffer": 0.0},
        {},
        {"momentum": 0.9, "weight_decay": 0.1, "maximize": True},
        ("single",),
    ),
    "Adam-tensor-lr": Case(
        optim.Adam, MOMENTS, settings={"lr": torch.tensor(0.1)}, variants=("single",)
    ),
}
LEARNT: list[tuple[str, Make, Mapping[str, float], dict[str, float], bool]] = [
    (
        f"{name}-{variant}",
        partial(case.make, **settings_of(case, variant)),
        case.rows,
        {scalar: float(first()) for scalar, first in case.scalars.items()},
        case.by_rows,
    )
    for name, case in {**CASES, **MORE}.items()
    for variant in case.variants
]
"""A name, what makes the optimizer, the state before its first update, of rows and beside, and
whether each field has one number a row."""


class Own(optim.Optimizer):
    """A base for optimizers written for these tests; each says how it moves one parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, group)

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class Noisy(Own):
    """Moves by random numbers."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        parameter.add_(torch.randn_like(parameter), alpha=group["lr"])
