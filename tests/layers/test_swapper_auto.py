"""auto: modules come as forward and backward reach them, with the bits of a model that stays."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from hypothesis import given, settings
from hypothesis import strategies as st
from offloaded_models import Layer, Pair, assert_equal, linears
from ordinary_run import programs
from test_swapper_programs import OPTIMIZERS
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from speedtorch.layers import Swapper

LAYERS, STEPS = 5, 4
WAYS = ["forth", "twice", "checkpointed", "some frozen", "skipped"]


class Model(nn.Module):
    """Layers, called one after another in one of several ways, and a head that is not offloaded."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(4, 2)
        if way == "some frozen":
            self.layers[1].requires_grad_(False)
            self.layers[0].requires_grad_(False)

    def forward(self, x: Tensor, step: int) -> Tensor:
        layers = list(self.layers)
        if self.way == "twice":
            layers.append(layers[1])
        if self.way == "skipped":
            layers.pop(step % LAYERS)
        for layer in layers:
            if self.way == "checkpointed":
                x = checkpoint(layer, x, use_reentrant=bool(step % 2))
            else:
                x = layer(x)
        y: Tensor = self.head(x)
        return y


def pair(way: str, kind: str, device: str, **settings: Any) -> Pair:
    torch.manual_seed(2)
    make = OPTIMIZERS[kind]
    return Pair(Model(way), device, make, lambda model: list(model.layers), **settings)


def train(model: Model, optimizer: Optimizer, device: str) -> list[Tensor]:
    losses = []
    for step in range(STEPS):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).to(device)
        x.requires_grad_(model.way == "checkpointed")
        loss = model(x, step).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
        model.eval()
        with torch.no_grad():
            losses.append(model(x, step + 1).cpu())
        model.train()
    return losses


def assert_trains_alike(models: Pair, device: str, **options: Any) -> None:
    with models.swapper.auto(**options):
        found = train(models.made, models.optimizers[0], device)
    expected = train(models.whole, models.optimizers[1], device)
    assert all(map(torch.equal, found, expected))
    models.assert_same()


@pytest.mark.dealt("budget", "steps")
@pytest.mark.parametrize("steps", [False, True], ids=["optimizer steps", "backward steps"])
@pytest.mark.parametrize("budget", ["12KiB", "24KiB", None])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_trains_like_a_resident_one(
    device: str, way: str, budget: str | None, steps: bool
) -> None:
    models = pair(way, "Adam", device, budget=budget)
    with models.swapper.auto(step=steps):
        found = train(models.made, models.optimizers[0], device)
    expected = train(models.whole, models.optimizers[1], device)
    report = models.swapper.report()
    if way == "twice" and device == "cuda":
        # Where a module leaves between two calls of one graph, their gradients are added later.
        for pairs in ((found, expected), (model.parameters() for model, _ in models)):
            for each, same in zip(*pairs, strict=True):
                torch.testing.assert_close(each.cpu(), same.cpu())
    else:
        assert all(map(torch.equal, found, expected))
        models.assert_same()
    assert not report.in_use
    each = report.host_bytes / LAYERS
    if budget == "12KiB":  # of the 9.5 KiB of a module
        assert report.bytes_in > STEPS * LAYERS * each
        assert report.resident_bytes <= 12 << 10
    if budget is None:
        assert report.bytes_in <= 2 * LAYERS * each


ORDER = st.lists(st.integers(0, LAYERS - 1), min_size=1, unique=True)
CALLS = st.one_of(
    st.tuples(st.just("train"), ORDER),
    st.tuples(st.just("evaluate"), ORDER),
    st.tuples(st.sampled_from(["prefetch", "evict", "save"]), ORDER),
)


def do(model: Model, optimizer: Optimizer, call: tuple[str, list[int]], number: int) -> Tensor:
    """One call of a program; `number` makes it another than the others."""
    what, order = call
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
    x = x.to(model.head.weight.device)
    with torch.set_grad_enabled(what == "train"):
        for place in order:
            x = model.layers[place](x)
        loss: Tensor = model.head(x).square().mean()
    if what == "train":
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach().cpu()


@pytest.mark.slow
@settings(max_examples=programs(5))
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW-fused"])
@given(
    program=st.lists(CALLS, min_size=4, max_size=20),
    budget=st.sampled_from(["15KiB", "20KiB", "30KiB"]),
    steps=st.booleans(),
    ahead=st.integers(0, 3),
)
def test_any_order_equals_a_resident_model(
    device: str,
    kind: str,
    program: list[tuple[str, list[int]]],
    budget: str,
    steps: bool,
    ahead: int,
) -> None:
    models = pair("forth", kind, device, budget=budget)
    swapper, made = models.swapper, models.made
    with swapper.auto(step=steps, ahead=ahead):
        for number, call in enumerate(program):
            what, order = call
            if what in ("prefetch", "evict"):
                getattr(swapper, what)(*(made.layers[place] for place in order))
            elif what == "save":
                assert_equal(made.state_dict(), models.whole.state_dict())
            else:
                assert torch.equal(*(do(*each, call, number) for each in models))
                report = swapper.report()
                assert report.resident_bytes <= report.budget_bytes and not report.in_use
    models.assert_same()


@NEEDS_GPU
@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("steps", [False, True], ids=["optimizer steps", "backward steps"])
def test_copies_that_take_long_change_no_bit(steps: bool, ahead: int) -> None:
    """Copies of 16 MiB and more beside short kernels: who does not wait reads what is not there."""
    make = partial(optim.AdamW, fused=True)
    models = Pair(linears(8, 2048), "cuda", make, budget="170MiB")
    with models.swapper.auto(step=steps, ahead=ahead):
        for step in range(8):
            x = torch.randn(16, 2048, device="cuda")
            losses = []
            for model, optimizer in models:
                losses.append(model(x).square().mean())
                losses[-1].backward()
                if model is models.made and step % 3 == 1:
                    models.swapper.prefetch(model[step], state=True)  # somebody reads it, not used
                    assert torch.isfinite(model[step].weight).all()
                optimizer.step()
                optimizer.zero_grad()
            assert torch.equal(*losses)
    models.assert_same()


@pytest.mark.parametrize("kind", ["SGD", "AdamW-fused", "Adafactor", "NAdam"])
def test_steps_in_backward_are_those_of_any_optimizer(device: str, kind: str) -> None:
    assert_trains_alike(pair("skipped", kind, device, budget="24KiB"), device, step=True)


def test_the_next_module_is_there_when_it_is_called(device: str) -> None:
    models = pair("forth", "SGD", device, budget="24KiB")
    made, swapper = models.made, models.swapper
    with swapper.auto():
        train(made, models.optimizers[0], device)
        before = swapper.report()
        x = torch.ones(6, 4, device=device)
        made(x, 0).sum().backward()
        after = swapper.report()
    assert after.hits - before.hits == 2 * LAYERS
    assert after.misses == before.misses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "steps"),
    [
        pytest.param("torch.compile(module)", True),
        pytest.param("module.compile()", False),
        pytest.param("torch.compile(module)", False, marks=pytest.mark.nightly),
        pytest.param("module.compile()", True, marks=pytest.mark.nightly),
    ],
)
def test_compiled_modules_are_loaded_on_use(device: str, way: str, steps: bool) -> None:
    graphs: list[Model] = []

    def compiled(model: Model) -> Model:
        def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
            graphs.append(model)
            return graph.forward

        torch.compiler.reset()
        for place, each in enumerate(model.layers):
            if way == "module.compile()":
                each.compile(backend=backend)
            else:
                model.layers[place] = torch.compile(each, backend=backend)
        return model

    models = pair("forth", "Adam", device, budget="24KiB")
    expected = train(compiled(models.whole), models.optimizers[1], device)
    with models.swapper.auto(step=steps):
        found = train(compiled(models.made), models.optimizers[0], device)
    assert all(map(torch.equal, found, expected))
    # They end where the batch norm within says that it runs, and are not made anew for each move.
    assert 0 < graphs.count(models.made) <= 3 * graphs.count(models.whole)


def test_a_whole_graph_with_modules_is_refused_by_name() -> None:
    models = pair("forth", "Adam", "cpu")
    compiled = torch.compile(models.made, backend="eager", fullgraph=True)
    refused = pytest.raises(Exception, match="offloaded modules move between host")
    with models.swapper.auto(), refused:
        compiled(torch.ones(2, 4), 0)


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_training_goes_on_after_a_failed_forward_or_backward(fails: str, device: str) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no")

    models = pair("forth", "SGD", device, budget="20KiB")
    with models.swapper.auto():
        for model, _ in models:
            part = model.layers[2].frozen  # once its layer has begun
            if fails == "forward":
                handle = part.register_forward_hook(fail)
            else:
                handle = model.layers[2].scale.register_hook(fail)
            with pytest.raises(ValueError, match="no"):
                model(torch.ones(6, 4, device=device), 0).sum().backward()
            handle.remove()
            model.zero_grad()
        assert not models.swapper.report().in_use
        models.swapper.evict(models.made.layers[2])
    assert_trains_alike(models, device)


def test_the_end_of_an_earlier_auto_keeps_the_later_one(device: str) -> None:
    models = pair("forth", "SGD", device, budget="20KiB")
    with models.swapper.auto():
        models.swapper.auto()
    assert not models.swapper.report().resident
    models.made.layers[0].frozen.weight.sum()  # an operation on a module's tensor brings it
    assert models.swapper.report().resident


def test_copies_of_a_model_have_no_swapper(device: str) -> None:
    models = pair("forth", "SGD", device)
    with models.swapper.auto():
        other = copy.deepcopy(models.made)
    other.to(device)(torch.ones(6, 4, device=device), 0).sum().backward()
    assert optim.SGD(other.parameters(), lr=0.1).step() is None


class Interrupted(nn.Module):
    """Is ended by an exception if one is set."""

    error: BaseException | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        y: Tensor = self.linear(x)
        return y


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_a_module_whose_forward_was_interrupted_is_in_use_no_longer(
    device: str, error: type[BaseException]
) -> None:
    layers = nn.Sequential(*(Interrupted() for _ in range(4)))
    swapper = Swapper(layers, device=device, budget="2KiB")
    x = torch.ones(2, 6, device=device)
    with swapper.auto():
        for place in (0, 1, 2, 3):
            layers[place].error = error()
            with pytest.raises(error):
                layers(x)
            layers(x).sum().backward()
            layers[place].error = error()
            with pytest.raises(error):
                layers(x)
            assert swapper.report().in_use == ()


def test_a_module_that_goes_on_after_its_interrupted_call_is_kept(device: str) -> None:
    """A module that calls itself, and goes on where that was interrupted."""
    used: list[tuple[str, ...]] = []

    class Nested(nn.Linear):
        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            used.append(swapper.report().in_use)
            if not depth:
                raise KeyboardInterrupt
            try:
                self(x, depth - 1)
            except KeyboardInterrupt:
                swapper.evict()
            used.append(swapper.report().in_use)
            y: Tensor = super().forward(x)
            return y

    layers = nn.Sequential(Nested(6, 6), nn.Linear(6, 6))
    swapper = Swapper(layers, device=device)
    with swapper.auto():
        layers(torch.ones(2, 6, device=device))
    assert used == [("0",)] * 5
    assert swapper.report().in_use == ()


@pytest.mark.parametrize("trains", [False, True])
def test_auto_lasts_as_long_as_the_model(trains: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = optim.SGD(model.parameters(), lr=0.1) if trains else None
    swapper = Swapper(model, optimizer, device="cpu")
    auto = weakref.ref(swapper.auto())
    del swapper
    gc.collect()
    assert auto() is not None
    del model, optimizer
    gc.collect()
    assert auto() is None


def _assign_data(layers: nn.Module) -> None:
    for each in layers.parameters():
        each.data = torch.full(each.shape, 0.25, device=each.device)


def _assign_state(layers: nn.Module) -> None:
    for each in layers.modules():
        if isinstance(each, nn.Linear):
            where = each.weight.device
            values = {"weight": torch.full((8, 8), 0.25), "bias": torch.full((8,), 0.25)}
            on_device = {name: value.to(where) for name, value in values.items()}
            each.load_state_dict(on_device, assign=True)


@pytest.mark.parametrize("assign", [_assign_data, _assign_state])
def test_weights_that_were_given_other_memory_on_the_device_are_trained(
    assign: Callable[[nn.Module], None], device: str
) -> None:
    models = Pair(linears(4, 8), device, budget="2KiB")
    models.swapper.auto()
    x = torch.ones(2, 8, device=device)
    for model, _ in models:
        for _ in range(2):
            model.zero_grad()
            model(x).square().sum().backward()
            assign(model)
        model(x).square().sum().backward()
        assert all(param.grad is not None for param in model.parameters())
    models.assert_same()


def test_a_graph_of_values_that_were_assigned_over_is_refused(device: str) -> None:
    layers = linears(3, 8)
    swapper = Swapper(layers, device=device)
    swapper.auto()
    result = layers(torch.ones(2, 8, device=device)).square().sum()
    layers[1].weight.data = torch.full_like(layers[1].weight, 0.25)
    layers(torch.ones(2, 8, device=device))
    swapper.evict()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


@pytest.mark.parametrize("saves", [False, True])
def test_a_change_through_data_after_a_backward_that_failed_is_kept(
    saves: bool, device: str
) -> None:
    layers = linears(3, 8)
    swapper = Swapper(layers, device=device)
    swapper.auto()

    def broken(gradient: Tensor) -> None:
        raise KeyError

    handle = layers[1].weight.register_hook(broken)
    with pytest.raises(KeyError):
        layers(torch.ones(2, 8, device=device)).sum().backward()
    handle.remove()
    if saves:
        layers.state_dict()
    else:
        assert not swapper.report().in_use
    for each in layers.parameters():
        each.data.fill_(0.25)
    assert all(saved.eq(0.25).all() for saved in layers.state_dict().values())
    layers[0](torch.ones(2, 8, device=device))
    swapper.evict()
    assert all(each.eq(0.25).all() for each in layers.parameters())
