"""What the probe learns of an optimizer's state, and where that state starts."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from probed_optimizers import LEARNT, Make, Own, probed
from reference import assert_same_bytes
from torch import Tensor, nn, optim

from speedtorch.layers.split_steps import check_steps_apart
from speedtorch.optim.probe import probe_optimizer


@pytest.mark.parametrize(
    ("make", "rows", "scalars", "by_rows"), [pytest.param(*each[1:], id=each[0]) for each in LEARNT]
)
def test_the_state_is_that_before_the_first_update(
    make: Make, rows: Mapping[str, float], scalars: dict[str, float], by_rows: bool
) -> None:
    probe, shape = probed(make), (1 if by_rows else 5,)
    assert probe.row_state.keys() == rows.keys()
    for name, row in probe.row_state.items():
        assert (row.shape, row.dtype) == (shape, torch.float32)
        assert_same_bytes(row, torch.full(shape, rows[name]))
    assert {name: float(value) for name, value in probe.scalar_state.items()} == scalars


@pytest.mark.parametrize("shape", [(4,), (3, 1), (3, 2, 5), (3, 0), (2, 19)], ids=str)
def test_rows_may_have_any_shape(shape: tuple[int, ...]) -> None:
    probe = probed(optim.Adam, *shape)
    assert probe.row_state["exp_avg"].shape == shape[1:]
    assert sorted(probe.scalar_state) == ["step"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_the_state_has_the_dtype_of_the_optimizer(dtype: torch.dtype) -> None:
    assert probed(optim.Adam, 2, 3, dtype=dtype).row_state["exp_avg"].dtype == dtype


@pytest.mark.parametrize(
    "probe",
    [
        lambda optimizer, parameter: probe_optimizer(optimizer, parameter),
        lambda optimizer, parameter: check_steps_apart(optimizer, parameter.device),
    ],
    ids=["rows", "parameters"],
)
def test_a_failed_trial_step_keeps_nothing_of_its_callers(probe: Callable[..., Any]) -> None:
    def caller() -> weakref.ref[Tensor]:
        local = nn.Parameter(torch.ones(2, 3))
        probe(optim.SparseAdam([local]), local)  # the trial with dense gradients fails
        return weakref.ref(local)

    caller()
    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()


def test_the_probe_runs_where_the_parameter_is(device: str) -> None:
    parameter = nn.Parameter(torch.ones(2, 3, device=device))
    for make in (optim.Adamax, lambda p: optim.Adam(p, fused=True)):
        probe = probe_optimizer(make([parameter]), parameter)
        assert probe.row_state["exp_avg"].device == parameter.device


def test_only_the_parameters_own_group_counts() -> None:
    first, second = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))
    groups = [{"params": [first]}, {"params": [second], "amsgrad": True, "lr": 0.0}]
    optimizer = optim.Adam(groups)
    assert "max_exp_avg_sq" not in probe_optimizer(optimizer, first).row_state
    assert "max_exp_avg_sq" in probe_optimizer(optimizer, second).row_state


class Signs(Own):
    """Moves by the sign of a running mean; its state comes through setdefault and starts at 1."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        mean = state.setdefault("mean", torch.ones_like(parameter))
        state.update(count=state.get("count", 0) + 1)
        parameter.sub_(mean.mul_(0.9).add_(gradient, alpha=0.1).sign(), alpha=group["lr"])


class Merged(Own):
    """Merges a dict into its state."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if not self.state[parameter]:
            self.state[parameter] |= {"mean": torch.ones_like(parameter)}
        mean = self.state[parameter]["mean"]
        parameter.sub_(mean.mul_(0.9).add_(gradient, alpha=0.1), alpha=group["lr"])


class RowMeans(Own):
    """Keeps one number per row, and assigns its state as a whole."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if parameter not in self.state:
            self.state[parameter] = {"norm": gradient.new_full((len(gradient), 1), 2.0)}
        norm = self.state[parameter]["norm"]
        norm.add_(gradient.square().mean(1, keepdim=True))
        parameter.sub_(gradient / norm.sqrt(), alpha=group["lr"])


class MadeAtOnce(Own):
    """Makes its state when it is constructed and nowhere else."""

    def __init__(self, params: Any, lr: float = 0.1, start: float = 3.0) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["start"] = start
            for parameter in group["params"]:
                self.state[parameter]["total"] = torch.full_like(parameter, start)

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        total = self.state[parameter]["total"].add_(gradient.abs())
        parameter.sub_(gradient / total, alpha=group["lr"])


class Counting(Own):
    """Counts steps in an attribute and in its group, as some optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.steps = 0
        self.param_groups[0]["seen"] = [0]

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        self.steps += 1
        group["seen"][0] += 1
        parameter.sub_(gradient, alpha=group["lr"] / self.steps)


@pytest.mark.parametrize(
    ("make", "name", "first"),
    [
        (Signs, "mean", torch.ones(5)),
        (Merged, "mean", torch.ones(5)),
        (RowMeans, "norm", torch.full((1,), 2.0)),
        (lambda p: MadeAtOnce(p, start=7.0), "total", torch.full((5,), 7.0)),
    ],
    ids=["setdefault", "merged", "assigned", "constructor"],
)
def test_state_is_learnt_however_it_is_made(make: Make, name: str, first: Tensor) -> None:
    probe = probed(make)
    assert_same_bytes(probe.row_state[name], first)
    assert probe.scalar_state == ({"count": 0} if make is Signs else {})  # got, and never assigned


def test_attributes_and_lists_in_groups_of_the_optimizer_do_not_change() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    optimizer = Counting([parameter])
    probe_optimizer(optimizer, parameter)
    assert optimizer.steps == 0
    assert optimizer.param_groups[0]["seen"] == [0]


def test_a_default_device_does_not_matter() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    optimizer = optim.Adam([parameter])
    with torch.device("meta"):
        assert sorted(probe_optimizer(optimizer, parameter).row_state) == ["exp_avg", "exp_avg_sq"]
