"""A whole training state, asleep in host memory and awake: training is as if it had not slept."""

from __future__ import annotations

import copy
import gc
import linecache
import sys
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from interrupts import EVERY, PACKAGE, Lines, every_interrupt, out_of_memory
from offloaded_models import COMMON_OPTIMIZERS, Layer, assert_equal, copies, tensors_of
from torch import Tensor, nn, optim
from torch.testing._internal.two_tensor import TwoTensor

import speedtorch
from speedtorch.layers import TrainingState, offloaded_storage, storage_offloader
from speedtorch.layers.state_tensors import PARTS, StatePart
from speedtorch.layers.storage_offloader import fingerprint
from speedtorch.nn.graphed import graphed

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    **COMMON_OPTIMIZERS,
    "AdamW-fused": lambda parameters: optim.AdamW(parameters, fused=True),
    "Adafactor": lambda parameters: optim.Adafactor(parameters, lr=0.1),
    "LBFGS": lambda parameters: optim.LBFGS(parameters, lr=0.1, max_iter=3),
    "Muon": lambda parameters: optim.Muon(
        [param for param in parameters if param.dim() == 2 and param.requires_grad]
    ),
}


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=NEEDS_GPU),
        pytest.param("cuda, addresses are kept", marks=NEEDS_GPU),
    ]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where states are, which keep addresses or do not."""
    name, _, are_kept = request.param.partition(",")
    if are_kept:
        kept = partial(TrainingState, keep_addresses=True)
        monkeypatch.setattr(sys.modules[__name__], "TrainingState", kept)
    return str(name)


class Training:
    """A layer, its optimizer and its state, which trains on batches by number."""

    def __init__(
        self, device: str, make: Callable[..., optim.Optimizer] = optim.Adam, **kept: bool
    ) -> None:
        torch.manual_seed(0)
        self.layer = Layer().to(device)
        self.device, self.steps = device, 0
        self.optimizer = make(self.layer.parameters())
        self.state = TrainingState(self.layer, self.optimizer, **kept)

    def step(self, count: int = 1) -> Training:
        def closure() -> Tensor:
            random = torch.Generator().manual_seed(self.steps)
            batch = torch.randn(8, 4, generator=random).to(self.device)
            self.optimizer.zero_grad()
            loss: Tensor = self.layer(batch).square().mean()
            loss.backward()
            return loss

        for _ in range(count):
            self.optimizer.step(closure)
            self.steps += 1
        return self

    def tensors(self) -> dict[str, Tensor]:
        """All of the layer and the optimizer, by name."""
        return tensors_of(self.layer, self.optimizer)


def assert_trains_on(
    training: Training, make: Callable[..., optim.Optimizer] = optim.Adam, steps: int = 3
) -> None:
    """What comes is what it would be without any sleep."""
    other = Training(training.device, make).step(training.steps)
    assert_equal(training.step(steps).tensors(), other.step(steps).tensors())


def is_within(host: Tensor, tensor: Tensor) -> bool:
    return 0 <= tensor.data_ptr() - host.data_ptr() < host.nbytes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_as_if_it_had_not_slept(name: str, device: str) -> None:
    training = Training(device, OPTIMIZERS[name])
    for parts in (PARTS, ["optimizer"], ["weights"], ["gradients", "weights"], PARTS):
        training.step()
        with training.state.asleep(parts):
            pass
    assert_trains_on(training, OPTIMIZERS[name])


def test_offloaded_tensors_are_on_the_host_with_the_same_values(device: str) -> None:
    training = Training(device).step(2)
    before = copies(training.tensors())
    objects = {name: id(tensor) for name, tensor in training.tensors().items()}
    report = training.state.sleep()
    assert training.state.is_asleep and list(report.asleep) == list(PARTS)
    weight, host = training.layer.into.weight, training.state._parts["weights"]._host
    assert is_within(host, weight)
    training.layer(torch.ones(8, 4, device=device))  # over the link
    training.layer.load_state_dict(before, strict=False)
    assert_equal(training.tensors(), before)
    assert training.layer.into.weight is training.layer.back.weight
    training.state.wake()
    assert not training.state.is_asleep
    assert_equal(training.tensors(), before)
    assert {name: id(tensor) for name, tensor in training.tensors().items()} == objects
    assert not is_within(host, weight)


def test_parts_sleep_and_wake(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(device).step()
    state = training.state
    assert list(state.sleep("optimizer").asleep) == ["optimizer"]
    assert list(state.sleep(["weights", "optimizer"]).asleep) == ["weights", "optimizer"]
    assert list(state.wake(["weights"]).asleep) == ["optimizer"]
    training.layer(torch.ones(3, 4, device=device))
    with state.asleep(["weights", "optimizer"]) as report:
        assert list(report.asleep) == ["weights", "optimizer"]
    assert "asleep=['optimizer']" in repr(state)
    assert state.wake().asleep == {} and state.wake().bytes_copied == 0
    assert "asleep=[]" in repr(state)

    def refused(count: int) -> Tensor:
        raise MemoryError

    monkeypatch.setattr(state._parts["optimizer"], "_host_bytes", refused)
    state._parts["optimizer"]._host = torch.empty(0)
    with pytest.raises(MemoryError), state.asleep():
        raise AssertionError
    assert not state.is_asleep


def test_views_and_tensors_with_gaps_or_no_elements_are_unchanged(device: str) -> None:
    layer = nn.Linear(6, 4, device=device)
    flat = torch.arange(40.0, device=device)
    layer.register_buffer("odd", flat[1:37].view(6, 6).t()[::2, 1:])
    layer.register_buffer("same", flat[3:9])
    layer.register_buffer("none", torch.empty(0, device=device))
    odd, view = layer.get_buffer("odd").clone(), flat[5:8]
    strides = layer.get_buffer("odd").stride()
    state = TrainingState(layer)
    assert state.sleep().left == ()
    assert torch.equal(layer.get_buffer("odd"), odd)
    layer.get_buffer("same")[2] = 77.0  # element 5 of all
    state.wake()
    assert view.tolist() == [77.0, 6.0, 7.0] and flat[39] == 39.0
    assert layer.get_buffer("odd").stride() == strides
    assert layer.none.shape == (0,) and layer.none.device.type == device


def test_saved_tensors_raise_while_offloaded_and_are_right_after_wake(device: str) -> None:
    training = Training(device).step()
    weight = training.layer.into.weight
    batch = torch.ones(8, 4, device=device)
    expected = torch.autograd.grad(training.layer(batch).sum(), weight)[0]
    loss = training.layer(batch).sum()
    training.state.sleep()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(retain_graph=True)
    training.state.wake()
    assert torch.equal(torch.autograd.grad(loss, weight, retain_graph=True)[0], expected)
    with training.state.asleep(), torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_memory_assigned_while_offloaded_is_kept(device: str) -> None:
    layer = nn.Linear(2, 2, device=device)
    state = TrainingState(layer)
    state.sleep()
    layer.weight.data = given = torch.ones(2, 2)
    layer.bias.data = torch.ones(3)
    state.wake()
    assert layer.weight.data_ptr() == given.data_ptr()
    assert layer.bias.shape == (3,)


def test_discarded_values_are_lost_and_use_no_host_memory(device: str) -> None:
    training = Training(device).step()
    state = training.state
    state.sleep(discard=["weights", "gradients"])
    assert state.host_bytes == state._parts["optimizer"].host_nbytes
    assert training.layer.into.weight.numel() == 0
    with pytest.raises(RuntimeError, match="size mismatch for into.weight"):
        training.layer.load_state_dict(Training(device).layer.state_dict())
    state.wake()
    for param in training.layer.parameters():
        assert param.device.type == device and param.isnan().all()
    assert training.layer.norm.num_batches_tracked == -1
    fresh = Training(device).step()
    training.layer.load_state_dict(fresh.layer.state_dict())
    training.layer.zero_grad()
    assert_trains_on(training)


def load_data(module: nn.Module, values: dict[str, Tensor]) -> None:
    """Writes values without torch's counting it; of a tensor as many of them as there are."""
    for name, value in values.items():
        own = module.state_dict()[name].data
        (own[: len(value)] if value.dim() else own).copy_(value)


def load_counted(module: nn.Module, values: dict[str, Tensor]) -> None:
    module.load_state_dict(values, strict=False)


def without(*names: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda values: {name: value for name, value in values.items() if name not in names}


@pytest.mark.parametrize(
    ("load", "chosen", "missing"),
    [
        (load_counted, lambda _: {}, "0.weight, 0.bias, 1.weight, 1.bias and 1 more"),
        (load_counted, without("number"), "number"),
        (load_data, without("0.bias", "1.bias", "number"), "0.bias, 1.bias, number"),
        (load_data, lambda values: {**values, "0.bias": values["0.bias"][:1]}, "0.bias, number"),
    ],
    ids=["nothing", "no integer", "two missing", "a part of a tensor"],
)
def test_a_forward_raises_until_all_discarded_values_are_loaded(
    load: Callable[..., None], chosen: Callable[..., Any], missing: str, device: str
) -> None:
    layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to(device)
    layers.register_buffer("number", torch.tensor(-1, device=device))
    batch = torch.ones(4, 2, device=device)
    saved, expected = copies(layers.state_dict()), layers(batch)
    state = TrainingState(layers)
    state.sleep(discard=["weights"])
    with pytest.raises(RuntimeError, match=r"^0\.weight, .* Call wake\(\) and load all weights"):
        layers(batch)
    state.wake()
    load(layers, chosen(saved))
    for _ in range(2):
        for module in (layers, layers[0]):
            with pytest.raises(RuntimeError, match=f"^{missing}: values discarded by sleep"):
                module(batch)
        with state.asleep():
            pass
    load_counted(layers, saved)
    assert torch.equal(layers(batch), expected)
    assert not any(module._forward_pre_hooks for module in layers.modules())


def test_weights_that_were_replaced_are_not_missing(device: str) -> None:
    layer = nn.Linear(2, 2, device=device)
    state = TrainingState(layer)
    state.sleep(discard=["weights"])
    layer.weight.data = torch.ones(2, 2, device=device)
    layer.bias = None
    state.wake()
    assert layer(torch.ones(2, device=device)).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("part", "missing"), [("optimizer", "state of scale.exp_avg, "), ("gradients", "gradient")]
)
def test_a_step_raises_until_discarded_state_is_loaded(
    part: StatePart, missing: str, device: str
) -> None:
    training, other = Training(device).step(2), Training(device).step(2)
    before = copies(training.layer.state_dict())
    training.state.sleep(discard=[part])
    training.state.wake()
    with pytest.raises(RuntimeError, match=f"{missing}.* discarded by sleep"):
        training.optimizer.step()
    assert_equal(training.layer.state_dict(), before)
    if part == "optimizer":
        training.optimizer.load_state_dict(other.optimizer.state_dict())
    else:
        training.optimizer.zero_grad()
    assert_trains_on(training)


def test_buffers_outside_of_state_dicts_are_not_discarded(device: str) -> None:
    layer = nn.Linear(2, 2, device=device)
    layer.register_buffer("table", torch.arange(5.0, device=device), persistent=False)
    layer.register_buffer("tied", layer.table)
    with TrainingState(layer).asleep(discard=["weights"]):
        assert layer.weight.numel() == 0 and layer.table.tolist() == [0, 1, 2, 3, 4]
    assert layer.weight.isnan().all()
    assert layer.table is layer.tied and layer.table.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("names", [{"0.weight"}, {"0.bias", "1.weight"}])
def test_weights_assigned_while_offloaded_are_not_overwritten(names: set[str], device: str) -> None:
    layers = nn.Sequential(*(nn.Linear(2, 2, device=device) for _ in range(3)))
    state = TrainingState(layers)
    with state.asleep():
        assigned = {name: tensor for name, tensor in layers.state_dict().items() if name in names}
        layers.load_state_dict(assigned, assign=True, strict=False)
    with torch.no_grad():
        for param in layers.parameters():
            param.add_(1)
    before = copies(layers.state_dict())
    for _ in range(2):
        with state.asleep() as report:
            assert set(report.left) == names
            assert_equal(layers.state_dict(), before)
        assert_equal(layers.state_dict(), before)


@pytest.mark.parametrize("together", [False, True])
def test_unchanged_weights_are_not_copied_again(
    together: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not together:
        monkeypatch.setattr(storage_offloader, "_GROUP", 64 * 64 * 4)
    model = nn.Sequential(*(nn.Linear(64, 64, device=device) for _ in range(3)))
    model[:2].requires_grad_(False)
    state, nbytes = TrainingState(model), 64 * 65 * 4
    assert state.sleep().bytes_copied == 3 * nbytes
    assert state.wake().bytes_copied == 3 * nbytes
    assert state.sleep().bytes_copied == nbytes
    state.wake()
    model[0].weight.data[3, 5] += 1  # torch counts no change
    model[1].weight.data.copy_(model[1].weight.data.flip(0))
    expected = copies(dict(model.named_parameters()))
    changed = nbytes + 2 * 64 * 64 * 4 + together * 2 * 64 * 4  # small ones go together
    assert state.sleep().bytes_copied == changed
    assert_equal(dict(model.named_parameters()), expected)
    state.wake()
    assert_equal(dict(model.named_parameters()), expected)


def test_values_that_an_interrupted_sleep_overwrote_are_copied_again(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which tensor is frozen decides where each is: the two change places on the host."""
    model = nn.ParameterList(torch.full((64,), value, device=device) for value in (1.0, 2.0))
    state = TrainingState(model)

    def freeze(number: int) -> None:
        for at, param in enumerate(model):
            param.requires_grad_(at != number)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    freeze(0)
    state.sleep()
    state.wake()
    freeze(1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(storage_offloader.StorageOffloader, "_changed", interrupt)
        state.sleep()
    freeze(0)
    state.sleep()
    state.wake()
    assert [param.unique().tolist() for param in model] == [[1.0], [2.0]]


def test_only_changed_groups_are_copied(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ParameterList(torch.zeros(256, 256, device=device) for _ in range(40))
    state, nbytes = TrainingState(model), 1 << 18
    monkeypatch.setattr(offloaded_storage, "_CHUNK", 3 * nbytes)
    monkeypatch.setattr(storage_offloader, "_GROUP", 5 * nbytes)
    for param in model[:30]:
        param.requires_grad_(False)
    for _ in range(2):
        state.sleep()
        state.wake()
        assert state.sleep().bytes_copied == 10 * nbytes
        state.wake()
    model[7].data.add_(1)
    assert state.sleep().bytes_copied == (10 + 5) * nbytes  # with its group


def test_writes_to_a_kept_state_dict_do_not_change_the_next_wake(device: str) -> None:
    layer = nn.Linear(8, 8, device=device).requires_grad_(False)
    state, expected = TrainingState(layer), layer.weight.clone()
    with state.asleep():
        kept = layer.state_dict()
    kept["weight"].zero_()
    with state.asleep():
        assert torch.equal(layer.weight, expected)
    assert torch.equal(layer.weight, expected)


def test_host_memory_is_exact_and_made_once(device: str) -> None:
    model = nn.ModuleList(nn.Linear(100, 100, device=device) for _ in range(20))
    state = TrainingState(model)
    addresses = set()
    for _ in range(3):
        state.sleep()
        addresses.add(model[0].weight.data_ptr())
        nbytes = sum(param.nbytes for param in model.parameters())
        assert nbytes <= state.host_bytes <= nbytes + 40 * 512
        state.wake()
    assert len(addresses) == 1
    state.release()
    assert state.host_bytes == 0
    state.sleep()
    state.release()  # what sleeps keeps its own
    assert state.host_bytes and model[0].weight.isfinite().all()


def test_tensors_dropped_while_offloaded_use_no_memory_after_wake(device: str) -> None:
    training = Training(device).step(2)
    saved = copy.deepcopy(training.optimizer.state_dict())
    training.state.sleep(["gradients", "optimizer"])
    training.optimizer.zero_grad()
    training.optimizer.load_state_dict(saved)
    assert training.state.wake().bytes_copied == 0
    training.state.sleep(["weights"])
    training.layer.frozen.double()
    assert training.state.wake().bytes_copied < sum(
        tensor.nbytes for tensor in training.layer.state_dict().values()
    )
    training.layer.frozen.float()
    assert_trains_on(training)


def test_memory_of_a_view_is_loaded_after_its_tensors_are_dropped(device: str) -> None:
    layer = nn.Linear(2, 2, device=device)
    flat = torch.arange(6.0, device=device)  # as a bucket of gradients
    layer.weight.grad, layer.bias.grad = flat[:4].view(2, 2), flat[4:]
    state = TrainingState(layer)
    state.sleep(["gradients"])
    layer.zero_grad()
    state.wake()
    assert flat.tolist() == list(range(6))


def test_versions_are_device_versions_after_memory_was_assigned(device: str) -> None:
    layer = nn.Linear(2, 2, device=device)
    state, before = TrainingState(layer), layer.weight._version
    for number in range(1, 4):
        with state.asleep():
            layer.weight.data = torch.ones(2, 2, device=device)
        assert layer.weight._version == before + number


@pytest.mark.parametrize("count", [1, 3, 8, 16, 100, 4096, 33_000])
def test_every_change_of_bytes_changes_the_fingerprint(count: int, device: str) -> None:
    random = torch.Generator().manual_seed(count)
    values = torch.randint(256, (count,), generator=random, dtype=torch.uint8).to(device)
    seen = {int(fingerprint(values))}

    def is_new(changed: Tensor) -> bool:
        mark = int(fingerprint(changed))
        known, _ = mark in seen, seen.add(mark)
        return not known

    assert not is_new(values.clone())
    for at in {0, count // 2, count - 1}:
        for bit in range(8):
            changed = values.clone()
            changed[at] ^= 1 << bit
            assert is_new(changed)
    if count < 16:
        return
    for shift in (1, 8):
        assert is_new(values.roll(shift))
    signs = values.clone()
    signs[7::8] ^= 128  # of every word
    assert is_new(signs)
    for one, other in ((0, 1), (0, 8), (3, 12)):
        changed = values.clone()
        changed[one] += 3
        changed[other] -= 1
        assert is_new(changed)


class Attributed(Tensor):
    """As bitsandbytes' tensors: more of them are among the attributes of an attribute."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Any) -> Attributed:
        made = values.as_subclass(cls)
        made.quant_state = scale
        return made


class QuantState:
    def __init__(self, scale: Tensor) -> None:
        self.absmax, self.others = scale, {"code": scale.clone()}


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_tensors_within_tensors_sleep(device: str) -> None:
    layer = nn.Linear(2, 2, device=device)
    two = TwoTensor(torch.ones(2, 2, device=device), torch.full((2, 2), 2.0, device=device))
    kept = QuantState(torch.full((3,), 5.0, device=device))
    values, mask = torch.ones(3, device=device), torch.tensor([True, False, True], device=device)
    layer.register_buffer("pair", two)
    layer.register_buffer("packed", Attributed(torch.ones(4, device=device), kept))
    layer.register_buffer("masked", torch.masked.masked_tensor(values, mask))  # has no memory
    state = TrainingState(layer)
    assert state.sleep().asleep == {"weights": (6 + 8 + 4 + 6 + 3) * 4 + 3}
    within = [two.a, two.b, kept.absmax, kept.others["code"]]
    host = state._parts["weights"]._host
    assert all(is_within(host, tensor) for tensor in within)
    state.wake()
    assert not any(is_within(host, tensor) for tensor in within)
    assert [tensor.sum().item() for tensor in within] == [4, 8, 15, 15]
    assert layer.get_buffer("masked").sum() == 2


def test_state_under_keys_with_equal_text_sleeps(device: str) -> None:
    training = Training(device)
    weight, flat = training.layer.into.weight, torch.arange(8.0, device=device)
    kept = {1: flat[:2], "1": flat[2:4], "a.b": flat[4:6], "a": deque([flat[6:]]), "a.0": 3}
    training.optimizer.state[weight] = kept
    with training.state.asleep():
        assert torch.cat([kept[1], kept["1"], kept["a.b"], *kept["a"]]).tolist() == list(range(8))
    assert flat.tolist() == list(range(8))


def test_device_memory_is_free_while_offloaded(device: str) -> None:
    if device == "cpu":
        state = TrainingState(nn.Linear(64, 64, bias=False))
        assert state.sleep().device_bytes == 0 == state.wake().device_bytes
        return
    state = TrainingState(nn.Linear(1 << 15, 1 << 15, bias=False, device=device))
    # Other processes of this run take and give memory meanwhile, perhaps as much.
    grown = [(state.sleep().device_bytes, state.wake().device_bytes) for _ in range(7)]
    assert sorted(asleep for asleep, _ in grown)[3] >= 3 << 30
    assert sorted(awake for _, awake in grown)[3] <= -3 << 30


@NEEDS_GPU
def test_all_remain_offloaded_if_the_device_has_too_little_memory() -> None:
    training = Training("cuda").step()
    big = nn.Linear(1 << 14, 1 << 14, device="cuda")
    training.layer.add_module("big", big)
    training.state.sleep()
    before = copies(training.tensors())
    fraction = torch.cuda.memory_allocated() + (256 << 20)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(fraction / torch.cuda.mem_get_info()[1])
    try:
        with pytest.raises(torch.OutOfMemoryError):
            training.state.wake()
        assert training.state.is_asleep
        assert_equal(training.tensors(), before)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    training.state.wake()
    assert_equal(training.tensors(), before)


@NEEDS_GPU
@pytest.mark.parametrize("side", [128, 1024], ids=["small", "large"])
def test_wake_allocates_no_more_memory_than_before(side: int) -> None:
    torch.cuda.empty_cache()
    count = (64 << 20) // (4 * side * side)
    model = nn.ParameterList(torch.zeros(side, side, device="cuda") for _ in range(count))
    before = torch.cuda.memory_reserved()
    state = TrainingState(model)
    state.sleep()
    state.wake()
    assert torch.cuda.memory_reserved() <= before + (4 << 20)


def test_memory_of_two_parts_sleeps_with_both(device: str) -> None:
    layer = nn.Linear(2, 2, bias=False, device=device)
    both = torch.arange(8.0, device=device)
    layer.weight.data, layer.weight.grad = both[:4].view(2, 2), both[4:].view(2, 2)
    state = TrainingState(layer)
    assert state.sleep(["gradients"]).left == ("the gradient of weight",)
    assert state.sleep().asleep == {"weights": 32}
    assert layer.weight.grad.tolist() == [[4.0, 5.0], [6.0, 7.0]]
    state.wake()
    assert both.tolist() == list(range(8))


def test_shared_memory_remains_on_the_cpu() -> None:
    layer = nn.Linear(2, 2).share_memory()
    before = copies(layer.state_dict())
    with TrainingState(layer, device="cpu").asleep() as report:
        assert report.left == ("weight", "bias")
    assert_equal(layer.state_dict(), before)
    assert layer.weight.is_shared()


def test_rows_of_an_embedding_are_not_offloaded(device: str) -> None:
    def train(sleeps: bool) -> Tensor:
        torch.manual_seed(0)
        emb = speedtorch.Embedding(20, 4, device=device)
        model = nn.ModuleDict({"emb": emb, "out": nn.Linear(4, 1, device=device)})
        optimizer = optim.Adam(model.parameters(), lr=0.1)
        speedtorch.attach(optimizer, model)
        state = TrainingState(model, optimizer)
        for number in range(4):
            optimizer.zero_grad()
            model["out"](emb(torch.arange(number, number + 3))).sum().backward()
            if sleeps and number == 2:
                with state.asleep():
                    assert model["out"].weight.numel() == 4
            optimizer.step()
            if sleeps:
                with state.asleep() as report:
                    assert report.asleep["weights"] == 20
        return emb.table["weight"].clone()

    assert torch.equal(train(True), train(False))


@NEEDS_GPU
def test_a_graph_whose_tensors_have_moved_raises() -> None:
    emb = speedtorch.Embedding(20, 4, device="cuda", capacity=8)
    model = nn.ModuleDict({"emb": emb, "out": nn.Linear(4, 1, device="cuda")})
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    def train(ids: Tensor) -> None:
        optimizer.zero_grad()
        model["out"](emb(ids)).sum().backward()
        optimizer.step()

    ids = torch.arange(3, device="cuda")
    step = graphed(train, ids, modules=model, optimizers=optimizer)
    step(ids)
    other = TrainingState(nn.Linear(2, 2, device="cuda"))
    with other.asleep():
        step(ids)  # of other tensors
    state = TrainingState(model, optimizer)
    state.sleep()
    held = [torch.empty(4, device="cuda") for _ in range(10_000)]  # also where the layer was
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"address of out.weight has changed"):
            step(ids)
        state.wake()
    del held
    graphed(train, ids, modules=model, optimizers=optimizer)(ids)


def test_wrong_arguments_raise(device: str) -> None:
    layer = nn.Linear(2, 2, device=device)
    state, adam = TrainingState(layer), optim.Adam(layer.parameters())
    wrong: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: TrainingState(adam), TypeError, "model: expected an nn.Module, got Adam"),
        (lambda: TrainingState(layer, 3), TypeError, "expected a torch.optim.Optimizer, got int"),
        (lambda: TrainingState(nn.Tanh()), ValueError, "it has no parameter and no buffer. Pass d"),
        (
            lambda: TrainingState(nn.Linear(2, 2, device="meta")),
            ValueError,
            "device: expected 'cuda' or 'cpu', got 'meta'",
        ),
        (lambda: state.sleep(["state"]), ValueError, "parts: expected some of .*, got 'state'"),
        (
            lambda: state.sleep(["optimizer"], discard=["weights"]),
            ValueError,
            "discard: expected some of `parts`, .*, got 'weights'",
        ),
    ]
    for call, kind, text in wrong:
        with pytest.raises(kind, match=text):
            call()
    assert layer.weight.device.type == device and not state.is_asleep


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:torch.quantize_per_tensor")
def test_tensors_that_cannot_sleep_raise_and_nothing_sleeps(device: str) -> None:
    layer = nn.Linear(2, 2, device=device)
    table = nn.Embedding(5, 2, sparse=True, device=device)
    model = nn.ModuleList([layer, table])
    state = TrainingState(model)
    table(torch.tensor([1], device=device)).sum().backward()
    with pytest.raises(ValueError, match="the gradient of 1.weight: expected a dense tensor"):
        state.sleep()
    assert not state.is_asleep and layer.weight.device.type == device
    assert state.sleep(["weights"]).asleep == {"weights": (6 + 10) * 4}
    state.wake()
    with torch.inference_mode():
        model.register_buffer("made", torch.ones(2, device=device))
    with pytest.raises(ValueError, match=r"made: .* created in torch.inference_mode\(\)"):
        state.sleep(["weights"])
    del model.made
    pairs = torch.ones(2, dtype=torch.complex64, device=device)
    rows = [torch.ones(1), torch.ones(2)]
    for odd, kind in (
        (pairs.conj(), "a lazily conjugated or negated view"),
        (pairs.conj().imag, "a lazily conjugated or negated view"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8).to(device), "a quantized"),
        (torch.nested.nested_tensor(rows, device=device), "a quantized or nested tensor"),
    ):
        model.register_buffer("odd", odd)
        with pytest.raises(ValueError, match=f"odd: .*got {kind}"):
            state.sleep(["weights"])
        assert not state.is_asleep
    del model.odd
    swapper = speedtorch.Swapper([layer], device=device)
    with swapper.use(layer), pytest.raises(ValueError, match="a Swapper offloads this tensor"):
        state.sleep(["weights"])


def test_calls_of_several_threads_are_serialized(device: str) -> None:
    training = Training(device).step(2)
    expected = copies(training.tensors())

    def work(_: int) -> None:
        for _ in range(20):
            training.state.sleep()
            training.state.wake()

    with ThreadPool(3) as pool:
        pool.map(work, range(3))
    assert_equal(training.tensors(), expected)


def test_a_model_is_freed_with_its_state_or_remains_on_the_host(device: str) -> None:
    training = Training(device).step()
    with training.state.asleep():
        pass
    gone = weakref.ref(training.layer.into.weight)
    state, training.layer, training.optimizer = training.state, None, None  # type: ignore[assignment]
    state._model = state._optimizers = None  # type: ignore[assignment]
    assert gone() is None
    training = Training(device).step()
    expected = copies(training.tensors())
    training.state.sleep()
    del training.state
    assert_equal(training.tensors(), expected)


def assert_errors_lose_nothing(
    device: str, call: str, error: Callable[[], BaseException], every: int, **kept: bool
) -> None:
    """Interrupts a call at its lines; the first word of `call` names the method."""
    expected = copies(Training(device).step(2).tensors())
    method = call.partition(" ")[0]

    def prepared() -> Training:
        training = Training(device, **kept).step(2)
        if call != "sleep the first time":
            with training.state.asleep():
                pass
        if method == "wake":
            training.state.sleep()
        return training

    interrupted = every_interrupt(
        prepared, lambda training: getattr(training.state, method)(), error, every=every
    )
    for number, (training, _) in enumerate(interrupted):
        assert gc.isenabled() and torch.is_grad_enabled()
        assert_equal(training.tensors(), expected)
        if number % 2:
            training.state.sleep()
            assert_equal(training.tensors(), expected)
        training.state.wake()
        assert_equal(training.tensors(), expected)
        assert_trains_on(training, steps=1)


ERRORS = pytest.mark.parametrize(
    "error", [KeyboardInterrupt, out_of_memory], ids=["ctrl-c", "memory"]
)


@EVERY
@ERRORS
@pytest.mark.parametrize("call", ["sleep", "wake"])
def test_an_error_at_any_line_loses_nothing(
    call: str, error: Callable[[], BaseException], every: int, device: str
) -> None:
    assert_errors_lose_nothing(device, call, error, every)


def test_storages_that_an_error_left_on_the_device_are_filled_again(device: str) -> None:
    expected = copies(Training(device).step(2).tensors())
    training = Training(device).step(2)
    training.state.sleep()
    with Lines(PACKAGE) as lines:
        training.state.wake()
    assert lines.seen is not None
    text = [linecache.getline(file, line).strip() for file, line, _ in lines.seen]
    filled = 1 + text.index("self._filling = []")  # all bytes are copied, tensors still offloaded
    training.state.sleep()
    with Lines(PACKAGE, filled) as lines:
        training.state.wake()
    assert lines.raised is not None and training.state.is_asleep
    if device == "cuda":
        torch.cuda._sleep(1 << 28)  # what torch queues now comes late
    training.state.sleep()
    training.state.wake()
    assert_equal(training.tensors(), expected)
