"""The probe leaves no trace: optimizer, parameters, hooks and generators are as they were."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from probed_optimizers import LEARNT, Make, Noisy, Own, probed
from reference import assert_same_bytes, assert_same_content
from torch import Tensor, nn, optim
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import speedtorch
from speedtorch.optim.probe import probe_optimizer


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


class Companion(Own):
    """Holds a model, a table and a tensor of all rows, and knows the model's weight from others."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters())
        self.models, self.report = [model], model.forward
        self.table = speedtorch.HostTable(10, 3)
        self.history = torch.zeros(1 << 17)

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        scale = 1.0 if parameter is self.models[0].inner.weight else 5.0
        parameter.sub_(gradient, alpha=scale * group["lr"])


class Uncopied(nn.Module):
    """An embedding in a model, neither of which lets itself be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = speedtorch.Embedding(4, 3)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        raise AssertionError("copied")


def test_models_tables_and_large_tensors_of_an_optimizer_are_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Uncopied()
    optimizer = Companion(model)

    def no(*_: Any) -> None:
        raise AssertionError("copied")

    monkeypatch.setattr(speedtorch.Embedding, "__deepcopy__", no)
    monkeypatch.setattr(speedtorch.HostTable, "__deepcopy__", no, raising=False)
    clone = Tensor.clone

    def small_clone(self: Tensor, **more: Any) -> Tensor:
        assert self.numel() < 1 << 17
        return clone(self, **more)

    monkeypatch.setattr(Tensor, "clone", small_clone)
    assert probe_optimizer(optimizer, model.inner.weight).row_state == {}


def test_an_optimizer_that_runs_its_model_is_refused_by_name() -> None:
    class RunsModel(Companion):
        def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
            self.models[0].zero_grad()

    model = nn.Sequential(nn.Linear(2, 2))
    model.inner = nn.Linear(2, 3)
    with pytest.raises(ValueError, match="uses 'zero_grad' of a Sequential"):
        probe_optimizer(RunsModel(model), model.inner.weight)


def test_what_a_grad_scaler_lends_is_not_taken_for_the_optimizers() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    for make in (optim.SGD, optim.Adam, optim.Adagrad):
        optimizer = make([parameter], fused=True)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(1.0)
        probe_optimizer(optimizer, parameter)
        assert float(optimizer.grad_scale) == 4.0
