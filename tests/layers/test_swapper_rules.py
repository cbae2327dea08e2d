"""Unusual programs: several swappers, views, calls within calls, optimizers that count, no room."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from offloaded_models import Pair, linears, tensors_of
from torch import Tensor, nn, optim
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import speedtorch
from speedtorch import GradScaler
from speedtorch.layers import Swapper
from speedtorch.layers.module_tensors import is_offloaded
from speedtorch.layers.offloaded_module import OffloadedModule
from speedtorch.layers.tensor_group import TensorGroup


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


SGD = partial(optim.SGD, lr=0.1)


def train(models: Pair, *swappers: Swapper) -> None:
    """A step of both, with all modules in use."""
    x = torch.ones(2, models.made[0].in_features, device=models.swapper.device)
    with ExitStack() as used:
        for swapper in swappers or (models.swapper,):
            used.enter_context(swapper.use(*swapper.modules))
        models.train(lambda model: model(x).square().sum())


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


def test_modules_are_used_on_the_gpu_if_there_is_one() -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert Swapper(linears(1)).device.type == kind


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_an_optimizer_with_a_scaler_may_have_several_swappers(fused: bool, device: str) -> None:
    made = linears(4)
    whole = copy.deepcopy(made).to(device)
    x = torch.ones(2, 4, device=device)
    for layers in (made, whole):
        optimizer = optim.SGD(layers.parameters(), lr=0.1, momentum=0.9, fused=fused)
        parts = (made[:2], made[2:]) if layers is made else ()
        swappers = [Swapper(part, optimizer, device=device) for part in parts]
        scaler = GradScaler(device, init_scale=4.0)
        for _ in range(3):
            with ExitStack() as used:
                for swapper in swappers:
                    used.enter_context(swapper.use(*swapper.modules))
                scaler.scale(layers(x).square().sum()).backward()
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert same(made, whole)


def test_a_swapper_may_follow_one_whose_steps_a_scheduler_has_wrapped() -> None:
    models = Pair(linears(4), "cpu", SGD)
    optim.lr_scheduler.LambdaLR(models.optimizers[0], lambda _: 1.0)
    models.swapper.close()
    train(models, Swapper(models.made, models.optimizers[0], device="cpu"))
    assert same(models.made, models.whole)
    for call in (lambda: models.swapper.prefetch(models.made[0]), models.swapper.auto):
        with pytest.raises(RuntimeError, match="The Swapper is closed. Create another"):
            call()


@pytest.mark.parametrize("auto", [False, True])
def test_tensors_that_stand_in_for_a_moment_change_no_parameter(auto: bool) -> None:
    models = Pair(linears(2), "cpu")
    made, swapper = models.made, models.swapper
    if auto:
        swapper.auto()
    zeros = {"weight": torch.zeros(4, 4)}
    with nullcontext() if auto else swapper.use(made[0]):
        found = functional_call(made[0], zeros, (torch.ones(1, 4),))
    assert torch.equal(found, made[0].bias.detach().unsqueeze(0))
    models.assert_same()
    assert not bool(zeros["weight"].any())


SHARES: dict[str, Callable[[nn.Module], object]] = {
    "share_memory": lambda model: model.share_memory(),
    "model": ForkingPickler.dumps,
    "weight": lambda model: ForkingPickler.dumps(model.get_parameter("0.weight")),
    "state_dict": lambda model: ForkingPickler.dumps(model.state_dict()),
}


@pytest.mark.parametrize("is_evicted", [False, True])
@pytest.mark.parametrize("share", SHARES)
def test_modules_shared_with_other_processes_are_trained(
    share: str, is_evicted: bool, device: str
) -> None:
    models = Pair(linears(2), device)
    x = torch.ones(1, 4, device=device)
    with models.swapper.auto():
        for _ in range(3):
            models.train(lambda model: model(x).sum())
            if is_evicted:
                models.swapper.evict()
            SHARES[share](models.made)
            models.train(lambda model: model(x).sum())
            models.assert_same()


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("is_evicted", [False, True])
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("saves", [False, True])
def test_parameters_taken_out_of_a_module_are_the_programs(
    saves: bool, replaced: bool, is_evicted: bool, auto: bool, device: str
) -> None:
    kind, budget = partial(SGD, lr=0.125, momentum=0.5), "3.5KiB" if auto else None  # one module
    models = Pair(nn.Sequential(linears(2), linears(2)), device, kind, budget=budget)
    x = torch.ones(1, 4, device=device)
    taken: list[nn.Parameter] = []

    def loss(model: Any) -> Tensor:
        total: Tensor = model(x).square().sum()
        for bias in taken[model is models.whole :][:1]:
            total = total + bias.square().sum().to(device)
        return total

    def step() -> None:
        swapper = models.swapper
        with nullcontext() if auto else swapper.use(*swapper.modules):
            models.train(loss)
        if saves:
            models.made.state_dict()  # writes changes back

    with models.swapper.auto() if auto else nullcontext():
        step()
        if is_evicted:
            models.swapper.evict()
        for model, optimizer in models:
            layer = model[0][0]
            taken.append(layer.bias)
            layer.bias = None
            if replaced:
                layer.bias = nn.Parameter(torch.full((4,), 0.5, device=layer.weight.device))
                optimizer.add_param_group({"params": [layer.bias]})
        for _ in range(3):
            step()
        assert torch.equal(taken[0].to(device), taken[1])
        models.swapper.evict()
        step()
        assert torch.equal(taken[0].to(device), taken[1])
        models.assert_same()
        assert not is_offloaded(taken[0])


@dataclasses.dataclass(frozen=True)
class Record:
    """What a module gives, of a class that torch does not know."""

    rows: Tensor


class Positions(nn.Module):
    """Gives a view of its parameter, or of its buffer."""

    def __init__(self, give: Callable[..., Any], *, trained: bool) -> None:
        super().__init__()
        rows = torch.ones(64, 64)
        self.rows: Tensor
        self.give = give
        if trained:
            self.rows = nn.Parameter(rows)
        else:
            self.register_buffer("rows", rows)

    def forward(self, count: int) -> Any:
        return self.give(rows=self.rows[:count])


@pytest.mark.parametrize("give", [dict, Record])
@pytest.mark.parametrize("trained", [True, False])
def test_views_that_a_module_gives_keep_their_values(
    device: str, trained: bool, give: Callable[..., Any]
) -> None:
    made = nn.ModuleList([Positions(give, trained=trained), nn.Linear(128, 64)])
    made[1].requires_grad_(False)
    swapper = Swapper(made, device=device, budget="34KiB")
    with swapper.auto():
        given = made[0](8)
        rows = given["rows"] if give is dict else given.rows
        x = made[1](torch.ones(8, 128, device=device, requires_grad=True))
        assert swapper.report().resident == ("1",) and type(given) is give
        (x + rows).sum().backward()
    assert bool((rows == 1).all())
    if trained:
        assert torch.equal(made[0].rows.grad[:8].cpu(), torch.ones(8, 64))
        assert not made[0].rows.grad[8:].any()
    else:
        held = swapper.report().held_by
        assert any("0: a [8, 64] float32 view of rows" in each for each in held)


@pytest.mark.parametrize("was_auto", [False, True])
def test_views_that_are_kept_of_a_used_module_keep_their_values(
    device: str, was_auto: bool
) -> None:
    made = linears(2, 64)
    swapper = Swapper(made, device=device, budget="17KiB")
    if was_auto:
        swapper.auto().remove()
    before = made[0].weight.detach().clone()
    with swapper.use(made[0]):
        view = made[0].weight.detach()
        result = made[0](torch.ones(1, 64, device=device))
    with swapper.use(made[1]):
        assert torch.equal(view.cpu(), before) and result.requires_grad
    freed = swapper.evict(made[0])
    assert freed == 0 and freed.held_by == ("0: a [64, 64] float32 view of weight",)
    assert "held by 0: a [64, 64]" in repr(freed)


@pytest.mark.parametrize("graph", ["unknown", "freed"])
def test_views_keep_their_values_beside_a_graph_that_auto_does_not_wait_for(
    device: str, graph: str
) -> None:
    made = linears(2, 64).requires_grad_(False)
    swapper = Swapper(made, device=device, budget="17KiB")
    before = made[0].weight.clone()
    x = torch.ones(1, 64, device=device, requires_grad=True)
    with swapper.auto():
        with swapper.use(made[0]):
            result = nn.functional.linear(x, made[0].weight)  # no call of a module
        if graph == "freed":
            result = made[0](x)
            result.sum().backward()
        swapper.evict()
        with swapper.use(made[0]):
            view = made[0].weight.detach()
        with swapper.use(made[1]):
            assert swapper.report().resident == ("1",)
            assert swapper.report().held_by == ("0: a [64, 64] float32 view of weight",)
            assert torch.equal(view.cpu(), before) and result.requires_grad


def test_a_module_that_calls_itself_is_kept_until_all_calls_end() -> None:
    class Recursive(nn.Module):
        """Goes through another module within itself."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))

        def forward(self, x: Tensor, deep: int = 2) -> Tensor:
            if deep:
                x = other(self(x, deep - 1))
                seen.append("0" in swapper.report().in_use)
            return x @ self.weight

    seen: list[bool] = []
    made, other = Recursive(), nn.Linear(8, 8)
    swapper = Swapper([made, other], device="cpu")
    with swapper.auto():
        made(torch.ones(2, 8)).sum().backward()
    assert seen == [True, True] and not swapper.report().in_use


def test_a_backward_within_another_steps_nothing() -> None:
    models = Pair(linears(2), "cpu", partial(optim.Adam, lr=0.1))
    models.swapper.auto(step=True)
    x = torch.ones(2, 4, requires_grad=True)

    def loss(layers: nn.Sequential) -> Tensor:
        y = x
        for number in (0, 1, 0):
            y = checkpoint(layers[number], y, use_reentrant=True)
        return y.square().sum()

    for _ in range(2):
        models.train(loss)
    models.assert_same()


def test_statistics_of_a_module_that_came_later_are_written_back(device: str) -> None:
    made = nn.ModuleList([nn.Linear(4, 4), nn.Identity()])
    swapper = Swapper([made], device=device)
    made[1] = nn.BatchNorm1d(4)
    swapper.evict()
    with swapper.use(made):
        made[1](made[0](torch.randn(8, 4, device=device)))
        variance = made[1].running_var.cpu().clone()
    swapper.evict()
    assert torch.equal(made[1].running_var, variance)


@pytest.mark.parametrize("changed", ["not", "counted", "touched", "read", "backward"])
def test_what_is_prefetched_is_on_the_host_until_it_is_used(device: str, changed: str) -> None:
    models = Pair(linears(2), device, optim.Adam)
    swapper = models.swapper
    train(models)
    swapper.evict()
    misses = swapper.report().misses
    swapper.prefetch(models.made[0], state=True)
    assert swapper.report().resident == ("0",)
    for layers, optimizer in models:
        weight = layers[0].weight
        if layers is models.made:
            assert weight.is_cpu and optimizer.state[weight]["exp_avg"].is_cpu
        with torch.no_grad():
            if changed == "counted":
                weight.add_(1)
            if changed == "touched":
                weight.data.add_(1)
            if changed == "read":
                layers[0].load_state_dict(layers[1].state_dict())
        if changed == "backward":
            layers[0](torch.ones(1, 4, device=weight.device)).sum().backward()
    if changed == "touched":
        swapper.touch(models.made[0])
    train(models)
    assert swapper.report().misses - misses == 1  # the other
    models.assert_same()


@pytest.mark.parametrize("evicts", [False, True])
@pytest.mark.parametrize("how", ["at once", "after steps", "written"])
def test_an_optimizer_loads_its_own_state_dict_as_without_modules(
    how: str, evicts: bool, device: str
) -> None:
    models = Pair(linears(2), device, partial(optim.AdamW, lr=0.1))
    swapper = models.swapper

    def step(number: int, *, evicts: bool = False) -> None:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number)).to(device)
        with swapper.use(*models.made):
            models.train(lambda model: model(x).square().sum())
        if evicts:
            swapper.evict()

    step(0, evicts=True)
    step(1)
    states = [optimizer.state_dict() for optimizer in models.optimizers]
    if how == "after steps":
        step(2)
    for optimizer, state in zip(models.optimizers, states, strict=True):
        if how == "written":
            for of_one in state["state"].values():
                of_one["exp_avg"].fill_(0.5)
        if evicts:
            swapper.evict()
        optimizer.load_state_dict(state)
    for number in (3, 4):
        step(number, evicts=evicts)
    models.assert_same()


@pytest.mark.parametrize("between", ["nothing", "flush", "state_dict"])
def test_nothing_between_a_prefetch_and_a_use_forgets_a_change(device: str, between: str) -> None:
    made = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = optim.SGD(made.parameters(), lr=0.0, momentum=1.0)
    swapper = Swapper([made], optimizer, device=device)
    with swapper.use(made):
        made(torch.randn(3, 4, device=device)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    swapper.evict()
    swapper.prefetch(made, state=True)
    made(torch.randn(3, 4))  # on the host, where nobody counts what a batch norm changes
    weight, state = made[0].weight, optimizer.state[made[0].weight]["momentum_buffer"]
    for each in (weight, state):
        each.data.mul_(2)
    swapper.touch(made)
    expected = [each.clone() for each in (weight.detach(), state, made[1].running_mean)]
    if between == "flush":
        swapper.flush()
    if between == "state_dict":
        optimizer.state_dict()
        made.state_dict()
    with swapper.use(made):
        assert torch.equal(weight.cpu(), expected[0])
        assert torch.equal(made[1].running_mean.cpu(), expected[2])
        weight.grad = torch.zeros_like(weight)
        optimizer.step()  # which brings the state, and changes nothing
        assert torch.equal(weight.cpu(), expected[0]) and torch.equal(state.cpu(), expected[1])


@pytest.mark.parametrize(("budget", "ahead"), [(2048, 4), (2560, 3)])
def test_gradients_are_unscaled_wherever_they_are(device: str, budget: int, ahead: int) -> None:
    models = Pair(linears(6), device, SGD, budget=budget)
    models.swapper.auto(ahead=ahead)
    for layers, optimizer in models:
        scaler = GradScaler(device, init_scale=1024.0)
        for step in range(4):
            x = torch.ones(2, 4, device=device) + step
            scaler.scale(layers(x).square().mean()).backward()
            scaler.step(optimizer)  # some gradients are on their way for the next forward
            scaler.update()
            optimizer.zero_grad()
    models.assert_same()


@NEEDS_GPU
def test_gradients_in_host_memory_wait_for_the_scale() -> None:
    models = Pair(linears(2), "cuda", SGD)
    for layers, optimizer in models:
        scaler = GradScaler(init_scale=4.0)
        with models.swapper.use(*models.made):
            scaler.scale(layers(torch.ones(2, 4).cuda()).sum()).backward()
        models.swapper.evict()
        torch.cuda._sleep(200_000_000)  # cycles: the scale comes late
        scaler.step(optimizer)
    models.assert_same()


class Lucky(torch.amp.GradScaler):
    """Is taken for torch's, whose scale has come in time: else it may find infinite gradients."""

    def _unscale_grads_(
        self, optimizer: optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return super()._unscale_grads_(optimizer, inv_scale.cpu(), found_inf.cpu(), allow_fp16)


@NEEDS_GPU
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_a_scaler_that_does_not_wait_is_refused(fused: bool) -> None:
    models = Pair(linears(2), "cuda", partial(SGD, fused=fused))
    swapper = models.swapper
    x = torch.ones(2, 4).cuda()
    for layers, optimizer in models:
        is_made = layers is models.made

        def backward(
            scaler: torch.amp.GradScaler, layers: Any = layers, optimizer: Any = optimizer
        ) -> None:
            optimizer.zero_grad()
            with swapper.use(*models.made):
                scaler.scale(layers(x).sum()).backward()

        theirs = Lucky(init_scale=4.0)
        backward(theirs)
        if is_made:
            swapper.evict(layers[0])
            with pytest.raises(RuntimeError, match=r"Nothing has been stepped. Use speedtorch.Gra"):
                theirs.step(optimizer)
            assert not hasattr(optimizer, "grad_scale")
            theirs.update()
        for scaler in (GradScaler(init_scale=4.0), torch.amp.GradScaler(enabled=False)):
            backward(scaler)
            swapper.evict()
            scaler.step(optimizer)
        for is_early in (True, False):  # where nothing has left before it is divided
            theirs = torch.amp.GradScaler(init_scale=4.0)
            backward(theirs)
            if is_early:
                theirs.unscale_(optimizer)
                swapper.evict()
            theirs.step(optimizer)
    models.assert_same()


def test_a_scaler_is_refused_where_modules_are_stepped_in_backward(device: str) -> None:
    models = Pair(linears(3), device, SGD, lambda model: list(model[:2]))
    (model, optimizer), _ = models
    scaler = GradScaler(device, init_scale=4.0)
    before = model[2].weight.detach().clone()
    for steps in (True, False):
        with models.swapper.auto(step=steps):
            scaler.scale(model(torch.ones(2, 4, device=device)).sum()).backward()
            error = pytest.raises(RuntimeError, match="in the backward pass.*still scaled")
            with error if steps else nullcontext():
                scaler.step(optimizer)
        assert torch.equal(model[2].weight, before) == steps
        scaler.update()
        optimizer.zero_grad()


def test_a_failed_step_of_a_scaler_changes_nothing(device: str) -> None:
    make = partial(optim.Adam, lr=0.1, fused=True)
    models = Pair(linears(1, 16), device, make, budget=16 * 17 * 8 + 256)
    x = torch.ones(2, 16, device=device)
    for layers, optimizer in models:
        scaler = GradScaler(device, init_scale=4.0)
        if layers is models.made:
            with models.swapper.use(*layers):
                scaler.scale(layers(x).sum()).backward()
            with pytest.raises(RuntimeError, match="No module has been stepped"):
                scaler.step(optimizer)
            models.swapper.close()
            layers.to(device)
            scaler.update()
        else:
            scaler.scale(layers(x).sum()).backward()
        optimizer.zero_grad()
        scaler.scale(layers(x).sum()).backward()
        scaler.step(optimizer)
    assert same(models.made, models.whole)


def test_views_that_are_kept_of_state_keep_their_values(device: str) -> None:
    layers = linears(4, 8)
    optimizer = optim.Adam(layers.parameters())
    swapper = Swapper(layers, optimizer, device=device, budget=3600)
    x = torch.randn(4, 8, device=device)
    with swapper.auto(step=True, ahead=2):
        for _ in range(3):
            layers(x).square().mean().backward()
        views = [optimizer.state[each.weight]["exp_avg"].detach() for each in layers]
        values = [each.cpu().clone() for each in views]
        layers(x)
    # Modules that were loaded ahead may have evicted all state before the views were made.
    if device == "cpu" or any(each.is_cuda for each in views):
        assert any("view of exp_avg" in each for each in swapper.report().held_by)
    assert all(each.untyped_storage().nbytes() for each in views)
    assert all(torch.equal(each.cpu(), value) for each, value in zip(views, values, strict=True))


def test_more_modules_ahead_load_no_module_twice(device: str) -> None:
    copied_bytes = []
    for ahead in (0, 1, 3):
        layers = linears(12, 64, bias=False)
        optimizer = optim.Adam(layers.parameters())
        swapper = Swapper(layers, optimizer, device=device, budget=8 * 64 * 64 * 4)
        with swapper.auto(step=True, ahead=ahead):
            for step in range(4):
                if step == 2:
                    before = swapper.report().bytes_in
                layers(torch.ones(4, 64, device=device)).square().mean().backward()
        copied_bytes.append(swapper.report().bytes_in - before)
    assert max(copied_bytes) <= 1.3 * copied_bytes[0]


@NEEDS_GPU
def test_what_is_changed_after_a_use_is_written_back_when_that_is_done() -> None:
    layers = linears(2, 64)
    swapper = Swapper(layers, device="cuda", budget="20KiB")
    with swapper.use(layers[0]):
        weight = layers[0].weight
    expected = weight.detach().cpu() + 1
    torch.cuda._sleep(200_000_000)  # cycles: what is queued after it comes late
    with torch.no_grad():
        weight.add_(1)
    with swapper.use(layers[1]):
        assert weight.device.type == "cpu" and torch.equal(weight, expected)


@pytest.mark.parametrize("is_named", [True, False], ids=["one module", "all modules"])
def test_changes_through_data_are_kept_by_touch(is_named: bool, device: str) -> None:
    layers = linears(2)
    swapper = Swapper(layers, device=device)
    expected = [layer.weight.detach() * 2 for layer in layers]
    with swapper.use(layers):
        data = [layer.weight.data for layer in layers]
        swapper.flush()
        for each in data:
            each.mul_(2)
        swapper.touch(*layers if is_named else ())
    swapper.evict()
    for layer, weight in zip(layers, expected, strict=True):
        assert torch.equal(layer.weight, weight)


@pytest.mark.parametrize("call", ["use", "prefetch", "evict", "touch"])
def test_what_is_no_module_is_refused(call: str) -> None:
    swapper = Swapper(linears(1), device="cpu")
    unknown = "Linear neither is nor contains .* The offloaded modules are 0"
    for given, kind, text in (
        (nn.Linear(2, 2), ValueError, unknown),
        ("0", TypeError, "modules: expected an nn.Module, got str"),
    ):
        with pytest.raises(kind, match=text):
            called = getattr(swapper, call)(given)
            if call == "use":
                called.__enter__()


TWICE = nn.Identity()


@pytest.mark.parametrize(
    ("modules", "kind", "text"),
    [
        (3, TypeError, "modules: expected an nn.Module or a list, got int"),
        ([], ValueError, "modules: expected at least one nn.Module, got none"),
        (nn.Identity(), ValueError, r"modules: Identity has no child modules. Pass \[module\]"),
        ([nn.Identity(), 3], TypeError, "modules: expected nn.Module, got int as 1"),
        (
            nn.Sequential(torch.jit.script(nn.ReLU())),
            NotImplementedError,
            "modules: 0 has a RecursiveScriptModule, and torch.jit modules have no hooks",
        ),
        (
            [TWICE, nn.Sequential(TWICE)],
            ValueError,
            "modules: 1 and 0 share a submodule. Offload both as one",
        ),
    ],
)
def test_modules_that_give_no_modules_are_refused(
    modules: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        Swapper(modules, device="cpu")


def test_a_module_in_use_is_not_evicted_by_name() -> None:
    layers = linears(2)
    swapper = Swapper(layers, device="cpu")
    with swapper.use(layers):
        with pytest.raises(RuntimeError, match=r"evict: modules \['0', '1'\] are in use. Call"):
            swapper.evict(layers)
        assert swapper.report().resident == ("0", "1")
    swapper.evict(layers)
    assert not swapper.report().resident


def test_a_swapper_without_an_optimizer_steps_none() -> None:
    swapper = Swapper(linears(1), device="cpu")
    for step in (swapper.step, lambda: swapper.auto(step=True)):
        with pytest.raises(RuntimeError, match="the Swapper has no optimizer. Pass one"):
            step()
    for ahead in (-1, 1.5, "2", None, True):
        with pytest.raises(ValueError, match=f"ahead must be an int of at least 0, got {ahead!r}"):
            swapper.auto(ahead=ahead)


def test_a_use_evicts_other_modules_if_the_device_has_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = linears(2)
    swapper = Swapper(layers, device="cpu", budget="1MiB")
    with swapper.use(layers[0]):
        pass
    load = OffloadedModule.load

    def load_alone(module: OffloadedModule, *, state: bool) -> None:
        if set(swapper.report().resident) - {module.name}:
            raise torch.OutOfMemoryError("pretended")
        load(module, state=state)

    monkeypatch.setattr(OffloadedModule, "load", load_alone)
    with swapper.use(layers[1]):
        assert swapper.report().resident == ("1",)
        with pytest.raises(torch.OutOfMemoryError, match="pretended"):
            swapper.use(layers[0]).__enter__()


def test_a_module_that_finds_no_memory_for_its_state_is_on_the_host(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = Pair(linears(2), device, optim.Adam)
    train(models)
    models.swapper.evict()
    loads, load = [], TensorGroup.load

    def load_first(group: TensorGroup, *args: Any, **kwargs: Any) -> None:
        loads.append(group)
        if len(loads) == 2:
            raise torch.OutOfMemoryError("pretended")
        load(group, *args, **kwargs)

    monkeypatch.setattr(TensorGroup, "load", load_first)
    with pytest.raises(torch.OutOfMemoryError, match="pretended"):
        models.swapper.use(models.made[0]).__enter__()
    assert not models.swapper.report().resident and models.made[0].weight.is_cpu
    models.assert_same()


def test_a_sparse_gradient_is_refused_where_it_came(device: str) -> None:
    layers = nn.ModuleList([nn.Embedding(3, 2, sparse=True)])
    swapper = Swapper(layers, device=device)
    refused = pytest.raises(ValueError, match="the gradient of weight: expected a dense tensor")
    with refused, swapper.use(layers[0]):
        layers[0](torch.tensor([1], device=device)).sum().backward()
    layers.zero_grad()
    assert not swapper.report().in_use and swapper.evict() and not swapper.report().resident


def test_bytes_are_as_many_as_torch_and_the_tensors_count(device: str) -> None:
    models = Pair(linears(6, 256), device, optim.Adam)
    swapper = models.swapper
    for _ in range(2):
        train(models)
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        resident = swapper.report().resident_bytes
        freed = swapper.evict()
    tensors = tensors_of(models.made, models.optimizers[0]).values()
    needed = sum(each.nbytes for each in tensors if each.dim())  # steps stay as they are
    assert needed <= swapper.report().host_bytes <= 1.02 * needed
    assert freed == resident == swapper.report().host_bytes
    if device == "cuda":
        assert 0 <= before - torch.cuda.memory_allocated() - freed <= 512 * 2 * 6


def test_a_step_without_room_steps_nothing() -> None:
    made = nn.ModuleList([nn.Linear(16, 16, bias=False), nn.Linear(32, 32, bias=False)])
    optimizer = optim.Adam(made.parameters(), lr=0.1)
    swapper = Swapper(made, optimizer, device="cpu", budget="9KiB")
    for layer in (made[1], made[0]):
        with swapper.use(layer):
            layer(torch.ones(1, layer.in_features)).sum().backward()
    before = copy.deepcopy(made)
    with pytest.raises(RuntimeError, match="to step module '1' with its .* No module has been"):
        optimizer.step()
    assert same(made, before)
    assert not optimizer.state


def test_gradients_that_are_gone_take_no_room() -> None:
    made = linears(2, 16, bias=False)
    optimizer = optim.SGD(made.parameters(), lr=0.1)
    swapper = Swapper(made, optimizer, device="cpu", budget="2KiB")
    for layer in made:
        with swapper.use(layer):
            layer(torch.ones(1, 16)).sum().backward()
    swapper.evict()
    optimizer.zero_grad()
    for _ in range(2):
        with swapper.use(*made):
            assert swapper.report().resident_bytes == 2 << 10
    assert swapper.report().hits == 2


def test_a_module_that_never_fits_keeps_no_other_away() -> None:
    made = nn.ModuleList([nn.Linear(64, 64), nn.Linear(8, 8), nn.Linear(8, 8)])
    swapper = Swapper(made, device="cpu", budget="4KiB")
    swapper.prefetch(made[0])
    swapper.prefetch(made[1])
    with swapper.use(made[2]):
        pass
    assert set(swapper.report().resident) == {"1", "2"}
    with pytest.raises(RuntimeError, match="too small for the modules in use, .* Increase the"):
        swapper.use(made[0]).__enter__()


class Complex(nn.Module):
    """Its gradient is a conjugated view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.conj() * x).real.sum()


def test_gradients_that_torch_conjugates_lazily_move(device: str) -> None:
    models = Pair(Complex(), device, SGD, lambda model: [model])
    x = torch.tensor([1 + 2j, 3, 1j, 4], device=device)
    with models.swapper.use(models.made):
        for model, _ in models:
            model(x).backward()
    models.assert_same()


class Recorded(nn.Linear):
    """Gives a record, which is no pytree of torch's."""

    def forward(self, x: Tensor) -> Record:
        return Record(super().forward(x))


@pytest.mark.parametrize("steps", [False, True])
def test_results_within_a_record_are_found(steps: bool) -> None:
    made = nn.ModuleList(Recorded(16, 16) for _ in range(3))
    before = copy.deepcopy(made)
    optimizer = optim.SGD(made.parameters(), lr=0.1)
    with Swapper(made, optimizer, device="cpu", budget="4KiB").auto(step=steps):
        x = torch.ones(1, 16)
        for layer in made:
            x = layer(x).rows
        x.sum().backward()
    assert all(each.grad is None for each in made.parameters()) == steps
    assert same(made, before) != steps


@pytest.mark.parametrize(("budget", "text"), [(None, "None"), ("64KiB", "64.0 KiB")])
def test_its_repr_names_the_modules_the_device_and_the_budget(
    budget: str | None, text: str
) -> None:
    swapper = Swapper(linears(5), device="cpu", budget=budget)
    offloaded = "0: Linear, 1: Linear, 2: Linear, 2 more"
    assert repr(swapper) == f"Swapper({offloaded}; device=cpu, budget={text})"
    swapper.close()
    assert repr(swapper) == "Swapper(closed)"


@pytest.mark.parametrize("is_attached_first", [True, False])
def test_an_optimizer_with_attached_rows_is_refused_before_anything_is_stepped(
    is_attached_first: bool,
) -> None:
    """Rows without state are stepped beside the modules."""
    rows, layers = speedtorch.Embedding(10, 8, device="cpu"), linears(2, 8)
    optimizer = optim.Adam([*rows.parameters(), *layers.parameters()], lr=0.1)
    refused = pytest.raises(
        ValueError, match=r"Adam has the rows of an Embedding.*Create a separate optimizer for the"
    )
    if is_attached_first:
        speedtorch.attach(optimizer, rows)
        with refused:
            Swapper(layers, optimizer, device="cpu")
        return
    swapper = Swapper(layers, optimizer, device="cpu")
    speedtorch.attach(optimizer, rows)
    before = [param.detach().clone() for param in (rows.weight, *layers.parameters())]
    with swapper.auto():
        layers(rows(torch.arange(5))).sum().backward()
        with refused:
            optimizer.step()
    after = [param.detach() for param in (rows.weight, *layers.parameters())]
    assert all(map(torch.equal, before, after))
