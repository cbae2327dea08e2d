"""Optimizers to probe in tests: torch's with their first state, and a base for own ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim

from speedtorch.optim.probe import OptimizerProbe, probe_optimizer

Make = Callable[[list[nn.Parameter]], optim.Optimizer]


def probed(make: Make, *shape: int, dtype: torch.dtype = torch.float32) -> OptimizerProbe:
    parameter = nn.Parameter(torch.ones(shape or (2, 5), dtype=dtype))
    return probe_optimizer(make([parameter]), parameter)


MOMENTS = {"exp_avg": 0.0, "exp_avg_sq": 0.0}
LEARNT: list[tuple[str, Make, dict[str, float], dict[str, float]]] = [
    ("SGD", lambda p: optim.SGD(p, lr=0.1), {}, {}),
    ("SGD-momentum", lambda p: optim.SGD(p, lr=0.1, momentum=0.9), {"momentum_buffer": 0.0}, {}),
    (
        "SGD-momentum-decay-maximize",
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, maximize=True),
        {"momentum_buffer": 0.0},
        {},
    ),
    (
        "SGD-nesterov-foreach",
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
        {"momentum_buffer": 0.0},
        {},
    ),
    (
        "SGD-momentum-fused",
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        {"momentum_buffer": 0.0},
        {},
    ),
    ("SparseAdam", optim.SparseAdam, MOMENTS, {"step": 0}),
    ("Adam", optim.Adam, MOMENTS, {"step": 0}),
    ("Adam-foreach", lambda p: optim.Adam(p, foreach=True), MOMENTS, {"step": 0}),
    ("Adam-fused", lambda p: optim.Adam(p, fused=True), MOMENTS, {"step": 0}),
    ("Adam-tensor-lr", lambda p: optim.Adam(p, lr=torch.tensor(0.1)), MOMENTS, {"step": 0}),
    (
        "Adam-amsgrad",
        lambda p: optim.Adam(p, amsgrad=True),
        MOMENTS | {"max_exp_avg_sq": 0.0},
        {"step": 0},
    ),
    ("AdamW", optim.AdamW, MOMENTS, {"step": 0}),
    ("Adamax", optim.Adamax, {"exp_avg": 0.0, "exp_inf": 0.0}, {"step": 0}),
    ("Adadelta", optim.Adadelta, {"square_avg": 0.0, "acc_delta": 0.0}, {"step": 0}),
    (
        "Adagrad",
        lambda p: optim.Adagrad(p, initial_accumulator_value=0.5),
        {"sum": 0.5},
        {"step": 0},
    ),
    ("RMSprop", optim.RMSprop, {"square_avg": 0.0}, {"step": 0}),
    (
        "RMSprop-centered-momentum",
        lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
        {"square_avg": 0.0, "momentum_buffer": 0.0, "grad_avg": 0.0},
        {"step": 0},
    ),
    ("Rprop", lambda p: optim.Rprop(p, lr=0.25), {"prev": 0.0, "step_size": 0.25}, {"step": 0}),
    ("ASGD", lambda p: optim.ASGD(p, lr=0.5), {"ax": 0.0}, {"step": 0, "eta": 0.5, "mu": 1}),
    ("NAdam", optim.NAdam, MOMENTS, {"step": 0, "mu_product": 1}),
    ("RAdam", optim.RAdam, MOMENTS, {"step": 0}),
]


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
