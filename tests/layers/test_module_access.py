"""A module's tensors outside of any use: no operation of the program is lost, no value is stale."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from interrupts import EVERY, PACKAGE, Lines
from offloaded_models import Pair, linears, reloaded
from torch import Tensor, nn, optim

from speedtorch.layers import Swapper, flat_buffer, module_groups

WIDTH = 16
NBYTES = 4 * WIDTH * WIDTH


@dataclass
class Marks:
    """Counts work that is queued; notes what copies and freed memory wait for."""

    work: int = 0
    waits: list[tuple[str, int]] = field(default_factory=list)

    def check(self) -> None:
        assert self.waits
        assert all(number == self.work for _, number in self.waits), (self.waits, self.work)


class Mark:
    def __init__(self, number: int) -> None:
        self.number = number

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> Marks:
    """As if the CPU were a device with streams."""
    found = Marks()

    def beside(_: Any, stream: Any, after: Mark | None, *__: Any) -> Any:
        found.waits.append((stream._purpose, found.work if after is None else after.number))
        return nullcontext()

    monkeypatch.setattr(module_groups, "end_of_current", lambda _: Mark(found.work))
    monkeypatch.setattr(flat_buffer.FlatBuffer, "_beside", beside)
    return found


class Training:
    """Three layers; the first has been trained and is on the device."""

    def __init__(self, marks: Marks | None = None, *, budget: int | None = None) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.optimizer = optim.AdamW(self.layers.parameters())
        self.swapper = Swapper(self.layers, self.optimizer, device="cpu", budget=budget)
        self.marks = marks or Marks()
        for _ in range(2):
            self.swapper.evict()
            self.train()
        self.marks.waits.clear()

    @property
    def weight(self) -> Tensor:
        return self.layers[0].weight

    @property
    def state(self) -> dict[str, Tensor]:
        return self.optimizer.state[self.weight]

    def train(self) -> None:
        with self.swapper.use(self.layers[0]):
            self.layers[0](torch.ones(2, WIDTH)).sum().backward()
            self.optimizer.step()
            self.marks.work += 1
        self.optimizer.zero_grad()


def use(training: Training, *numbers: int) -> None:
    with training.swapper.use(*(training.layers[each] for each in numbers)):
        pass


ACCESSES: dict[str, Callable[[Training], object]] = {
    "a weight is read": lambda t: t.weight.norm(),
    "a weight is changed": lambda t: t.weight.detach().mul_(0.5),
    "the data of a weight are changed": lambda t: t.weight.data.mul_(0.5),
    "state is changed": lambda t: t.state["exp_avg"].zero_(),
    "all weights are read": lambda t: torch._foreach_norm(list(t.layers.parameters())),
    "the module is called": lambda t: t.layers[0](torch.ones(WIDTH)),
    "the optimizer is saved": lambda t: copy.deepcopy(t.state),
}
LEAVES: dict[str, Callable[[Training], object]] = {
    "evict": lambda t: t.swapper.evict(t.layers[0]),
    "another use": lambda t: use(t, 1, 2),
}


@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.parametrize("access", ACCESSES)
def test_memory_is_reused_behind_what_was_queued_after_the_use(
    access: str, leave: str, marks: Marks
) -> None:
    training = Training(marks, budget=int(4.2 * NBYTES))
    ACCESSES[access](training)
    marks.work += 1
    LEAVES[leave](training)
    marks.check()


def test_a_weight_is_used_on_after_its_swapper_is_gone() -> None:
    training = Training()
    weight, swapper = training.weight, weakref.ref(training.swapper)
    expected = weight.detach().clone()
    del training.swapper
    gc.collect()
    assert swapper() is None
    assert torch.equal(weight.mul(2), expected * 2)


@pytest.mark.parametrize("access", ["the data of a weight are changed", "state is changed"])
@pytest.mark.parametrize("within", [False, True], ids=["after the use", "within a use"])
def test_a_flush_waits_for_what_was_queued_before(access: str, within: bool, marks: Marks) -> None:
    training = Training(marks)
    training.swapper.flush()
    marks.waits.clear()
    with training.swapper.use(training.layers[0]) if within else nullcontext():
        ACCESSES[access](training)
        training.swapper.touch(training.layers[0])
        marks.work += 1
        training.swapper.flush()
    marks.check()


def test_memory_waits_for_no_more_than_the_last_use_where_there_was_no_access(
    marks: Marks,
) -> None:
    training = Training(marks)
    training.swapper.flush()
    before, marks.work = marks.work, marks.work + 1
    marks.waits.clear()
    training.swapper.evict(training.layers[0])
    assert {number for _, number in marks.waits} == {before}


def test_a_gradient_that_was_clipped_and_dropped_keeps_its_memory_until_then(
    marks: Marks,
) -> None:
    training = Training(marks)
    for _ in range(2):  # the second gradient lies in the module's own memory
        with training.swapper.use(training.layers[0]):
            training.layers[0](torch.ones(2, WIDTH)).sum().backward()
        if not marks.waits:
            training.swapper.evict()
    marks.waits.clear()
    nn.utils.clip_grad_norm_(training.layers.parameters(), 0.1)
    marks.work += 1
    training.optimizer.zero_grad()
    training.swapper.evict(training.layers[0])
    marks.check()


@pytest.mark.parametrize("where", ["evicted", "loaded", "prefetched"])
def test_changes_of_data_outside_of_a_use_are_kept(where: str) -> None:
    training = Training()
    training.swapper.evict()
    if where == "loaded":
        use(training, 0)
    if where == "prefetched":
        training.swapper.prefetch(training.layers[0])
    wanted = training.weight.detach().clone().mul_(2)
    training.weight.data.mul_(2)
    with training.swapper.use(training.layers[0]):
        assert torch.equal(training.weight, wanted)
    training.swapper.evict()
    assert torch.equal(training.weight, wanted)


@pytest.mark.parametrize("nested", [False, True], ids=["one use", "a use within a use"])
@pytest.mark.parametrize("is_evicted", [False, True], ids=["there", "evicted"])
def test_state_that_is_changed_in_a_use_is_stepped_with(is_evicted: bool, nested: bool) -> None:
    models = Pair(linears(1, WIDTH), "cpu", partial(optim.SGD, lr=0.1, momentum=0.9))
    swapper, layer = models.swapper, models.made[0]
    for step in range(3):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))
        with swapper.use(layer), swapper.use(layer) if nested else nullcontext():
            pass
        with swapper.use(layer):
            if nested:
                with swapper.use(layer):
                    pass
            assert [type(each) for each in layer.parameters()] == [nn.Parameter] * 2
            for model, optimizer in models:
                for each in model.parameters() if step else ():
                    optimizer.state[each]["momentum_buffer"].data.mul_(0.5)
            models.train(lambda model, x=x: model(x).square().mean())
        if is_evicted:
            swapper.evict()
    models.assert_same()


def test_what_reads_no_elements_is_no_access() -> None:
    training = Training()
    weight = training.weight
    tracked = type(weight)
    assert tracked is not nn.Parameter and issubclass(tracked, nn.Parameter)
    training.optimizer.zero_grad()
    assert (weight.shape, weight.device.type, weight.numel()) == ((WIDTH, WIDTH), "cpu", WIDTH**2)
    assert weight.grad is None and weight.requires_grad and weight.is_leaf
    assert type(weight) is tracked


@pytest.mark.parametrize(
    "then",
    [
        lambda t: t.swapper.use(t.layers[0]),
        lambda t: t.swapper.evict(),
        lambda t: t.swapper.close(),
    ],
    ids=["use", "evict", "close"],
)
def test_tensors_are_plain_again(then: Callable[[Training], Any]) -> None:
    training = Training()
    done = then(training)
    with done if hasattr(done, "__enter__") else nullcontext():
        assert type(training.weight) is nn.Parameter
        assert {type(each) for each in training.state.values()} == {Tensor}
        assert not vars(training.weight)


def test_copies_and_results_are_plain() -> None:
    training = Training()
    copied = copy.deepcopy(training.weight)
    assert type(copied) is nn.Parameter and torch.equal(copied, training.weight)
    training.train()
    saved = reloaded({"weight": training.weight, "state": training.state}, weights_only=True)
    assert type(saved["weight"]) is nn.Parameter
    assert torch.equal(saved["state"]["exp_avg"], training.state["exp_avg"])
    training.train()
    assert type(training.weight * 2) is Tensor


def test_a_model_with_buffers_of_another_dtype_is_saved_while_it_is_loaded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    optimizer = optim.Adam(model.parameters())
    swapper = Swapper(model, optimizer, device="cpu")
    model[0][0].weight.mark = "kept"
    with swapper.use(model[0]):
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    assert swapper.report().resident == ("0",)
    state = optimizer.state[model[0][0].weight]
    saved = reloaded({"model": model, "state": state}, weights_only=False)
    for name, each in saved["model"].state_dict().items():
        assert torch.equal(each, model.state_dict()[name]), name
    found = saved["model"][0][0].weight
    assert type(found) is nn.Parameter and found.requires_grad and found.mark == "kept"
    assert torch.equal(saved["state"]["exp_avg"], state["exp_avg"])


def test_a_view_that_is_kept_under_auto_keeps_its_values() -> None:
    layers = linears(4, 64)
    swapper = Swapper(layers, device="cpu", budget="50KiB")
    with swapper.auto():
        y = layers[0](torch.ones(2, 64))
        view = layers[0].weight.detach()
        wanted = view.clone()
        y = layers[3](layers[2](layers[1](y)))
        assert "0" not in swapper.report().resident
        assert torch.equal(view, wanted)
        y.sum().backward()
    assert torch.equal(view, wanted)
    assert all(each.grad is not None for each in layers.parameters())


def test_a_compiled_function_of_a_weight_is_an_access(marks: Marks) -> None:
    training = Training(marks)
    total = torch.compile(lambda: training.weight.sum(), backend="eager")
    for _ in range(2):
        assert torch.equal(total(), training.weight.sum())
        training.train()
        total()
        marks.waits.clear()
        marks.work += 1
        training.swapper.evict()
        marks.check()
        training.train()


@EVERY
def test_an_error_at_a_line_of_a_use_loses_no_module(every: int) -> None:
    names = ("residency", "offloaded_module", "module_groups", "module_tensors")
    files = [each for each in PACKAGE if each.endswith(tuple(f"layers/{n}.py" for n in names))]
    with Lines(files) as lines:
        use(Training(), 0)
    for at in range(1, len(lines.seen or ()) + 1, every):
        training = Training(budget=int(4.2 * NBYTES))
        wanted = training.weight.detach().clone()
        training.train()
        with Lines(files, at):
            use(training, 0)
        offloaded = training.swapper._offloaded[training.layers[0]]
        assert offloaded.groups.device_bytes == 0 or training.swapper.report().resident == ("0",)
        with training.swapper.use(training.layers[1], training.layers[2]):
            assert training.swapper.report().resident_bytes <= int(4.2 * NBYTES)
        training.swapper.evict()
        assert type(training.weight) is nn.Parameter
        assert not torch.equal(training.weight, wanted)


# ------------------------------------------------------------------------------------------------
# On a GPU, with work that is still queued when the module leaves

LARGE = 2048


@pytest.fixture
def late() -> Iterator[Callable[[], None]]:
    """Lets the GPU fall behind."""

    def fall_behind() -> None:
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)

    yield fall_behind
    torch.cuda.synchronize()


def two_large(budget: float | None = None) -> tuple[nn.Sequential, Swapper]:
    layers = linears(2, LARGE, bias=False)
    nn.init.ones_(layers[1].weight)
    nbytes = None if budget is None else int(budget * 4 * LARGE**2)
    return layers, Swapper(layers, device="cuda", budget=nbytes)


@NEEDS_GPU
@pytest.mark.parametrize("way", ["use", "evict", "prefetch"])
def test_a_read_after_the_use_sees_the_module(way: str, late: Callable[[], None]) -> None:
    layers, swapper = two_large(1.5)
    wanted = layers[0].weight.detach().double().sum().item()
    with swapper.use(layers[0]):
        pass
    late()
    total = layers[0].weight.detach().double().sum()
    if way == "evict":
        swapper.evict(layers[0])
    if way == "prefetch":
        swapper.prefetch(layers[1])
    with swapper.use(layers[1]):
        pass
    assert abs(total.item() - wanted) < 1e-3 * LARGE


@NEEDS_GPU
def test_a_view_that_is_kept_has_its_values_until_its_last_use(late: Callable[[], None]) -> None:
    layers, swapper = two_large()
    wanted = layers[0].weight.detach().double().sum().item()
    with swapper.use(layers[0]):
        view = layers[0].weight.detach()
    assert swapper.evict(layers[0]).held_by
    late()
    total = view.sum(dtype=torch.float64)
    del view
    with swapper.use(layers[1]):
        pass
    assert abs(total.item() - wanted) < 1e-3 * LARGE


@NEEDS_GPU
def test_a_module_on_a_side_stream_keeps_its_memory_until_then() -> None:
    layers, swapper = two_large(1.5)
    x, side = torch.randn(64, LARGE, device="cuda"), torch.cuda.Stream()
    wanted = x @ layers[0].weight.detach().cuda().T
    torch.cuda.synchronize()
    with swapper.use(layers[0]), torch.no_grad():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            y = layers[0](x)
    with swapper.use(layers[1]):
        pass
    torch.cuda.synchronize()
    assert torch.equal(y, wanted)


@NEEDS_GPU
def test_a_gradient_that_was_dropped_writes_over_no_other_module(late: Callable[[], None]) -> None:
    layers, swapper = two_large()
    x = torch.ones(2, LARGE, device="cuda")
    for step in range(2):  # the second gradient lies in the module's own memory
        with swapper.use(layers[0]):
            layers[0](x).sum().backward()
        if step == 0:
            swapper.evict()
    late()
    layers[0].weight.grad.mul_(0.0)
    layers[0].weight.grad = None
    swapper.evict(layers[0])
    with swapper.use(layers[1]):
        torch.cuda.synchronize()
        assert torch.equal(layers[1].weight, torch.ones_like(layers[1].weight))


@NEEDS_GPU
@pytest.mark.parametrize("within", [False, True], ids=["after the use", "within a use"])
def test_a_late_change_is_flushed(within: bool, late: Callable[[], None]) -> None:
    layers, swapper = two_large()
    wanted = layers[0].weight.detach() * 0.5
    with swapper.use(layers[0]):
        pass
    with swapper.use(layers[0]) if within else nullcontext():
        late()
        layers[0].weight.data.mul_(0.5)
        swapper.touch(layers[0])
        swapper.flush()
    swapper.evict()
    assert torch.equal(layers[0].weight, wanted)
