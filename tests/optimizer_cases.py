"""Every optimizer of torch that treats rows separately, and ours, for tests of exact training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from speedtorch.optim import RowWiseAdagrad


def zero() -> Tensor:
    return torch.tensor(0.0)


@dataclass(frozen=True)
class Case:
    """An optimizer, and the first values of its state: of `rows`, and `scalars` beside them."""

    make: Callable[..., optim.Optimizer]
    rows: Mapping[str, float] = field(default_factory=dict)
    scalars: Mapping[str, Callable[[], Any]] = field(default_factory=lambda: {"step": zero})
    settings: Mapping[str, Any] = field(default_factory=dict)  # arguments of the optimizer
    variants: tuple[str, ...] = ("foreach", "single")  # implementations; see settings_of
    by_rows: bool = False  # each state field has one number a row, [rows, 1]

    def first_fields(self, weight: Tensor) -> dict[str, Tensor]:
        """The state of all rows of a weight before its first update."""
        shape = (len(weight), 1) if self.by_rows else weight.shape
        return {name: weight.new_full(shape, value) for name, value in self.rows.items()}


MOMENTS = {"exp_avg": 0.0, "exp_avg_sq": 0.0}
CASES = {
    "SGD": Case(optim.SGD, scalars={}, variants=("foreach", "single", "fused")),
    "SGD-momentum": Case(
        optim.SGD,
        {"momentum_buffer": 0.0},
        {},
        {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
        ("foreach", "single", "fused"),
    ),
    "SGD-nesterov": Case(
        optim.SGD,
        {"momentum_buffer": 0.0},
        {},
        {"momentum": 0.9, "nesterov": True},
        ("foreach", "single", "fused"),
    ),
    "SGD-dampening": Case(
        optim.SGD, {"momentum_buffer": 0.0}, {}, {"momentum": 0.9, "dampening": 0.3}
    ),
    "SparseAdam": Case(optim.SparseAdam, MOMENTS, {"step": int}, variants=("single",)),
    "Adam": Case(optim.Adam, MOMENTS, variants=("foreach", "single", "fused")),
    "Adam-amsgrad": Case(optim.Adam, MOMENTS | {"max_exp_avg_sq": 0.0}, settings={"amsgrad": True}),
    "AdamW": Case(optim.AdamW, MOMENTS, variants=("foreach", "single", "fused")),
    "Adamax": Case(optim.Adamax, {"exp_avg": 0.0, "exp_inf": 0.0}),
    "Adadelta": Case(optim.Adadelta, {"square_avg": 0.0, "acc_delta": 0.0}),
    "Adagrad": Case(
        optim.Adagrad,
        {"sum": 0.25},
        settings={"initial_accumulator_value": 0.25, "lr_decay": 0.01},
        variants=("foreach", "single", "fused"),
    ),
    "RowWiseAdagrad": Case(
        RowWiseAdagrad,
        {"sum": 0.25},
        settings={"initial_accumulator_value": 0.25, "lr_decay": 0.01, "weight_decay": 0.1},
        by_rows=True,
    ),
    "RMSprop": Case(optim.RMSprop, {"square_avg": 0.0}),
    "RMSprop-centered-momentum": Case(
        optim.RMSprop,
        {"square_avg": 0.0, "momentum_buffer": 0.0, "grad_avg": 0.0},
        settings={"momentum": 0.9, "centered": True},
    ),
    "Rprop": Case(optim.Rprop, {"prev": 0.0, "step_size": 0.05}),
    "ASGD": Case(
        optim.ASGD,
        {"ax": 0.0},
        {"step": zero, "eta": lambda: torch.tensor(0.05), "mu": lambda: torch.tensor(1.0)},
        {"t0": 10.0},
    ),
    "NAdam": Case(optim.NAdam, MOMENTS, {"step": zero, "mu_product": lambda: torch.tensor(1.0)}),
    "RAdam": Case(optim.RAdam, MOMENTS),
}
VARIANTS = [
    pytest.param(case, variant, id=f"{name}-{variant}")
    for name, case in CASES.items()
    for variant in case.variants
]


# torch has no fused Adagrad for CUDA.
GPU_VARIANTS = [param for param in VARIANTS if param.id != "Adagrad-fused"]


def settings_of(case: Case, variant: str) -> dict[str, Any]:
    """Arguments of the optimizer in one of torch's implementations."""
    choice = {"foreach": {"foreach": True}, "fused": {"fused": True}, "single": {"foreach": False}}
    chosen = {} if case.make is optim.SparseAdam else choice[variant]
    return {"lr": 0.05, **case.settings, **chosen}


def make_optimizer(
    case: Case, variant: str, rows: nn.Parameter, others: list[nn.Parameter]
) -> optim.Optimizer:
    """The optimizer of the rows, and in a group of their own of other parameters."""
    groups = [{"params": [rows]}, *([{"params": others}] if others else [])]
    return case.make(groups, **settings_of(case, variant))


def first_scalars(case: Case, variant: str, device: str) -> dict[str, Any]:
    """The state that does not go by rows, before the first update."""
    on_device = device if variant == "fused" or case.make is optim.ASGD else "cpu"
    made = {name: make() for name, make in case.scalars.items()}
    return {n: v.to(on_device) if isinstance(v, Tensor) else v for n, v in made.items()}
