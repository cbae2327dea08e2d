"""Optimizer state in host memory, loaded in buckets: steps equal those without a swapper."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from interrupts import EVERY, every_interrupt, out_of_memory
from offloaded_models import (
    COMMON_OPTIMIZERS,
    Layer,
    assert_equal,
    copies,
    linears,
    own_optimizer,
    reloaded,
)
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.layers import StateSwapper, Swapper, state_swapper
from speedtorch.layers.offloaded_parameters import OffloadedParameters
from speedtorch.layers.split_steps import PartialStep

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    **COMMON_OPTIMIZERS,
    "AdamW-fused": lambda parameters: optim.AdamW(parameters, fused=True),
    "Muon": lambda parameters: optim.Muon(
        [param for param in parameters if param.dim() == 2 and param.requires_grad]
    ),
}


@own_optimizer
def noisy(optimizer: Any, params: list[Any]) -> None:
    """Adds random numbers of the CPU."""
    for param in params:
        noise = torch.randn(param.shape).to(param.device)
        optimizer.state[param].setdefault("sums", torch.zeros_like(param)).add_(noise)
        param.sub_(optimizer.state[param]["sums"], alpha=0.1)


@own_optimizer
def shampoo(optimizer: Any, params: list[Any]) -> None:
    """Keeps lists of tensors of each parameter, and one tensor of all."""
    for param in params:
        if not (state := optimizer.state[param]):
            shared = torch.arange(3.0, device=param.device)
            state["map"] = vars(optimizer).setdefault("map", shared)
            state["sums"] = [torch.zeros_like(param), torch.ones_like(param)]
        assert all(one.device == param.device for one in (*state["sums"], state["map"]))
        state["sums"][0] += param.grad * state["map"][2]
        state["sums"][1] *= 0.9
        param -= 0.1 * state["sums"][0] * state["sums"][1]


OPTIMIZERS["Shampoo"] = shampoo

SWAPPERS = pytest.mark.parametrize("kind", ["StateSwapper", "Swapper"])


def swapper_of(kind: str, layers: nn.Module, optimizer: Any, device: str) -> Any:
    """A swapper of either kind."""
    if kind == "StateSwapper":
        return StateSwapper(optimizer, budget=200)
    swapper = Swapper(layers, optimizer, budget=3000, device=device)
    swapper.auto()
    return swapper


class Training:
    """Layers, their optimizer, and what brings its state if there is a budget."""

    def __init__(
        self, device: str, make: Callable[..., Any], budget: int | None, layers: int = 3
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Layer() for _ in range(layers))).to(device)
        self.optimizer = make(self.model.parameters())
        self.device, self.steps = device, 0
        self.swapper: Any = StateSwapper(self.optimizer, budget=budget) if budget else None

    def gradients(self) -> Training:
        drawn = torch.Generator().manual_seed(self.steps)
        batch = torch.randn(8, 4, generator=drawn).to(self.device)
        self.optimizer.zero_grad()
        parts = list(self.model)[: 2 + self.steps % 2]  # the last one every other time
        for part in parts:
            batch = part(batch)
        batch.square().mean().backward()
        return self

    def step(self, count: int = 1) -> Training:
        for _ in range(count):
            self.gradients().optimizer.step()
            self.steps += 1
        return self

    def tensors(self) -> dict[str, Tensor]:
        found = dict(self.model.state_dict())
        for number, kept in self.optimizer.state_dict()["state"].items():
            for key, value in kept.items():
                for at, tensor in enumerate(value if isinstance(value, list) else [value]):
                    if isinstance(tensor, Tensor):
                        found[f"{number} {key} {at}"] = tensor
        return found


class OnHost(Training):
    """Parameters in host memory that are stepped on a device, or what is there all the while."""

    def __init__(
        self, device: str, make: Callable[..., Any], budget: int | None, layers: int = 3
    ) -> None:
        super().__init__("cpu" if budget else device, make, None, layers)
        if budget:
            self.swapper = StateSwapper(self.optimizer, budget=budget, device=device)

    def gradients(self) -> Training:
        drawn = torch.Generator().manual_seed(self.steps)
        for number, param in enumerate(self.model.parameters()):
            gradient = torch.randn(param.shape, generator=drawn).to(self.device, param.dtype)
            is_left = not param.requires_grad or (number + self.steps) % 5 == 0
            param.grad = None if is_left else gradient
        return self


@pytest.mark.dealt("budget", "bucket_bytes")
@pytest.mark.parametrize(
    ("budget", "bucket_bytes"),
    [(1, 1 << 28), (700, 1 << 28), (8000, 200), (1 << 20, 1 << 28)],
    ids=["nothing-stays", "a-third-at-once", "some-stay", "all-stay"],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_with_all_state_on_the_device(
    name: str, budget: int, bucket_bytes: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_swapper, "_BUCKET_BYTES", bucket_bytes)
    make = OPTIMIZERS[name]
    ours, theirs = (Training(device, make, limit).step(5) for limit in (budget, None))
    assert_equal(ours.tensors(), theirs.tensors())
    report = ours.swapper.report()
    assert report.device_bytes <= max(0, budget - 1)
    assert (report.num_buckets == 1) == (budget == 1 << 20)
    ours.swapper.close()
    assert ours.swapper.evict() == 0 == ours.swapper.report().host_bytes
    for name, tensor in ours.tensors().items():
        # As after load_state_dict(), only step counts may be on the CPU.
        expected = theirs.tensors()[name].device.type if " step " in name else device
        assert tensor.device.type == expected, name
    assert_equal(ours.step(2).tensors(), theirs.step(2).tensors())
    assert ours.swapper.report().num_buckets == 0


def test_state_is_on_the_host_between_steps_and_at_once_if_there_is_some(device: str) -> None:
    ours, theirs = (Training(device, optim.Adam, None).step(3) for _ in range(2))
    ours.swapper = StateSwapper(ours.optimizer, budget="1KiB")
    for count in (0, 2):
        tensors = [
            value for kept in ours.step(count).optimizer.state.values() for value in kept.values()
        ]
        assert {tensor.device.type for tensor in tensors} == {"cpu"}
        assert {param.device.type for param in ours.model.parameters()} == {device}
        report = ours.swapper.report()
        assert report.host_bytes >= sum(tensor.nbytes for tensor in tensors if tensor.dim())
    assert report.bytes_in > 0 and report.bytes_out > 0
    assert "buckets" in str(report) and "Adam; budget=1.0 KiB" in repr(ours.swapper)
    assert_equal(ours.tensors(), theirs.step(2).tensors())


def with_gradients(layers: Iterable[nn.Module]) -> list[nn.Parameter]:
    params = [param for layer in layers for param in layer.parameters()]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_a_step_copies_state_once_each_way(fused: bool, device: str) -> None:
    optimizer = optim.AdamW(with_gradients(linears(6, 16).to(device)), fused=fused)
    swapper = StateSwapper(optimizer, budget=9000)
    for _ in range(2):
        optimizer.step()
    before = swapper.report()
    optimizer.step()
    after = swapper.report()
    assert after.num_buckets > 3
    assert after.bytes_in - before.bytes_in == after.host_bytes
    assert after.bytes_out - before.bytes_out == after.host_bytes


def test_state_within_the_budget_remains_on_the_device(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_swapper, "_BUCKET_BYTES", 2048)
    params = with_gradients(linears(8, 16, bias=False).to(device))
    optimizer = optim.SGD(params, lr=0.1, momentum=0.9)
    swapper = StateSwapper(optimizer, budget=(3 + 2) * 1024 + 500)
    for _ in range(2):
        optimizer.step()
    for number in range(3):
        before = swapper.report()
        if number == 2:
            assert swapper.evict() == 2 * 1024
        optimizer.step()
        after = swapper.report()
        moved = after.bytes_in - before.bytes_in, after.bytes_out - before.bytes_out
        assert moved == ((8 * 1024, 8 * 1024) if number == 2 else (6 * 1024, 6 * 1024))
        assert (after.num_buckets, after.device_bytes) == (8, 2 * 1024)
    kept = [optimizer.state[param]["momentum_buffer"] for param in params]
    assert [tensor.device.type for tensor in kept] == 2 * [device] + 6 * ["cpu"]
    saved = copies(dict(enumerate(kept)))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert swapper.report().device_bytes == 2 * 1024
    for number, param in enumerate(params):
        now = optimizer.state[param]["momentum_buffer"].cpu()
        assert torch.equal(now, saved[number].cpu() * 0.9 + 1)
    params[0].grad = None  # what is not stepped stays as well
    optimizer.step()
    assert swapper.report().device_bytes == 2 * 1024


def test_state_of_another_optimizer_counts_against_the_budget(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_swapper, "_BUCKET_BYTES", 1024)
    weights = with_gradients(linears(12, 16, bias=False).to(device))
    first, second = (optim.SGD(some, lr=0.1, momentum=0.9) for some in (weights[:8], weights[8:]))
    swapper = StateSwapper([first, second], budget=10_000)
    for _ in range(2):
        first.step()
    assert swapper.report().device_bytes == 8 * 1024
    seen, real = list[int](), PartialStep.step

    def step(self: PartialStep, parameters: list[Tensor]) -> None:
        seen.append(swapper.report().device_bytes)
        real(self, parameters)

    monkeypatch.setattr(PartialStep, "step", step)
    second.step()  # creates state, three buckets of which are on the device at once
    assert max(seen) == 6 * 1024
    for _ in range(2):
        second.step()
    assert max(seen) <= 9 * 1024
    assert swapper.report().device_bytes == 6 * 1024
    for of, params, value in ((first, weights[:8], 1.9), (second, weights[8:], 2.71)):
        for param in params:
            buffer = of.state[param]["momentum_buffer"].cpu()
            assert torch.equal(buffer, torch.full((16, 16), value))


@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_a_checkpoint_is_loaded_into_host_memory(mode: Callable[[], Any], device: str) -> None:
    ours, theirs = Training(device, optim.Adam, 700).step(2), Training(device, optim.Adam, None)
    theirs.step(5)
    saved = copy.deepcopy(theirs.optimizer.state_dict())
    ours.model.load_state_dict(theirs.model.state_dict())
    with mode():
        ours.optimizer.load_state_dict(saved)
    kept = ours.optimizer.state[next(ours.model.parameters())]
    assert kept["exp_avg"].device.type == "cpu"
    ours.steps = theirs.steps
    assert_equal(ours.tensors(), theirs.tensors())
    assert_equal(ours.step(3).tensors(), theirs.step(3).tensors())
    plain = Training(device, optim.Adam, None)
    plain.model.load_state_dict(ours.model.state_dict())
    plain.optimizer.load_state_dict(ours.optimizer.state_dict())
    plain.steps = ours.steps
    assert_equal(plain.step(3).tensors(), theirs.step(3).tensors())


def test_state_of_two_dtypes_on_the_device_is_saved(device: str) -> None:
    def trained(is_swapped: bool) -> tuple[Tensor, Any]:
        torch.manual_seed(0)
        layer = nn.Linear(8, 8, dtype=torch.bfloat16, device=device)
        optimizer = optim.AdamW(layer.parameters(), fused=True)  # its step is of float32
        swapper = StateSwapper(optimizer, budget="1MiB") if is_swapped else None
        for number in range(4):
            layer(torch.ones(2, 8, dtype=torch.bfloat16, device=device)).sum().backward()
            optimizer.step()
            if swapper is not None and number:  # the first step has made its state
                assert swapper.report().device_bytes
                found = reloaded(optimizer.state_dict(), map_location=device)
        state = found["state"] if swapper is not None else optimizer.state_dict()["state"]
        return layer.weight.detach(), state

    (weight, state), (plain_weight, plain_state) = trained(True), trained(False)
    assert torch.equal(weight, plain_weight)
    for number, kept in plain_state.items():
        assert_equal(state[number], kept)


def test_hooks_of_a_load_find_whole_tensors(device: str) -> None:
    def load(budget: int | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        ours, seen = Training(device, optim.Adam, None).step(2), list[Tensor]()

        def before(_: object, saved: dict[str, Any]) -> None:
            for kept in saved["state"].values():
                seen.append(kept["exp_avg"].cpu().clone())
                kept["exp_avg"].mul_(0.5)

        def after(optimizer: optim.Optimizer) -> None:
            seen.extend(kept["exp_avg"].cpu().clone() for kept in optimizer.state.values())

        for number in range(2):
            ours.optimizer.register_load_state_dict_pre_hook(before)
            ours.optimizer.register_load_state_dict_post_hook(after)
            if budget and not number:
                ours.swapper = StateSwapper(ours.optimizer, budget=budget)
        ours.optimizer.load_state_dict(copy.deepcopy(ours.optimizer.state_dict()))
        return {str(at): tensor for at, tensor in enumerate(seen)}, ours.step(2).tensors()

    for ours, theirs in zip(load(700), load(None), strict=True):
        assert_equal(ours, theirs)


def test_groups_schedulers_and_hooks_continue(device: str) -> None:
    def train(budget: int | None) -> tuple[dict[str, Tensor], list[str]]:
        training = Training(device, lambda p: optim.AdamW(p, lr=0.1), budget)
        seen: list[str] = []
        training.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        training.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        scheduler = optim.lr_scheduler.StepLR(training.optimizer, 2, 0.5)
        for number in range(4):
            training.step()
            scheduler.step()
            if number == 1:
                more = Layer().to(device)
                training.model.append(more)
                training.optimizer.add_param_group({"params": more.parameters(), "lr": 0.01})
        return training.tensors(), seen

    (ours, seen), (theirs, expected) = train(700), train(None)
    assert_equal(ours, theirs)
    assert seen == expected == ["before", "after"] * 4


class OfAdam(optim.Adam):
    """Calls the step of its base class, which calls hooks as well once there has been an Adam."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


@SWAPPERS
def test_an_optimizer_whose_step_calls_its_base_class(kind: str, device: str) -> None:
    def train(is_swapped: bool) -> dict[str, Tensor]:
        layers = linears(3).to(device)
        optim.Adam(layers.parameters())
        optimizer = OfAdam(layers.parameters())
        swapper = swapper_of(kind, layers, optimizer, device) if is_swapped else None
        calls: list[object] = []
        optimizer.register_step_pre_hook(lambda *given: calls.append(given))
        for _ in range(3):
            optimizer.zero_grad()
            layers(torch.ones(2, 4, device=device)).square().sum().backward()
            optimizer.step()
        if swapper:
            assert len(calls) == 3
            swapper.close()
        return copies(layers.state_dict())

    assert_equal(train(True), train(False))


@own_optimizer
def counting(optimizer: Any, params: list[Any]) -> None:
    """Counts its steps, and goes down by less and less."""
    group = optimizer.param_groups[0]
    group["count"] = group.get("count", 0) + 1
    for param in params:
        param.sub_(param.grad, alpha=0.1 / group["count"])


@SWAPPERS
def test_post_hooks_of_a_step_find_the_optimizers_counts(kind: str, device: str) -> None:
    layers = linears(3).to(device)
    optimizer = counting(layers.parameters())
    seen: list[int] = []

    def fails(*_: Any) -> None:
        seen.append(optimizer.param_groups[0]["count"])
        raise ZeroDivisionError

    optimizer.register_step_post_hook(fails)
    kept = swapper_of(kind, layers, optimizer, device)
    for _ in range(3):
        layers(torch.ones(2, 4, device=device)).sum().backward()
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    assert seen == [1, 2, 3] and optimizer.param_groups[0]["count"] == 3 and kept is not None


@pytest.mark.parametrize("offloaded", [2, 3])
def test_a_backward_that_stepped_modules_counts_as_a_step(offloaded: int, device: str) -> None:
    def train(is_swapped: bool) -> dict[str, Tensor]:
        layers = linears(3).to(device)
        optimizer = counting(layers.parameters())
        if is_swapped:
            swapper = Swapper(list(layers)[:offloaded], optimizer, device=device)
            swapper.auto(step=True)
        for number in range(1, 4):
            layers(torch.ones(2, 4, device=device)).square().sum().backward()
            if not is_swapped or offloaded < 3:
                optimizer.step()
                optimizer.zero_grad()
            assert optimizer.param_groups[0]["count"] == number
        return copies(layers.state_dict())

    assert_equal(train(True), train(False))


def test_random_numbers_are_those_without_a_swapper(device: str) -> None:
    assert_equal(*(Training(device, noisy, limit).step(3).tensors() for limit in (700, None)))


class Lookahead(optim.Optimizer):
    """Steps another optimizer, of all parameters."""

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__([*inner.param_groups[0]["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


@own_optimizer
def unable(optimizer: Any, params: list[Any]) -> None:
    """Has no step for the parameters that it is given."""
    raise NotImplementedError("no kernel")


@own_optimizer
def clipped(optimizer: Any, params: list[Any]) -> None:
    """Divides gradients by the norm of all of them."""
    norm = sum(param.grad.square().sum() for param in params)
    for param in params:
        param.sub_(param.grad / norm, alpha=0.1)


@own_optimizer
def counts_for_all(optimizer: Any, params: list[Any]) -> None:
    """Counts its steps in place, for all parameters."""
    optimizer.state.setdefault("count", torch.zeros(())).add_(1)
    for param in params:
        param.sub_(param.grad / optimizer.state["count"], alpha=0.1)


@own_optimizer
def paired(optimizer: Any, params: list[Any]) -> None:
    """Steps each second parameter along the one before."""
    held = optimizer.param_groups[0]["params"]
    for first, second in zip(held[::2], held[1::2], strict=True):
        if first.grad is not None and second.grad is not None:
            second.sub_(second.grad * first.grad.norm(), alpha=0.1)


@own_optimizer
def needs_one(optimizer: Any, params: list[Any]) -> None:
    """Cannot step nothing."""
    torch.stack([param.sum() for param in params])
    for param in params:
        param.sub_(param.grad, alpha=0.1)


@own_optimizer
def draws_once(optimizer: Any, params: list[Any]) -> None:
    """Draws one random number a step."""
    if random.random() < 1e-9:
        raise ZeroDivisionError


class WithFactor(clipped):  # type: ignore[misc, valid-type]
    """Is given a factor in its steps."""

    def step(self, factor: float) -> None:
        super().step()


SEPARATELY = "does not step each parameter sep"
REFUSED: list[tuple[Callable[..., Any], type[Exception], str]] = [
    *((of, ValueError, SEPARATELY) for of in (clipped, counts_for_all, paired, needs_one)),
    *((of, ValueError, SEPARATELY) for of in (draws_once, WithFactor)),
    (unable, ValueError, r"must step .* cannot be .* \(no kernel\)"),
    (
        lambda parameters: Lookahead(optim.SGD(parameters)),
        TypeError,
        "wraps a SGD, and would step all its parameters",
    ),
]


@SWAPPERS
@pytest.mark.parametrize(("of", "error", "message"), REFUSED)
def test_an_optimizer_that_does_not_step_parameters_separately_raises(
    of: Callable[..., Any], error: type[Exception], message: str, kind: str, device: str
) -> None:
    layers = linears(2).to(device)
    optimizer = of(layers.parameters())
    layers(torch.ones(2, 4, device=device)).sum().backward()
    before, drawn = copies(layers.state_dict()), (random.getstate(), torch.get_rng_state())
    addresses = [param.data_ptr() for param in layers.parameters()]
    refused = pytest.raises(error, match=f"{type(optimizer).__name__} {message}")
    if of is WithFactor:  # what it is given is known in its first step
        swapper = swapper_of(kind, layers, optimizer, device)
        with refused:
            optimizer.step(0.5)
        swapper.close()
    else:
        with refused:
            swapper_of(kind, layers, optimizer, device)
        assert [param.data_ptr() for param in layers.parameters()] == addresses
    assert_equal(copies(layers.state_dict()), before)
    assert not optimizer.state
    assert random.getstate() == drawn[0] and torch.equal(torch.get_rng_state(), drawn[1])
    swapper_of(kind, layers, optim.SGD(layers.parameters()), device).close()  # nothing was taken


@own_optimizer
def clipped_group(optimizer: Any, params: list[Any]) -> None:
    """Divides gradients by a norm if the last group says so."""
    clips = optimizer.param_groups[-1].get("clips")
    norm = sum(param.grad.norm() for param in params) if clips else 1
    for param in params:
        param.sub_(param.grad / norm, alpha=0.1)


def test_a_group_added_later_is_tried_out(device: str) -> None:
    layers = linears(2).to(device)
    optimizer = clipped_group(layers[0].parameters())
    StateSwapper(optimizer, budget=200)
    optimizer.add_param_group({"params": list(layers[1].parameters()), "clips": True})
    layers(torch.ones(2, 4, device=device)).sum().backward()
    before = copies(layers.state_dict())
    with pytest.raises(ValueError, match="clipped_group does not step each parameter separately"):
        optimizer.step()
    assert_equal(copies(layers.state_dict()), before)


class Scaled(optim.SGD):
    """Its step is given a factor, and a closure whose loss is another one."""

    @torch.no_grad()
    def step(self, closure: Any, factor: float, *, more: float = 1.0) -> float:  # type: ignore[override]
        loss = float(closure()) if closure else 1.0
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                sums = self.state[param].setdefault("sums", torch.zeros_like(param))
                param.sub_(sums.add_(param.grad), alpha=0.1 * factor * more * loss)
        return loss


@pytest.mark.parametrize("first", ["by place", "by name"])
@SWAPPERS
def test_arguments_of_a_step_are_passed_to_all_parts(kind: str, first: str, device: str) -> None:
    def train(is_swapped: bool) -> dict[str, Tensor]:
        layers = linears(3).to(device)
        optimizer: Any = Scaled(layers.parameters())
        swapper = swapper_of(kind, layers, optimizer, device) if is_swapped else None

        @torch.enable_grad()
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = layers(torch.ones(2, 4, device=device)).square().sum()
            loss.backward()
            return loss.detach()

        calls = [((closure, 0.5), {}), ((), {"closure": closure, "factor": 0.1})]
        if first == "by name":
            calls.reverse()
        losses = [optimizer.step(*args, **named) for args, named in calls]
        assert losses[0] != losses[1]
        optimizer.step(None, 2.0, more=0.1)
        if swapper:
            swapper.close()
        return copies(layers.state_dict())

    assert_equal(train(True), train(False))


@pytest.mark.parametrize(
    ("of", "kind"),
    [
        (Training, torch.amp.GradScaler),
        (Training, speedtorch.GradScaler),
        (OnHost, torch.amp.GradScaler),
    ],
)
def test_scaled_gradients(of: type[Training], kind: Any, device: str) -> None:
    def train(budget: int | None) -> dict[str, Tensor]:
        ours = of(device, optim.Adam, budget)
        scaler = kind(ours.device, init_scale=4.0, growth_interval=2)
        for number in range(5):
            scaler.scale(torch.ones((), device=ours.device))
            for param in ours.gradients().model.parameters():
                if param.dtype == torch.bfloat16:  # torch scales none of these on a GPU
                    param.grad = None
                elif param.grad is not None:
                    param.grad *= scaler.get_scale() * (float("inf") if number == 2 else 1.0)
            scaler.step(ours.optimizer)
            scaler.update()
            ours.steps += 1
        return ours.tensors()

    assert_equal(train(2000), train(None))


@own_optimizer
def aliasing(optimizer: Any, params: list[Any]) -> None:
    """Keeps the parameter itself, a view of it, and its gradient."""
    for param in params:
        sums = optimizer.state[param].get("sums", torch.zeros_like(param))
        kept = {"of": param, "flat": param.data.view(-1), "last": param.grad}
        optimizer.state[param] = {**kept, "sums": sums.add_(param.grad)}
        kept["flat"].sub_(sums.view(-1), alpha=0.1)


def test_state_that_is_a_parameter_or_its_gradient_remains(device: str) -> None:
    ours = Training(device, aliasing, None)
    addresses = [param.data_ptr() for param in ours.model.parameters()]
    ours.swapper = StateSwapper(ours.optimizer, budget=700)
    ours.step(4)
    ours.swapper.evict()
    assert addresses == [param.data_ptr() for param in ours.model.parameters()]
    for param in ours.model.parameters():
        assert param.device.type == device
        assert param.grad is None or param.grad.device.type == device
    assert_equal(ours.tensors(), Training(device, aliasing, None).step(4).tensors())


def test_dropped_parameters_use_no_host_memory(device: str) -> None:
    ours = Training(device, optim.Adam, 700).step(2)
    before = ours.swapper.report()
    for _ in range(3):
        more = nn.Parameter(torch.ones(100, device=device))
        ours.optimizer.add_param_group({"params": [more]})
        more.grad = torch.ones_like(more)
        ours.optimizer.step()
        del ours.optimizer.param_groups[1], ours.optimizer.state[more], more
    ours.step()
    after = ours.swapper.report()
    assert (after.num_buckets, after.host_bytes) == (before.num_buckets, before.host_bytes)


def test_a_checkpoint_that_does_not_fit_changes_nothing_and_is_not_kept(device: str) -> None:
    ours, other = Training(device, optim.Adam, 700).step(2), Training(device, optim.Adam, None, 2)
    before, saved = copies(ours.tensors()), other.step().optimizer.state_dict()
    kept = [weakref.ref(state["exp_avg"]) for state in saved["state"].values()]
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        ours.optimizer.load_state_dict(saved)
    assert_equal(ours.tensors(), before)
    del saved, other
    ours.step()
    gc.collect()
    assert not any(ref() is not None for ref in kept)


def test_a_compiled_step(device: str) -> None:
    def train(budget: int | None) -> dict[str, Tensor]:
        training = Training(device, optim.Adam, budget)
        if budget:
            training.optimizer.step = torch.compile(training.optimizer.step, backend="eager")
        return training.step(3).tensors()

    assert_equal(train(700), train(None))


@NEEDS_GPU
def test_a_model_may_move_to_another_device_before_its_first_step() -> None:
    def train(budget: int | None) -> Training:
        training = Training("cpu", optim.Adam, budget)
        training.model.cuda()
        training.device = "cuda"
        return training.step(3)

    ours = train(700)
    assert_equal(ours.tensors(), train(None).tensors())
    kept = ours.optimizer.state[next(ours.model.parameters())]
    assert kept["exp_avg"].device.type == "cpu"
    assert ours.swapper.report().num_buckets > 1


def test_wrong_arguments_raise(device: str) -> None:
    def refused(kind: type[Exception], text: str, optimizer: Any, budget: Any = 100) -> None:
        with pytest.raises(kind, match=text):
            StateSwapper(optimizer, budget=budget)

    layer = nn.Linear(2, 2, device=device)
    adam, lbfgs = optim.Adam(layer.parameters()), optim.LBFGS(layer.parameters())
    rows = optim.Adam(speedtorch.Embedding(5, 2, device=device).parameters())
    refused(TypeError, r"expected a torch.optim.Optimizer, got Linear", layer)
    refused(TypeError, "got none", [])
    refused(TypeError, "LBFGS steps all parameters at once", lbfgs)
    differentiable = optim.Adam(layer.parameters(), differentiable=True)
    refused(ValueError, "Adam has differentiable=True", differentiable)
    refused(ValueError, "budget: expected a text such as '12GiB'", adam, "much")
    refused(ValueError, "one optimizer occurs twice", [adam, adam])
    refused(ValueError, "has the rows of an Embedding", rows)
    swapper = Swapper([layer], device=device)
    refused(ValueError, "has a parameter of a Swapper, which offloads", adam)
    swapper.close()
    first = StateSwapper(adam, budget=100)
    refused(ValueError, r"Adam already has a StateSwapper\. Call its close\(", adam)
    with pytest.raises(ValueError, match="Adam already has a StateSwapper"):
        Swapper([layer], adam, device=device)
    first.close()
    StateSwapper(adam, budget=100).close()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("rows", "rows of an Embedding"),
        ("module", "parameter of a Swapper, which"),
        ("differentiable", "differentiable=True"),
    ],
)
def test_groups_added_later_raise_as_at_first(what: str, message: str, device: str) -> None:
    layer, other = linears(2).to(device)
    optimizer = optim.Adam(layer.parameters())
    swapper = StateSwapper(optimizer, budget=100)
    layer(torch.ones(1, 4, device=device)).sum().backward()
    optimizer.step()
    before = copies(layer.state_dict())
    rows = speedtorch.Embedding(4, 2)
    added = rows if what == "rows" else other
    group = {"differentiable": True} if what == "differentiable" else {}
    kept = Swapper([other], device=device) if what == "module" else None
    optimizer.add_param_group({"params": added.parameters(), **group})
    if what == "rows":
        speedtorch.attach(optimizer, rows)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert_equal(copies(layer.state_dict()), before)
    swapper.close()
    if kept is not None:
        kept.close()


@NEEDS_GPU
def test_the_device_has_the_state_of_at_most_three_buckets() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(16)))
    optimizer = optim.AdamW(model.parameters(), fused=True)
    StateSwapper(optimizer, budget="24MiB")
    for _ in range(3):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before <= 26 << 20
        assert torch.cuda.memory_allocated() - before <= 1 << 20


@pytest.mark.dealt("error")
@EVERY
@pytest.mark.parametrize(
    ("of", "budget", "bucket_bytes"),
    [(Training, 700, 1 << 28), (Training, 1400, 100), (OnHost, 2000, 1 << 28)],
    ids=["all-evicted", "some-remain", "on-host"],
)
@pytest.mark.parametrize("error", [KeyboardInterrupt, out_of_memory], ids=["ctrl-c", "memory"])
def test_an_error_at_any_line_steps_a_parameter_once_or_not(
    error: Callable[[], BaseException],
    of: type[Training],
    budget: int,
    bucket_bytes: int,
    every: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state_swapper, "_BUCKET_BYTES", bucket_bytes)
    place = device if of is Training else "cpu"

    def prepared() -> Training:
        return of(device, optim.Adam, budget, layers=2).step(2).gradients()

    def by_parameter(training: Training) -> list[dict[str, Tensor]]:
        return [
            copies({"weight": param, **training.optimizer.state[param]})
            for param in training.model.parameters()
            if param.requires_grad
        ]

    def step(training: Training) -> None:
        training.optimizer.step()

    step(whole := prepared())
    before, after = by_parameter(prepared()), by_parameter(whole)
    for training, _ in every_interrupt(prepared, step, error, every=every):
        assert {param.device.type for param in training.model.parameters()} == {place}
        for evicts in (False, True):
            if evicts:
                training.swapper.evict()
                assert training.swapper.report().device_bytes == 0
            for now, old, new in zip(by_parameter(training), before, after, strict=True):
                matches = [all(torch.equal(now[k], of[k]) for k in now) for of in (old, new)]
                assert any(matches) or (of is OnHost and not evicts)
        buckets = training.swapper._buckets[training.optimizer]
        owned = [param for bucket in buckets for param in bucket.parameters]
        assert sorted(map(id, owned)) == sorted(map(id, training.model.parameters()))
        training.optimizer.zero_grad()
        training.step(2)


@pytest.mark.parametrize("error", [KeyboardInterrupt, out_of_memory], ids=["ctrl-c", "memory"])
def test_an_error_in_a_load_restores_or_completes_the_state(
    error: Callable[[], BaseException], device: str
) -> None:
    def prepared(value: float = 1.0) -> optim.Optimizer:
        weight = nn.Parameter(torch.zeros(2, 2, device=device))
        optimizer = optim.Adam([weight])
        StateSwapper(optimizer, budget=100)
        weight.grad = torch.full_like(weight, value)
        optimizer.step()
        return optimizer

    def state(optimizer: optim.Optimizer) -> dict[str, Tensor]:
        return copies(optimizer.state_dict()["state"][0])

    other = prepared(2.0)
    saved, before = other.state_dict(), state(prepared())

    def load(optimizer: optim.Optimizer) -> None:
        optimizer.load_state_dict(copy.deepcopy(saved))

    for optimizer, _ in every_interrupt(prepared, load, error, every=1):
        found = state(optimizer)
        assert any(
            all(torch.equal(value, of[name]) for name, value in found.items())
            for of in (before, state(other))
        )
        optimizer.step()


@pytest.mark.dealt("budget")
@pytest.mark.parametrize("budget", [1, 2000, 1 << 20], ids=["nothing", "some", "all"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_in_host_memory_are_stepped_on_the_device(
    name: str, budget: int, device: str
) -> None:
    make = OPTIMIZERS[name]
    ours, theirs = (OnHost(device, make, limit) for limit in (budget, None))
    addresses = [param.data_ptr() for param in ours.model.parameters()]
    assert_equal(ours.step(5).tensors(), theirs.step(5).tensors())
    assert addresses == [param.data_ptr() for param in ours.model.parameters()]
    gradients = [param.grad for param in ours.model.parameters() if param.grad is not None]
    assert {gradient.device.type for gradient in gradients} == {"cpu"}
    assert_equal(ours.step(3).tensors(), theirs.step(3).tensors())
    loaded = [OnHost(device, make, limit) for limit in (budget, None)]
    for training in loaded:
        training.model.load_state_dict(ours.model.state_dict())
        training.optimizer.load_state_dict(copy.deepcopy(ours.optimizer.state_dict()))
        training.step(3)
    assert_equal(loaded[0].tensors(), loaded[1].tensors())


def changes_gradients(how: str) -> Callable[..., optim.Optimizer]:
    """Clips gradients in its step, where they are, or gives them and parameters other memory."""

    @own_optimizer
    def step(_: object, params: list[Any]) -> None:
        for param in params:
            if how == "counted":
                param.grad.clamp_(-0.5, 0.5)
            elif how == "not counted":  # as of a foreach operation on a DTensor
                param.grad.data.clamp_(-0.5, 0.5)
            else:
                param.grad = param.grad.clamp(-0.5, 0.5)
            if how == "assigned":
                param.data = param.data - 0.1 * param.grad
            else:
                param.sub_(param.grad, alpha=0.1)

    return step


@pytest.mark.parametrize("how", ["counted", "not counted", "assigned"])
def test_gradients_that_a_step_changes_are_changed_on_the_host(how: str, device: str) -> None:
    ours, theirs = (OnHost(device, changes_gradients(how), limit) for limit in (1000, None))
    addresses = [param.data_ptr() for param in ours.model.parameters()]
    assert_equal(ours.step(2).tensors(), theirs.step(2).tensors())
    assert addresses == [param.data_ptr() for param in ours.model.parameters()]
    for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            assert one.grad.is_cpu and torch.equal(one.grad, other.grad.cpu())
            assert one.grad.abs().max() <= 0.5


def test_an_expanded_gradient_is_unchanged(device: str) -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    optimizer = optim.SGD([parameter], lr=0.5)
    StateSwapper(optimizer, budget="1KiB", device=device)
    parameter.grad = gradient = torch.ones(2, 1).expand(2, 3)
    optimizer.step()
    assert parameter.tolist() == [[-0.5] * 3] * 2
    assert parameter.grad is gradient and gradient.tolist() == [[1.0] * 3] * 2
    assert gradient.stride() == (1, 0)


def test_gradients_that_a_fused_step_scales_back_are_so_on_the_host(device: str) -> None:
    def gradients(budget: int | None) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(4, 4).to("cpu" if budget else device)
        adam = optim.Adam(layer.parameters(), fused=True)
        if budget:
            StateSwapper(adam, budget=budget, device=device)
        scaler = speedtorch.GradScaler("cpu" if budget else device, init_scale=4.0)
        scaler.scale(layer.weight.square().sum() + layer.bias.square().sum()).backward()
        scaler.step(adam)
        return [param.grad.cpu() for param in layer.parameters() if param.grad is not None]

    for ours, theirs in zip(gradients(1000), gradients(None), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["Adam-foreach", "AdamW-fused", "Shampoo"])
def test_an_optimizer_steps_parameters_in_host_memory_there_after_close(
    name: str, device: str
) -> None:
    ours = OnHost(device, OPTIMIZERS[name], 2000).step(2)
    ours.swapper.close()
    assert {tensor.device.type for tensor in ours.tensors().values()} == {"cpu"}
    for kept in ours.optimizer.state.values():
        values = [
            tensor for value in kept.values() for tensor in torch.utils._pytree.tree_leaves(value)
        ]
        assert all(value.is_cpu for value in values if isinstance(value, Tensor))
    before = copies(ours.tensors())
    if name != "Shampoo":  # whose own reference to what it shares is none of its state
        ours.step()
        assert any(not torch.equal(tensor, before[key]) for key, tensor in ours.tensors().items())


def test_an_error_between_a_step_and_its_write_back_loses_nothing(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped, plain = (OnHost(device, optim.Adam, limit).step(2) for limit in (1 << 20, None))
    write_back, calls = OffloadedParameters.write_back, []

    def interrupted_once(parameters: OffloadedParameters) -> None:
        calls.append(parameters)
        if len(calls) == 1:
            raise KeyboardInterrupt
        write_back(parameters)

    monkeypatch.setattr(OffloadedParameters, "write_back", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        swapped.step()
    swapped.swapper.evict()
    assert_equal(swapped.tensors(), plain.step().tensors())


def test_parameters_that_cannot_be_copied_to_the_device_raise(device: str) -> None:
    base = torch.ones(8)
    first, second = nn.Parameter(base), nn.Parameter(base)
    optimizer = optim.SGD([first, second], lr=0.1)
    StateSwapper(optimizer, budget="1KiB", device=device)
    pair, ones = torch.ones(2), torch.ones
    for tensors, gradients, text in (
        ((base[:6], base[4:]), (ones(6), ones(4)), r"shapes \[6\] and \[4\] share host memory"),
        # The second element of one is within the other.
        ((base[::3], base[4:6]), (ones(3), pair), r"shapes \[3\] and \[2\] share host memory"),
        ((base[:2], base[2:4]), (pair, pair), r"shapes \[2\] and \[2\] share a gradient tensor"),
        (
            (torch.zeros(1).expand(2), base[2:4]),
            (ones(2), None),
            r"a parameter of shape \[2\] cannot be stepped, .* share mem",
        ),
        (
            (base[:2], base[2:4]),
            (pair.to_sparse(), None),
            "a gradient of shape .* dense tensor on the CPU",
        ),
    ):
        first.grad = second.grad = None
        first.data, second.data = tensors
        first.grad, second.grad = gradients
        with pytest.raises(ValueError, match=text):
            optimizer.step()
        assert torch.equal(base, torch.ones(8))
    first.data, first.grad, second.data = base[:6], torch.ones(6), base[4:]
    optimizer.step()  # the second has no gradient
    assert torch.equal(base, torch.tensor([0.9] * 6 + [1.0] * 2))
    with pytest.raises(ValueError, match="expected 'cuda' or 'cpu', got 'meta'"):
        StateSwapper(optim.SGD([nn.Parameter(base)]), budget=1, device="meta")


def test_a_parameter_without_elements_is_stepped(device: str) -> None:
    full, none = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(0))
    optimizer = optim.SGD([none, full], lr=0.1)
    StateSwapper(optimizer, budget="1KiB", device=device)
    full.grad, none.grad = torch.ones(2), torch.ones(0)
    optimizer.step()
    assert torch.equal(full, torch.full((2,), 0.9)) and none.is_cpu


def test_threads_and_streams_step_parameters_in_host_memory(device: str) -> None:
    def work(ours: OnHost) -> None:
        own = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext()
        with own:
            ours.step(6)

    makes = [optim.Adam, optim.AdamW, optim.RMSprop]
    ours = [OnHost(device, make, 2000) for make in makes]
    with ThreadPool(len(ours)) as pool:
        pool.map(work, ours)
    for training, make in zip(ours, makes, strict=True):
        assert_equal(training.tensors(), OnHost(device, make, None).step(6).tensors())


def test_a_tensor_kept_twice_by_one_parameter_is_not_shared() -> None:
    one, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = optim.SGD([one, other], lr=0.1)
    kept, common = torch.ones(2), torch.ones(2)
    optimizer.state[one] = {"first": kept, "second": kept, "common": common}
    optimizer.state[other] = {"common": common}
    assert state_swapper._times_kept(optimizer) == {id(kept): 1, id(common): 2}
