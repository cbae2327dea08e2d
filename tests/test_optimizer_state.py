"""What the probe learns of an optimizer, which ones it refuses, and that it leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from reference import assert_same_bytes
from torch import Tensor, nn, optim
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from speedtorch.optimizer_state import OptimizerProbe, probe_optimizer

Make = Callable[[list[nn.Parameter]], optim.Optimizer]


def probed(make: Make, *shape: int, dtype: torch.dtype = torch.float32) -> OptimizerProbe:
    parameter = nn.Parameter(torch.ones(shape or (2, 5), dtype=dtype))
    return probe_optimizer(make([parameter]), parameter)


# ------------------------------------------------------------------------------------------------
# What it learns
# ------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(
    ("make", "rows", "scalars"), [pytest.param(*each[1:], id=each[0]) for each in LEARNT]
)
def test_the_state_is_that_before_the_first_update(
    make: Make, rows: dict[str, float], scalars: dict[str, float]
) -> None:
    probe = probed(make)
    assert probe.row_state.keys() == rows.keys()
    for name, row in probe.row_state.items():
        assert (row.shape, row.dtype) == ((5,), torch.float32)
        assert_same_bytes(row.initial, torch.full((5,), rows[name]))
    assert {name: float(value) for name, value in probe.scalar_state.items()} == scalars


@pytest.mark.parametrize("shape", [(4,), (3, 1), (3, 2, 5), (3, 0), (2, 19)], ids=str)
def test_rows_may_have_any_shape(shape: tuple[int, ...]) -> None:
    probe = probed(optim.Adam, *shape)
    assert probe.row_state["exp_avg"].shape == shape[1:]
    assert sorted(probe.scalar_state) == ["step"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_the_state_has_the_dtype_that_the_optimizer_gives_it(dtype: torch.dtype) -> None:
    assert probed(optim.Adam, 2, 3, dtype=dtype).row_state["exp_avg"].dtype == dtype


def test_the_probe_runs_where_the_parameter_is(device: str) -> None:
    parameter = nn.Parameter(torch.ones(2, 3, device=device))
    for make in (optim.Adamax, lambda p: optim.Adam(p, fused=True)):
        probe = probe_optimizer(make([parameter]), parameter)
        assert probe.row_state["exp_avg"].initial.device == parameter.device


def test_only_the_parameters_own_group_counts() -> None:
    first, second = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))
    groups = [{"params": [first]}, {"params": [second], "amsgrad": True, "lr": 0.0}]
    optimizer = optim.Adam(groups)
    assert "max_exp_avg_sq" not in probe_optimizer(optimizer, first).row_state
    assert "max_exp_avg_sq" in probe_optimizer(optimizer, second).row_state


# ------------------------------------------------------------------------------------------------
# Optimizers that torch does not have
# ------------------------------------------------------------------------------------------------


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


class Signs(Own):
    """Moves by the sign of a running mean; its state comes through setdefault and starts at 1."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        mean = state.setdefault("mean", torch.ones_like(parameter))
        state.update(count=state.get("count", 0) + 1)
        parameter.sub_(mean.mul_(0.9).add_(gradient, alpha=0.1).sign(), alpha=group["lr"])


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


def test_state_by_setdefault_and_update_is_learnt() -> None:
    probe = probed(Signs)
    assert_same_bytes(probe.row_state["mean"].initial, torch.ones(5))
    assert probe.scalar_state == {"count": 1}  # this class never assigns the 0 before


def test_state_that_is_assigned_as_a_whole_and_has_rows_of_its_own_shape_is_learnt() -> None:
    assert_same_bytes(probed(RowMeans).row_state["norm"].initial, torch.full((1,), 2.0))


def test_state_that_only_the_constructor_makes_is_learnt_with_the_groups_settings() -> None:
    probe = probed(lambda p: MadeAtOnce(p, start=7.0))
    assert_same_bytes(probe.row_state["total"].initial, torch.full((5,), 7.0))


def test_attributes_and_lists_in_groups_of_the_optimizer_stay_as_they_are() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    optimizer = Counting([parameter])
    probe_optimizer(optimizer, parameter)
    assert optimizer.steps == 0
    assert optimizer.param_groups[0]["seen"] == [0]


# ------------------------------------------------------------------------------------------------
# What it refuses, by name
# ------------------------------------------------------------------------------------------------


class TrustRatio(Own):
    """Scales each step by the norm of the whole parameter, as LAMB and LARS do."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        parameter.sub_(gradient * (parameter.norm() / gradient.norm()), alpha=group["lr"])


class Anchored(Own):
    """Remembers where each row started."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "anchor" not in state:
            state["anchor"] = parameter.clone()
        parameter.sub_(gradient, alpha=group["lr"]).lerp_(state["anchor"], 0.01)


class HiddenDict(Own):
    """Fills a dict that its state holds, but not through its state."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if parameter not in self.state:
            hidden = self.state[parameter] = {}
            hidden["mean"] = torch.zeros_like(parameter)
        parameter.sub_(self.state[parameter]["mean"].add_(gradient), alpha=group["lr"])


class OutsideState(Own):
    """Keeps a buffer of the parameter's shape in an attribute of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.buffers: dict[Tensor, Tensor] = {}

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        buffer = self.buffers.setdefault(parameter, torch.zeros_like(parameter))
        parameter.sub_(buffer.add_(gradient), alpha=group["lr"])


class LateState(Own):
    """Makes a buffer in its third step."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        if state["step"] >= 3 and "late" not in state:
            state["late"] = torch.zeros_like(parameter)
        parameter.sub_(gradient, alpha=group["lr"])


class Forgetful(Own):
    """Replaces a row state by its sum after the first step."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "mean" not in state:
            state["mean"] = torch.zeros_like(parameter)
        elif len(state["mean"]) == len(parameter):
            state["mean"] = state["mean"].sum()
        parameter.sub_(gradient, alpha=group["lr"])


class Picky(Own):
    """Takes no gradient at all."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        raise RuntimeError(f"no {gradient.layout} please")


class Noisy(Own):
    """Moves by random numbers."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        parameter.add_(torch.randn_like(parameter), alpha=group["lr"])


class LowRank(Own):
    """Counts in whole numbers how many rows went along with each."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "company" not in state:
            state["company"] = torch.zeros_like(parameter, dtype=torch.int64)
        state["company"] += len(parameter)
        parameter.sub_(gradient, alpha=group["lr"])


NOT_SEPARATE = "does not treat rows separately"
REFUSED = [
    (optim.Muon, rf"Muon cannot be used: it {NOT_SEPARATE} \(its rows differ"),
    (lambda p: optim.Muon(p, lr=0.0), f"Muon cannot be used: it {NOT_SEPARATE}"),
    (optim.Adafactor, f"Adafactor cannot be used: it {NOT_SEPARATE}"),
    (optim.LBFGS, "LBFGS cannot step rows on their own: its step needs a closure"),
    (TrustRatio, f"TrustRatio cannot be used: it {NOT_SEPARATE}"),
    (Noisy, f"Noisy cannot be used: it {NOT_SEPARATE}"),
    (LowRank, rf"LowRank cannot be used: it {NOT_SEPARATE} \(its state 'company'"),
    (Anchored, "Anchored cannot be used: its state 'anchor' starts from the row's own value"),
    (HiddenDict, "HiddenDict cannot be used: it replaces the dict that holds its state"),
    (OutsideState, "OutsideState cannot be used: its step fails when the rows change"),
    (LateState, "LateState cannot be used: it makes its state 'late' in a later step only"),
    (Forgetful, "Forgetful cannot be used: its state 'mean' loses its rows"),
    (Picky, r"Picky cannot be used: .*\(no torch.strided please\).*\(no torch.sparse_coo please\)"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_does_not_treat_rows_separately_is_refused_by_name(make: Make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        probed(make)


def test_rows_that_share_a_step_are_found_out_in_half_precision_too() -> None:
    with pytest.raises(ValueError, match=NOT_SEPARATE):
        probed(TrustRatio, 4, 3, dtype=torch.bfloat16)


def test_a_parameter_that_the_optimizer_does_not_hold_is_refused() -> None:
    optimizer = optim.Adam([nn.Parameter(torch.ones(2, 3))])
    with pytest.raises(ValueError, match=r"Adam does not hold this parameter of shape \[4, 3\]"):
        probe_optimizer(optimizer, nn.Parameter(torch.ones(4, 3)))


def test_a_parameter_without_dimensions_is_refused() -> None:
    parameter = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="a parameter without dimensions has no rows"):
        probe_optimizer(optim.Adam([parameter]), parameter)


# ------------------------------------------------------------------------------------------------
# That it leaves no trace
# ------------------------------------------------------------------------------------------------


def assert_same_content(actual: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert_same_bytes(actual, expected)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert_same_content(actual[name], value)
    elif isinstance(expected, list | tuple):
        for one, other in zip(actual, expected, strict=True):
            assert_same_content(one, other)
    else:
        assert actual == expected


@pytest.mark.parametrize("make", [each[1] for each in LEARNT], ids=[each[0] for each in LEARNT])
def test_optimizer_and_parameters_are_as_they_were(make: Make) -> None:
    parameter, other = (nn.Parameter(torch.randn(4, 3)) for _ in range(2))
    optimizer = make([parameter, other])
    parameter.grad, other.grad = (torch.randn(4, 3) for _ in range(2))
    if isinstance(optimizer, optim.SparseAdam):
        parameter.grad, other.grad = parameter.grad.to_sparse(1), other.grad.to_sparse(1)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    values = [each.detach().clone() for each in (parameter, other)]
    gradients = (parameter.grad, other.grad)
    attributes = set(vars(optimizer))
    probe_optimizer(optimizer, parameter)
    assert_same_content(optimizer.state_dict(), before)
    assert_same_content([parameter.detach(), other.detach()], values)
    assert parameter.grad is gradients[0]
    assert other.grad is gradients[1]
    assert set(vars(optimizer)) == attributes
    assert set(optimizer.state) <= {parameter, other}


def test_random_generators_are_as_they_were(device: str) -> None:
    parameter = nn.Parameter(torch.ones(2, 3, device=device))
    torch.manual_seed(5)
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if device == "cuda" else [])
    with pytest.raises(ValueError, match="Noisy"):
        probe_optimizer(Noisy([parameter]), parameter)
    after = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if device == "cuda" else [])
    assert_same_content(after, states)


def test_the_global_seed_does_not_matter() -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        assert sorted(probed(optim.Rprop).row_state) == ["prev", "step_size"]


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """Names of the global hooks that were called."""
    called: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: called.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: called.append("global post")),
    ]
    yield called
    for handle in handles:
        handle.remove()


def test_no_hook_is_called(calls: list[str]) -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    optimizer = optim.Adam([parameter])
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    probe_optimizer(optimizer, parameter)
    assert calls == []
    parameter.grad = torch.ones(2, 3)
    optimizer.step()
    assert sorted(calls) == ["global post", "global pre", "post", "pre"]


def test_a_scheduler_that_patched_the_step_is_left_alone() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    optimizer = optim.Adam([parameter], lr=0.1)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step == 0 else 1.0)
    before = copy.deepcopy(scheduler.state_dict())
    patched = optimizer.step
    assert sorted(probe_optimizer(optimizer, parameter).row_state) == ["exp_avg", "exp_avg_sq"]
    assert optimizer.step == patched
    assert scheduler.state_dict() == before
    assert not getattr(optimizer, "_opt_called", False)
    assert_same_bytes(parameter.detach(), torch.ones(2, 3))


def test_the_optimizer_steps_the_same_after_a_probe() -> None:
    results = []
    for with_probe in (False, True):
        parameter = nn.Parameter(torch.linspace(-1, 1, 6).reshape(2, 3))
        optimizer = optim.NAdam([parameter], lr=0.1)
        for step in range(5):
            if with_probe:
                probe_optimizer(optimizer, parameter)
            parameter.grad = torch.full((2, 3), float(step - 2))
            optimizer.step()
        results.append(parameter.detach())
    assert_same_bytes(results[1], results[0])
