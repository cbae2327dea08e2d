"""Optimizer state that StateSwapper stores in 16 bits between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import EVERY, every_interrupt, out_of_memory
from offloaded_models import COMMON_OPTIMIZERS, assert_equal, reloaded
from test_state_swapper import Training
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.layers import StateSwapper, state_swapper


class Stored(Training):
    """Layers whose state is stored in 16 bits if there is a budget, or else rounded by the test."""

    def __init__(
        self, device: str, make: Callable[..., Any], budget: int | None, layers: int = 3
    ) -> None:
        super().__init__(device, make, None, layers)
        if budget:
            settings: Any = {"stored": torch.bfloat16, "rounding": "nearest"}
            self.swapper = StateSwapper(self.optimizer, budget=budget, **settings)

    def wide(self) -> list[Tensor]:
        """The state tensors that a swapper stores in 16 bits."""
        return [
            value
            for param, kept in self.optimizer.state.items()
            for value in kept.values()
            if param.dtype == torch.float32 and param.dim() and value.shape == param.shape
        ]

    def step(self, count: int = 1) -> Stored:
        for _ in range(count):
            super().step()
            if self.swapper is None:
                for value in self.wide():
                    value.copy_(value.bfloat16())
        return self

    def tensors(self) -> dict[str, Tensor]:
        return {
            name: value if value.dtype == torch.bfloat16 and "narrow" in name else value.float()
            for name, value in super().tensors().items()
        }


@pytest.mark.dealt("budget", "bucket_bytes")
@pytest.mark.parametrize(
    ("budget", "bucket_bytes"),
    [(1, 1 << 28), (700, 1 << 28), (6000, 200), (1 << 20, 1 << 28)],
    ids=["nothing-stays", "a-third-at-once", "some-stay", "all-stay"],
)
@pytest.mark.parametrize("name", COMMON_OPTIMIZERS)
def test_steps_are_those_with_state_rounded_after_each_step(
    name: str, budget: int, bucket_bytes: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_swapper, "_BUCKET_BYTES", bucket_bytes)
    make = COMMON_OPTIMIZERS[name]
    ours, theirs = (Stored(device, make, limit).step(5) for limit in (budget, None))
    assert {value.dtype for value in ours.wide()} == {torch.bfloat16}
    assert_equal(ours.tensors(), theirs.tensors())
    assert ours.swapper.report().device_bytes <= max(0, budget - 1)
    ours.swapper.evict()
    assert {value.device.type for value in ours.wide()} == {"cpu"}
    assert_equal(ours.step(2).tensors(), theirs.step(2).tensors())
    ours.swapper.close()
    assert {(value.dtype, value.device.type) for value in ours.wide()} == {(torch.float32, device)}
    assert_equal(ours.tensors(), theirs.tensors())


def big(home: str, budget: int, **settings: Any) -> tuple[nn.Module, optim.Optimizer, Any]:
    """Parameters of several layouts and sizes, and their gradients."""
    torch.manual_seed(0)
    model = nn.ModuleList(
        [nn.Linear(65, 33), nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)]
    ).to(home)
    for param in model.parameters():
        # A GPU would draw other numbers.
        param.grad = torch.randn(param.shape).to(param, memory_format=torch.preserve_format)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, StateSwapper(optimizer, budget=budget, **settings)


@pytest.mark.parametrize("stored", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_parameters_in_host_memory_are_stepped_with_their_state(
    stored: torch.dtype | None, device: str
) -> None:
    results = []
    for home in ("cpu", device):
        to = {"device": device} if home == "cpu" else {}
        model, optimizer, _ = big(home, 4000, stored=stored, **to)
        for _ in range(3):
            optimizer.step()
        results.append({name: param.detach() for name, param in model.named_parameters()})
    assert_equal(*results)


def test_random_rounding_does_not_depend_on_the_budget_and_has_no_bias(device: str) -> None:
    runs = []
    for budget in (1, 60_000, 1 << 20):
        model, optimizer, swapper = big(device, budget, stored=torch.bfloat16)
        for _ in range(4):
            optimizer.step()
        swapper.close()
        kept = {str(k): v for k, v in enumerate(model.parameters())}
        for number, (_, state) in enumerate(optimizer.state.items()):
            kept |= {f"{number} {key}": value for key, value in state.items()}
        runs.append({name: value.detach().clone() for name, value in kept.items()})
    assert_equal(runs[1], runs[0])
    assert_equal(runs[2], runs[0])
    weight = nn.Parameter(torch.zeros(512, 512, device=device))
    sgd = optim.SGD([weight], lr=0.0, momentum=0.0001, dampening=0.0)
    StateSwapper(sgd, budget=1, stored=torch.bfloat16)
    exact = 1 + 3 / 1024  # of 8 bits: between 1 and 1 + 1/128
    weight.grad = torch.full_like(weight, exact)
    sgd.step()
    found = sgd.state[weight]["momentum_buffer"].float()
    assert set(found.unique().tolist()) == {1.0, 1 + 1 / 128}
    assert abs(float(found.mean()) - exact) < 1e-4
    rows = found.flatten()
    assert not torch.equal(rows[:2048], rows[2048:4096])


def test_half_the_bytes_are_stored_and_copied(device: str) -> None:
    reports = []
    for stored in (None, torch.bfloat16):
        layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6))).to(device)
        for param in layers.parameters():
            param.grad = torch.ones_like(param)
        optimizer = optim.Adam(layers.parameters(), fused=True)
        swapper = StateSwapper(optimizer, budget=1, stored=stored)
        for _ in range(3):
            optimizer.step()
        reports.append(swapper.report())
    wide, narrow = reports
    for name in ("host_bytes", "bytes_in", "bytes_out"):  # the step counts stay as they are
        assert getattr(narrow, name) < 0.55 * getattr(wide, name)


def test_a_checkpoint_has_16_bits_and_continues(device: str) -> None:
    ours, whole = (Stored(device, optim.Adam, 700).step(2) for _ in range(2))
    saved = reloaded(copy.deepcopy(ours.optimizer.state_dict()))
    assert [kept["exp_avg"].dtype for kept in saved["state"].values()].count(torch.bfloat16) > 8
    resumed = Stored(device, optim.Adam, 700)
    resumed.model.load_state_dict(ours.model.state_dict())
    resumed.optimizer.load_state_dict(saved)
    resumed.steps = ours.steps
    assert_equal(resumed.step(3).tensors(), whole.step(3).tensors())


@pytest.mark.dealt("error")
@EVERY
@pytest.mark.parametrize("error", [KeyboardInterrupt, out_of_memory], ids=["ctrl-c", "memory"])
@pytest.mark.parametrize("budget", [700, 1 << 20])
def test_an_error_at_any_line_steps_a_parameter_once_or_not(
    budget: int, error: Callable[[], BaseException], every: int, device: str
) -> None:
    def prepared() -> Training:
        return Stored(device, optim.Adam, budget).step(2).gradients()

    def by_parameter(training: Training) -> list[list[Tensor]]:
        return [
            [param.detach().cpu().clone(), *(each.cpu().clone() for each in kept.values())]
            for param, kept in training.optimizer.state.items()
        ]

    def step(training: Training) -> None:
        training.optimizer.step()

    step(whole := prepared())
    states = []
    for training in (prepared(), whole):
        training.swapper.evict()
        states.append(by_parameter(training))
    for training, _ in every_interrupt(prepared, step, error, every=every):
        training.swapper.evict()
        assert training.swapper.report().device_bytes == 0
        for now, *known in zip(by_parameter(training), *states, strict=True):
            assert [value.dtype for value in now] == [value.dtype for value in known[0]]
            assert any(all(map(torch.equal, now, state)) for state in known)
        training.optimizer.zero_grad()
        training.step(2)


@pytest.mark.parametrize("feature", ["scaler", "two swappers", "sleep", "a new group", "saved"])
def test_it_goes_with_other_features(feature: str, device: str, tmp_path: Path) -> None:
    ours, theirs = (Stored(device, optim.Adam, limit, 4) for limit in (500, None))
    for each in (ours, theirs):
        rest = each.model[2:].parameters()
        if feature in ("two swappers", "a new group"):
            each.optimizer.param_groups[0]["params"] = [*each.model[:2].parameters()]
        if feature == "a new group":
            each.step(2).optimizer.add_param_group({"params": rest, "lr": 0.01})
        if feature == "scaler":
            scaler = speedtorch.GradScaler(device, init_scale=4.0)
            for number in range(4):
                each.gradients()
                for param in each.model.parameters():
                    if param.dtype == torch.bfloat16:  # torch cannot unscale it on a GPU
                        param.grad = None
                    if param.grad is not None:
                        param.grad *= scaler.get_scale()
                if number == 2:
                    next(each.model.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
                scaler.scale(torch.zeros((), device=device))
                scaler.step(each.optimizer)
                scaler.update()
                each.steps += 1
                if each.swapper is None:
                    for value in each.wide():
                        value.copy_(value.bfloat16())
        if feature == "two swappers":
            other = optim.SGD(rest, momentum=0.9)
            if each.swapper:
                StateSwapper(other, budget=1, stored=torch.bfloat16, rounding="nearest")
            for _ in range(3):
                each.step()
                other.step()
                if each.swapper is None:
                    for kept in other.state.values():
                        kept["momentum_buffer"].copy_(kept["momentum_buffer"].bfloat16())
        if feature == "sleep":
            state = speedtorch.TrainingState(each.step(2).model, each.optimizer)
            state.sleep()
            state.wake()
        if feature == "saved":
            parts = {"model": each.step(2).model, "optimizer": each.optimizer}
            folder = tmp_path / str(each.swapper)
            speedtorch.save(folder, **parts)
            each.step()
            each.steps -= 1
            speedtorch.load(folder, **parts)
        each.step(2)
    assert_equal(ours.tensors(), theirs.tensors())


class InHalf(optim.Optimizer):
    """An optimizer that keeps its state in 16 bits itself."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                kept = self.state[param]
                if not kept:
                    kept["sum"] = torch.zeros_like(param, dtype=torch.bfloat16)
                    kept["wide"] = torch.zeros_like(param)
                kept["sum"].mul_(0.9).add_(param.grad.bfloat16())
                kept["wide"].add_(1.0)
                param.sub_(kept["sum"].float(), alpha=0.1)


def test_state_that_an_optimizer_keeps_in_16_bits_remains_so(device: str) -> None:
    ours, theirs = (Stored(device, InHalf, limit, 4) for limit in (500, None))
    for each in (ours, theirs):
        each.step(4)
        kept = each.optimizer.state.values()
        assert {state["sum"].dtype for state in kept} == {torch.bfloat16}
    assert_equal(ours.tensors(), theirs.tensors())


@pytest.mark.parametrize("saved", [False, True], ids=["deep copy", "saved"])
def test_a_copy_of_an_optimizer_trains_its_stored_state(saved: bool, device: str) -> None:
    ours = Stored(device, optim.Adam, 500).step(2)
    parts = ours.model, ours.optimizer
    copied = copy.copy(ours)
    copied.model, copied.optimizer = (
        reloaded(parts, weights_only=False) if saved else copy.deepcopy(parts)
    )
    copied.swapper = StateSwapper(
        copied.optimizer, budget=500, stored=torch.bfloat16, rounding="nearest"
    )
    assert_equal(copied.step(2).tensors(), ours.step(2).tensors())


def test_wrong_arguments_raise(device: str) -> None:
    weight = nn.Parameter(torch.zeros(2, device=device))
    optimizer = optim.Adam([weight])
    for dtype in (torch.float16, torch.float32, "bfloat16"):
        with pytest.raises(ValueError, match="stored: expected torch.bfloat16 or None, got"):
            StateSwapper(optimizer, budget=1, stored=dtype)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rounding: 'nearest' is for numbers of 16 bits"):
        StateSwapper(optimizer, budget=1, rounding="nearest")
    with pytest.raises(ValueError, match="rounding: expected 'stochastic' or 'nearest', got 'up'"):
        StateSwapper(optimizer, budget=1, stored=torch.bfloat16, rounding="up")  # type: ignore[arg-type]

    class Own(Tensor):
        pass

    own = optim.SGD([nn.Parameter(torch.zeros(2, device=device).as_subclass(Own))], momentum=0.9)
    with pytest.raises(NotImplementedError, match="stored: SGD has a Own as a parameter.*Omit"):
        StateSwapper(own, budget=1, stored=torch.bfloat16)
    assert "stored=bfloat16, stochastic rounding" in repr(
        StateSwapper(optimizer, budget=1, stored=torch.bfloat16)
    )
