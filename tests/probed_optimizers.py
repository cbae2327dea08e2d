"""Optimizers to probe in tests: torch's with their first state, and a base for own ones."""

from __future__ import annotations

import copy
from collections import defaultdict
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


class Boxed(optim.Adam):
    """Boxes the moments when it saves, and loads without torch's hooks, as bitsandbytes does."""

    boxed = ("exp_avg", "exp_avg_sq")

    def state_dict(self) -> dict[str, Any]:
        state_dict = super().state_dict()
        state_dict["state"] = {number: dict(value) for number, value in state_dict["state"].items()}
        for value in state_dict["state"].values():
            value["box"] = {name: value.pop(name) for name in self.boxed}
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = copy.deepcopy(state_dict)
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        state: dict[Any, Any] = defaultdict(dict)
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in state_dict["state"]:
                entries = state_dict["state"][number]
                state[parameter] = entries.pop("box") | entries
        groups = [
            {**new, "params": group["params"]}
            for group, new in zip(self.param_groups, state_dict["param_groups"], strict=True)
        ]
        self.__setstate__({"state": state, "param_groups": groups})
